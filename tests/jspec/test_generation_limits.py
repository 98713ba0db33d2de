"""The context's end, unusable logits, and requests and settings that are refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.ngram import ngram
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.model import Model
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import tiny

CONTEXT = tiny.CONFIG.max_context
GAMMA = 3


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def target() -> Model:
    return tiny.model()


def drafter(name: str) -> BoundDrafter | None:
    if name == "plain":
        return None
    model = target()
    return ngram(3, 1) if name == "ngram" else draft_model(model.config, model.params)


def decoder(name: str, model: Model | None = None) -> Decoder:
    speculation = SpeculationConfig(0 if name == "plain" else GAMMA)
    return Decoder(model or target(), drafter(name), speculation, batch_size=3)


@pytest.mark.parametrize("name", ["plain", "ngram", "draft"])
def test_generation_to_the_end_of_the_context(name: str) -> None:
    long = tuple(int(t) for t in np.random.default_rng(1).integers(0, 61, size=CONTEXT - 1))
    params = SamplingParams(max_new_tokens=500)
    found = decoder(name).generate([Request(p, params) for p in (long, long[:40], long[:1])])
    # A token at the last position of the context is the last that can be run, and one follows a
    # token that was run: prompt and output fill the context exactly.
    assert [len(c.token_ids) for c in found] == [1, CONTEXT - 40, CONTEXT - 1]
    assert {c.finish_reason for c in found} == {"length"}
    reference = tiny.to_numpy(target().config, target().params)
    for prompt, completion in zip((long, long[:40], long[:1]), found, strict=True):
        tokens, gaps = reference.greedy(prompt, len(completion.token_ids))
        assert min(gaps) > 1e-4
        assert completion.token_ids == tuple(tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["plain", "ngram", "draft"])
def test_unusable_logits_end_one_row_and_no_other(name: str, temperature: float) -> None:
    prompts = tiny.prompts(3)
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=11)
    asked = [Request(prompt, params) for prompt in prompts]
    healthy = decoder(name).generate(asked)
    # Poison the embedding of a token that the first row comes to, and no other row knows.
    others = {t for i in (1, 2) for t in (*prompts[i], *healthy[i].token_ids)}
    own = healthy[0].token_ids
    step = next(i for i, t in enumerate(own) if i >= 2 and t not in {*others, *own[:i]})
    model = target()
    poisoned = dataclasses.replace(
        model.params, embedding=model.params.embedding.at[own[step]].set(jnp.nan)
    )
    ill = dataclasses.replace(model, params=poisoned)
    found = decoder(name, ill).generate(asked)
    assert found[0].finish_reason == "error"
    if temperature == 0 or name == "plain":
        # The poisoned token is emitted; what would follow it is not known.
        assert found[0].token_ids == own[: step + 1]
    assert found[0].token_ids[-1] == own[step]
    length = len(found[0].token_ids)
    assert found[0].error is not None
    assert "request 0" in found[0].error
    assert f"step {length}" in found[0].error
    # The other rows are those of a batch without the first, up to the last token.
    alone = decoder(name).generate(asked[1:])
    for other, expected in zip(found[1:], alone, strict=True):
        assert other.token_ids == expected.token_ids
        assert other.error is None
        assert other.finish_reason == "length"
        np.testing.assert_array_equal(other.counts.histogram, expected.counts.histogram)


def test_a_prompt_with_unusable_logits_emits_nothing() -> None:
    model = target()
    poisoned = dataclasses.replace(
        model.params, embedding=model.params.embedding.at[7].set(jnp.inf)
    )
    ill = dataclasses.replace(model, params=poisoned)
    (found,) = Decoder(ill, batch_size=1).generate([Request((3, 7, 4))])
    assert found.token_ids == ()
    assert found.finish_reason == "error"
    assert found.counts.rounds == 0
    assert "step 0" in (found.error or "")


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (Request(()), "requests[1].token_ids", ["empty", "at least one"]),
        (Request((1,) * 64), "requests[1].token_ids", ["64 tokens", "context holds 64", "shorten"]),
        (Request((1,) * 70), "requests[1].token_ids", ["70 tokens", "64"]),
        (Request((1, 61)), "requests[1].token_ids", ["=61", "61 tokens", "tokenizer"]),
        (Request((1, -1)), "requests[1].token_ids", ["=-1", "outside"]),
        (
            Request((1,), SamplingParams(stop_token_ids=(3, 99))),
            "requests[1].stop_token_ids",
            ["=99", "outside"],
        ),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    request_: Request, field: str, words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        decoder("plain").stream([Request((1, 2)), request_])
    assert caught.value.field == field
    assert caught.value.remedy
    for word in words:
        assert word in str(caught.value)


def test_ids_that_only_pad_the_embedding_are_refused() -> None:
    model = target()
    padded = dataclasses.replace(model, config=dataclasses.replace(model.config, token_count=50))
    with pytest.raises(InputError, match="50 tokens"):
        Decoder(padded).generate([Request((50,))])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"speculation": SpeculationConfig(4)}, "gamma"),
        ({"batch_size": 0}, "batch_size"),
        ({"prefill_width": 0}, "prefill_width"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        Decoder(target(), **settings)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert str(caught.value.value) in str(caught.value)
    assert caught.value.remedy


def test_a_drafter_without_gamma_is_not_run() -> None:
    plain = Decoder(target(), ngram(), SpeculationConfig(gamma=0))
    assert plain.drafter is None
    assert Decoder(target()).speculation.gamma == 0
    assert Decoder(target(), ngram()).speculation.gamma == SpeculationConfig().gamma


def test_what_is_no_drafter_is_refused() -> None:
    with pytest.raises(InputError, match=r"drafter=.*is no drafter; give jspec\.ngram\(\)"):
        Decoder(target(), ngram)  # type: ignore[arg-type]
