"""The short way in: kinds of prompts, sampling for all or for each, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.errors import InputError
from tests import tiny


class Letters:
    """A tokenizer of single letters, a = 10 and so on; 1 begins a text."""

    vocab_size = 61

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = [10 + ord(letter) - ord("a") for letter in text]
        return [1, *ids] if add_special_tokens else ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(turn["role"][0] + turn["content"] for turn in messages) + "z"

    def stream(self) -> Any:
        return LetterStream()


class LetterStream:
    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + (i - 10) % 26) for i in ids)

    def finish(self) -> str:
        return "!"


TARGET = tiny.model()
WITH_LETTERS = dataclasses.replace(TARGET, tokenizer=Letters())  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def test_prompts_of_every_kind() -> None:
    assert jspec.to_token_ids(TARGET, [3, 4, 5]) == (3, 4, 5)
    assert jspec.to_token_ids(TARGET, []) == ()
    assert jspec.to_token_ids(WITH_LETTERS, "abc") == (1, 10, 11, 12)
    chat = [{"role": "user", "content": "b"}]
    assert jspec.to_token_ids(WITH_LETTERS, chat) == (30, 11, 35)  # "ubz", no second beginning


@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "x"}]])
def test_text_needs_a_tokenizer(prompt: Any) -> None:
    with pytest.raises(InputError, match="no tokenizer; give token ids") as caught:
        jspec.to_token_ids(TARGET, prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("prompt", [[1, "a"], [1.5], [{"role": "user", "content": "x"}, 3]])
def test_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InputError, match="neither a chat turn nor a token id"):
        jspec.to_token_ids(WITH_LETTERS, prompt)


@pytest.mark.parametrize("prompt", [5, None, b"\x01\x02", {1, 2}, {"role": "user"}])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InputError, match="neither text, a chat nor token ids") as caught:
        jspec.generate(WITH_LETTERS, [prompt])
    assert caught.value.field == "prompt"


def test_truth_values_are_no_token_ids() -> None:
    with pytest.raises(InputError, match="no tokenizer; give token ids"):
        jspec.to_token_ids(TARGET, [True, False])


def test_counts_beyond_int32_mean_no_limit() -> None:
    speculation = jspec.SpeculationConfig(gamma=0, rounds_per_chunk=2**40)
    huge, none = (
        jspec.generate(
            TARGET,
            [[1, 2, 3]],
            sampling=jspec.SamplingParams(temperature=1.0, seed=1, top_k=k, max_new_tokens=6),
            speculation=speculation,
        )
        for k in (2**40, 0)
    )
    assert huge[0].token_ids == none[0].token_ids


def test_a_minimum_beyond_int32_holds_back_every_stop() -> None:
    stopping = dataclasses.replace(TARGET, eos_token_ids=tuple(range(30)))
    sampling = jspec.SamplingParams(max_new_tokens=10**400, min_new_tokens=10**400)
    (completion,) = jspec.generate(stopping, [[1, 2, 3]], sampling=sampling)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == TARGET.config.max_context - 3


def test_log_probabilities_of_the_whole_vocabulary() -> None:
    sampling = jspec.SamplingParams(max_new_tokens=1, logprobs=61)  # no power of two
    (completion,) = jspec.generate(TARGET, [[1, 2, 3]], sampling=sampling)
    assert completion.logprobs is not None
    assert {token for token, _ in completion.logprobs[0].top_raw} == set(range(61))


def test_arrays_of_ids_are_prompts() -> None:
    for array in (np.array([3, 4, 5]), np.array([3, 4, 5], np.uint8), jnp.array([3, 4, 5])):
        ids = jspec.to_token_ids(TARGET, array)
        assert ids == (3, 4, 5)
        assert {type(token) for token in ids} == {int}


def test_one_string_is_not_a_list_of_prompts() -> None:
    with pytest.raises(InputError, match="give a list of prompts") as caught:
        jspec.generate(WITH_LETTERS, "hello")
    assert caught.value.field == "prompts"


def test_sampling_must_match_the_prompts() -> None:
    with pytest.raises(InputError, match="does not match 3 prompts") as caught:
        jspec.generate(TARGET, [[1], [2], [3]], sampling=[jspec.SamplingParams()] * 2)
    assert caught.value.field == "sampling"


def test_a_stream_is_checked_when_it_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"requests\[1\]"):
        jspec.stream(TARGET, [[1], [99]])


def test_generate_keeps_the_order_and_takes_sampling_for_each() -> None:
    prompts = tiny.prompts(3)
    sampling = [jspec.SamplingParams(max_new_tokens=n) for n in (5, 2, 9)]
    found = jspec.generate(
        TARGET, prompts, sampling=sampling, drafter=jspec.ngram(3, 1), batch_size=2
    )
    assert [len(c.token_ids) for c in found] == [5, 2, 9]
    reference = tiny.to_numpy(TARGET.config, TARGET.params)
    for prompt, completion in zip(prompts, found, strict=True):
        assert completion.token_ids == tuple(reference.greedy(prompt, len(completion.token_ids))[0])
        assert completion.text == ""


def test_streamed_text_adds_up() -> None:
    sampling = jspec.SamplingParams(max_new_tokens=12)
    texts = {0: "", 1: ""}
    whole = {}
    for delta in jspec.stream(WITH_LETTERS, ["ab", "c"], sampling=sampling):
        texts[delta.index] += delta.text
        if delta.completion is not None:
            whole[delta.index] = delta.completion
    for index, completion in whole.items():
        assert texts[index] == completion.text
        assert completion.text.endswith("!")
        assert len(completion.text) == 13
        assert completion.text[:-1] == LetterStream().push(completion.token_ids)


def test_trees_are_streamed() -> None:
    sampling = jspec.SamplingParams(max_new_tokens=6)
    deltas = jspec.stream(TARGET, [[5, 6, 5, 6, 5]], drafter=jspec.ngram_tree(3), sampling=sampling)
    streamed = [token for delta in deltas for token in delta.token_ids]
    (plain,) = jspec.generate(TARGET, [[5, 6, 5, 6, 5]], sampling=sampling)
    assert tuple(streamed) == plain.token_ids


def test_an_early_exit_and_a_draft_model_from_models() -> None:
    assert jspec.early_exit(TARGET, 1).name == "early-exit-1l"
    assert jspec.draft_model(TARGET, TARGET).name == "draft-model-2l"


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    class Other(Letters):
        def vocabulary(self) -> dict[str, int]:
            return {"a": 10, "b": 12}

    class Own(Letters):
        def vocabulary(self) -> dict[str, int]:
            return {"a": 10, "b": 11, "c": 12}

    target = dataclasses.replace(TARGET, tokenizer=Own())  # type: ignore[arg-type]
    drafter = dataclasses.replace(TARGET, name="other", tokenizer=Other())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="1 of 3 tokens agree") as caught:
        jspec.draft_model(target, drafter)
    assert caught.value.value == "other"


def test_a_tree_by_a_draft_model() -> None:
    bound = jspec.draft_tree(TARGET, TARGET, (-1, 0, 0, 1), "top-k")
    assert (bound.name, bound.drafts) == ("draft-tree-3", 3)
    plain = jspec.generate(TARGET, [(1, 2, 3)])
    drafted = jspec.generate(TARGET, [(1, 2, 3)], drafter=bound)
    assert drafted[0].token_ids == plain[0].token_ids
    assert drafted[0].counts.rounds < plain[0].counts.rounds
