"""Sampling parameters through whole generations: the same with and without speculation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from jspec import generation, randomness
from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.ngram import ngram
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.requests import Completion, Request
from jspec.sampling_params import SamplingParams
from tests import tiny
from tests.oracles import edits as oracle
from tests.oracles.edits import Wishes

NEW = 24
TARGET = tiny.model(eos=(7,))
REFERENCE = tiny.to_numpy(TARGET.config, TARGET.params)
DRAFTERS: dict[str, BoundDrafter | None] = {
    "none": None,
    "ngram": ngram(2, 1),
    "nearby": draft_model(TARGET.config, tiny.nearby(TARGET.params, 0.1)),
}


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


class Letters:
    """A tokenizer of 61 characters, one a token."""

    vocab_size = 61
    text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[:61]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.text.index(letter) for letter in text if letter in self.text]

    def stream(self) -> Letters:
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.text[token] for token in ids)

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


LETTERED = dataclasses.replace(TARGET, tokenizer=Letters())  # type: ignore[arg-type]


def decoder(name: str, rounds_per_chunk: int = 5, batch_size: int = 4, **more: Any) -> Decoder:
    drafter = DRAFTERS[name]
    settings = SpeculationConfig(4 if drafter else 0, rounds_per_chunk=rounds_per_chunk)
    return Decoder(LETTERED, drafter, settings, batch_size=batch_size, **more)


WISHES = [
    Wishes(repetition=1.4, min_new=NEW, stops=(7,)),
    Wishes(frequency=1.0, presence=0.5, bias={3: 2.0, 7: -9.0}),
    Wishes(bad_words=((11,), (12, 13)), repetition=0.9, bias={12: 1.5}),
    Wishes(),
]


def wanted(wish: Wishes, **more: Any) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=wish.repetition,
        frequency_penalty=wish.frequency,
        presence_penalty=wish.presence,
        logit_bias=wish.bias,
        bad_words=tuple(tuple(word) for word in wish.bad_words),
        min_new_tokens=wish.min_new,
        max_new_tokens=NEW,
        **more,
    )


@functools.cache
def expected() -> list[tuple[int, ...]]:
    """Greedy tokens by the float64 model and one-node-at-a-time edits."""
    results = []
    for prompt, wish in zip(tiny.prompts(4), WISHES, strict=True):
        generated: list[int] = []
        while len(generated) < NEW and generated[-1:] != [7]:
            logits, _ = REFERENCE.run([*prompt, *generated])
            scores = oracle.edited(logits[-1], wish, prompt, generated)
            best, second = np.sort(scores)[::-1][:2]
            assert best - second > 1e-4  # no near tie: float32 must agree
            generated.append(int(np.argmax(scores)))
        results.append(tuple(generated))
    return results


@pytest.mark.parametrize(
    ("name", "batch_size"), [("none", 4), ("ngram", 4), ("nearby", 4), ("nearby", 1)]
)
def test_greedy_with_edits_is_the_references(name: str, batch_size: int) -> None:
    requests = [Request(p, wanted(w)) for p, w in zip(tiny.prompts(4), WISHES, strict=True)]
    found = decoder(name, batch_size=batch_size).generate(requests)
    assert [done.token_ids for done in found] == expected()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    params = [wanted(w, temperature=0.8, seed=i) for i, w in enumerate(WISHES)]
    requests = [Request(p, s) for p, s in zip(tiny.prompts(4), params, strict=True)]
    together = decoder(name).generate(requests)
    alone = decoder(name, batch_size=1).generate(requests)
    turned = decoder(name).generate(requests[::-1])[::-1]
    for one, two, three in zip(together, alone, turned, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids


# --- stop texts -----------------------------------------------------------------------------------


@functools.cache
def unstopped(name: str) -> list[Completion]:
    return decoder(name).generate([Request(p, wanted(Wishes())) for p in tiny.prompts(4)])


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rounds_per_chunk", [1, 64])
@pytest.mark.parametrize("size", [1, 5])
def test_a_stop_text_cuts_everything_alike(name: str, rounds_per_chunk: int, size: int) -> None:
    for start in (0, 3, 11):
        params, plain = [], unstopped(name)
        for done in plain:
            stop = done.text[start : start + size]
            params.append(wanted(Wishes(), stop=(stop, "never"), logprobs=0) if stop else None)
        kept = [(p, s, d) for p, s, d in zip(tiny.prompts(4), params, plain, strict=True) if s]
        found = decoder(name, rounds_per_chunk).generate([Request(p, s) for p, s, _ in kept if s])
        for done, (_, asked, whole) in zip(found, kept, strict=True):
            assert asked is not None
            stop = asked.stop[0]
            text = whole.text.split(stop)[0]
            assert done.finish_reason == "stop"
            assert done.stop_reason == stop
            assert done.text == text
            assert done.token_ids == whole.token_ids[: len(text) + len(stop)]
            assert done.logprobs is not None
            assert tuple(entry.token_id for entry in done.logprobs) == done.token_ids
            assert done.counts.emitted == len(done.token_ids)
            counts = done.counts
            assert counts.rounds <= len(done.token_ids)
            assert (counts.accepted <= counts.examined).all()
            accepted = int(counts.accepted.sum())
            # Every round gives its accepted drafts and one token more, but for the one cut short.
            assert len(done.token_ids) - counts.rounds <= accepted <= len(done.token_ids)


def test_a_stop_text_in_the_last_token_beats_the_budget_and_min_new_tokens_beats_it() -> None:
    whole = unstopped("none")[1]
    assert len(whole.text) == NEW
    last = whole.text[-1]
    first = whole.text.index(last)
    params = wanted(Wishes(), stop=last)
    done = decoder("ngram").generate([Request(tiny.prompts(2)[1], params)])[0]
    assert (done.text, done.finish_reason) == (whole.text[:first], "stop")
    params = dataclasses.replace(params, min_new_tokens=NEW - 1)
    done = decoder("ngram").generate([Request(tiny.prompts(2)[1], params)])[0]
    assert (done.text, done.stop_reason) == (whole.text[:-1], last)
    assert done.token_ids == whole.token_ids


def test_streamed_text_never_shows_a_stop_text() -> None:
    whole = unstopped("none")[1]
    stop = whole.text[9:13]
    request = Request(tiny.prompts(2)[1], wanted(Wishes(), stop=stop))
    deltas = list(decoder("ngram", rounds_per_chunk=1).stream([request]))
    assert deltas[-1].completion is not None
    text = "".join(delta.text for delta in deltas)
    assert text == whole.text.split(stop)[0] == deltas[-1].completion.text
    ids = [token for delta in deltas for token in delta.token_ids]
    assert tuple(ids) == deltas[-1].completion.token_ids


# --- log probabilities ----------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64) - np.max(logits)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("prefill_width", [1, 128])
def test_log_probabilities_are_the_references(name: str, prefill_width: int) -> None:
    wishes = [WISHES[0], WISHES[1], Wishes()]
    params = [
        wanted(wishes[0], logprobs=3, prompt_logprobs=2),
        wanted(wishes[1], temperature=0.7, seed=1, logprobs=0),
        wanted(wishes[2], temperature=0.9, top_k=5, seed=2, prompt_logprobs=1),
    ]
    prompts = tiny.prompts(4)[1:]
    requests = [Request(p, s) for p, s in zip(prompts, params, strict=True)]
    found = decoder(name, prefill_width=prefill_width).generate(requests)
    for prompt, asked, wish, done in zip(prompts, params, wishes, found, strict=True):
        logits, _ = REFERENCE.run([*prompt, *done.token_ids])
        raw = [log_softmax(row) for row in logits]
        if asked.prompt_logprobs is None:
            assert done.prompt_logprobs is None
        else:
            assert done.prompt_logprobs is not None
            assert len(done.prompt_logprobs) == len(prompt)
            assert done.prompt_logprobs[0] is None
            for at, entry in enumerate(done.prompt_logprobs[1:], start=1):
                assert entry is not None
                assert entry.token_id == prompt[at]
                assert entry.raw == pytest.approx(raw[at - 1][prompt[at]], abs=1e-4)
                check_top(entry.top_raw, raw[at - 1], asked.prompt_logprobs)
        if asked.logprobs is None:
            assert done.logprobs is None
            continue
        assert done.logprobs is not None
        assert len(done.logprobs) == len(done.token_ids)
        for step, entry in enumerate(done.logprobs):
            token, at = done.token_ids[step], len(prompt) + step - 1
            assert entry.token_id == token
            assert entry.raw == pytest.approx(raw[at][token], abs=1e-4)
            scores = oracle.edited(logits[at], wish, prompt, done.token_ids[:step])
            greedy = asked.temperature == 0
            law = log_softmax(scores / (asked.temperature or 1.0))
            assert entry.processed == pytest.approx(0.0 if greedy else law[token], abs=1e-4)
            check_top(entry.top_raw, raw[at], asked.logprobs)
            assert len(entry.top_processed) == asked.logprobs


def check_top(found: tuple[tuple[int, float], ...], law: np.ndarray, count: int) -> None:
    best = np.argsort(-law, kind="stable")[:count]
    assert [token for token, _ in found] == best.tolist()
    np.testing.assert_allclose([value for _, value in found], law[best], atol=1e-4)


def test_logprobs_change_no_token() -> None:
    params = wanted(Wishes(), temperature=0.9, seed=4)
    with_them = dataclasses.replace(params, logprobs=5, prompt_logprobs=0)
    prompt = tiny.prompts(3)[2]
    for name in DRAFTERS:
        one, two = (decoder(name).generate([Request(prompt, p)])[0] for p in (params, with_them))
        assert one.token_ids == two.token_ids


# --- several samples ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "batch_size"), [("none", 4), ("ngram", 8), ("nearby", 2)])
def test_samples_share_a_prefill_and_are_those_of_their_seeds(name: str, batch_size: int) -> None:
    sizes = [3, 1, 2]
    prompts = tiny.prompts(4)[1:]
    params = [wanted(WISHES[i], temperature=0.8, seed=11, n=n) for i, n in enumerate(sizes)]
    requests = [Request(p, s) for p, s in zip(prompts, params, strict=True)]
    prefilled: list[int] = []

    def spy(**given: Any) -> Any:
        prefilled.append(int(np.asarray(given["state"].active).sum()))
        return run_prefill(**given)

    run_prefill = generation.run_prefill
    with mock.patch.object(generation, "run_prefill", spy):
        found = decoder(name, batch_size=batch_size).generate(requests)
    assert [done.sample for done in found] == [0, 1, 2, 0, 0, 1]
    assert sum(prefilled) == {2: 4, 4: 3, 8: 3}[batch_size]
    # The first sample is the request's own; every one is that of its derived seed.
    for index, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        start = sum(sizes[:index])
        for number in range(sizes[index]):
            high, low = (int(word) for word in randomness.seed_words(11, number))
            alone = dataclasses.replace(asked, n=1, seed=high << 32 | low)
            single = decoder(name).generate([Request(prompt, alone)])[0]
            assert single.token_ids == found[start + number].token_ids
    assert len({done.token_ids for done in found[:3]}) > 1


def test_unseeded_samples_differ() -> None:
    params = wanted(Wishes(), temperature=2.0, n=4)
    found = decoder("none").generate([Request(tiny.prompts(2)[1], params)])
    assert len({done.token_ids for done in found}) == 4


def test_seeds_of_samples_do_not_meet() -> None:
    words = [tuple(randomness.seed_words(s, n).tolist()) for s in range(50) for n in range(50)]
    assert len(set(words)) == len(words)
    assert randomness.seed_words(2**64 - 1).tolist() == [2**32 - 1, 2**32 - 1]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={61: 1.0}), "logit_bias"),
        (SamplingParams(bad_words=((3, 61),)), "bad_words"),
        (SamplingParams(stop="x"), "stop"),
        (SamplingParams(bad_words=("x",)), "bad_words"),
    ],
)
def test_what_the_model_cannot_honour_is_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InputError) as caught:
        Decoder(TARGET).generate([Request((1,), params)])
    assert caught.value.field == f"requests[0].{field}"


def test_nothing_left_to_choose_is_an_error_of_the_row() -> None:
    every = tuple((token,) for token in range(61))
    requests = [
        Request((1, 2), SamplingParams(bad_words=every, max_new_tokens=4)),
        Request((1, 2), SamplingParams(max_new_tokens=4)),
    ]
    found = decoder("ngram").generate(requests)
    assert [done.finish_reason for done in found] == ["error", "length"]
    assert found[0].token_ids == ()
    assert jax.devices()  # the process is fine
