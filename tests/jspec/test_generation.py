"""Whole generations by a tiny model: the same tokens as plain decoding, whatever drafts them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from jspec.config import SpeculationConfig, Verification
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model, early_exit
from jspec.drafting.ngram import ngram
from jspec.generation import Decoder
from jspec.requests import Completion, Request
from jspec.sampling_params import SamplingParams
from tests import tiny


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


NEW = 40
TARGET = tiny.model()


def requests(count: int = 8, new: int = NEW) -> list[Request]:
    params = SamplingParams(max_new_tokens=new)
    return [Request(prompt, params) for prompt in tiny.prompts(count)]


def drafters() -> dict[str, BoundDrafter]:
    # One architecture for all three draft models, so that they share their compiled programs.
    return {
        "target-itself": draft_model(TARGET.config, TARGET.params),
        "nearby": draft_model(TARGET.config, tiny.nearby(TARGET.params, 0.1)),
        "unrelated": draft_model(TARGET.config, tiny.params(seed=9)),
        "early-exit": early_exit(TARGET.config, TARGET.params, 1),
        "ngram": ngram(3, 1),
    }


DRAFTERS = drafters()


@functools.cache
def plain() -> list[Completion]:
    return Decoder(TARGET).generate(requests())


def decode(
    drafter: BoundDrafter,
    gamma: int,
    verification: Verification = "token",
    batch_size: int = 3,
    rounds_per_chunk: int = 5,
) -> list[Completion]:
    """Decode as many of the requests as two batches hold, eight at most."""
    settings = SpeculationConfig(gamma, verification, rounds_per_chunk)
    decoder = Decoder(TARGET, drafter, settings, batch_size=batch_size)
    return decoder.generate(requests()[: 2 * batch_size])


def check_same(found: list[Completion]) -> None:
    for completion, expected in zip(found, plain(), strict=False):
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == completion.counts.emitted == NEW


def test_plain_decoding_is_the_references() -> None:
    reference = tiny.to_numpy(TARGET.config, TARGET.params)
    for request, completion in zip(requests(), plain(), strict=True):
        tokens, gaps = reference.greedy(request.token_ids, NEW)
        assert min(gaps) > 1e-4  # no near tie: float32 must agree
        assert completion.token_ids == tuple(tokens)
        assert completion.counts.rounds == completion.counts.rounds_without_draft == NEW


@pytest.mark.parametrize("gamma", range(1, 7))
@pytest.mark.parametrize("name", ["target-itself", "nearby", "unrelated", "ngram"])
def test_every_gamma(name: str, gamma: int) -> None:
    verification: Verification = "block" if gamma in (2, 5) else "token"
    found = decode(DRAFTERS[name], gamma, verification)
    check_same(found)
    for completion in found:
        counts = completion.counts
        # Every round emits the accepted drafts and one more token.
        assert counts.emitted == counts.rounds + int(counts.accepted.sum())
        assert (counts.accepted <= counts.proposed).all()
        assert counts.discarded == 0


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", ["nearby", "ngram"])
def test_other_batch_sizes(name: str, batch_size: int) -> None:
    check_same(decode(DRAFTERS[name], 3, batch_size=batch_size))


def test_early_exit() -> None:
    check_same(decode(DRAFTERS["early-exit"], 3))


@pytest.mark.parametrize(("max_n", "min_n"), [(1, 1), (5, 2)])
def test_other_ngrams(max_n: int, min_n: int) -> None:
    check_same(decode(ngram(max_n, min_n), 3))


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_a_target_that_drafts_for_itself_is_always_right(gamma: int) -> None:
    # Also after a full acceptance, whose last draft the draft model itself never ran.
    for completion in decode(DRAFTERS["target-itself"], gamma):
        counts = completion.counts
        assert counts.proposed.sum() == counts.accepted.sum()
        full, rest = divmod(NEW, gamma + 1)
        assert int(counts.histogram[gamma, gamma]) >= full
        assert counts.rounds == full + (rest > 0)


def test_drafts_are_of_use_and_not_all_right() -> None:
    # Otherwise the tests above would say little.
    for name, low, high in [("nearby", 0.2, 0.95), ("unrelated", 0.0, 0.3), ("ngram", 0.1, 0.98)]:
        counts = [completion.counts for completion in decode(DRAFTERS[name], 3)]
        rate = sum(c.accepted.sum() for c in counts) / sum(c.proposed.sum() for c in counts)
        assert low <= rate <= high, name


def test_streaming_gives_the_same_tokens_piece_by_piece() -> None:
    settings = SpeculationConfig(gamma=3, rounds_per_chunk=1)
    decoder = Decoder(TARGET, DRAFTERS["ngram"], settings, batch_size=3)
    pieces: dict[int, list[tuple[int, ...]]] = {}
    for delta in decoder.stream(requests()[:4]):
        pieces.setdefault(delta.index, []).append(delta.token_ids)
        assert 0 < len(delta.token_ids) <= 4
        if delta.completion is not None:
            assert delta.completion.token_ids == sum(pieces[delta.index], ())
    for index, expected in enumerate(plain()[:4]):
        assert sum(pieces[index], ()) == expected.token_ids


@pytest.mark.parametrize("name", [None, "ngram", "nearby"])
def test_stops_and_budgets(name: str | None) -> None:
    whole = [completion.token_ids for completion in plain()[:3]]
    prompts = tiny.prompts(3)
    # A stop that the row meets (its first occurrence counts), a budget of one, and both.
    stop = whole[0][11]
    at = whole[0].index(stop) + 1
    asked = [
        Request(prompts[0], SamplingParams(max_new_tokens=NEW, stop_token_ids=(stop,))),
        Request(prompts[1], SamplingParams(max_new_tokens=1)),
        Request(prompts[2], SamplingParams(max_new_tokens=7, stop_token_ids=(whole[2][6],))),
    ]
    speculation = SpeculationConfig(gamma=3 if name else 0)
    decoder = Decoder(TARGET, DRAFTERS[name] if name else None, speculation, batch_size=3)
    found = decoder.generate(asked)
    assert found[0].token_ids == whole[0][:at]
    assert found[0].finish_reason == "stop"
    assert found[1].token_ids == whole[1][:1]
    assert found[1].finish_reason == "length"
    at = whole[2].index(whole[2][6]) + 1
    assert found[2].token_ids == whole[2][:at]
    assert found[2].finish_reason == "stop"  # it beats the budget that ends at the same token
    assert [c.counts.emitted for c in found] == [len(c.token_ids) for c in found]


def test_the_models_own_end_and_ignoring_it() -> None:
    first = plain()[0].token_ids
    ending = tiny.model(eos=(first[9], 60))
    prompt = tiny.prompts(1)[0]
    at = first.index(first[9]) + 1
    decoder = Decoder(ending, DRAFTERS["ngram"], SpeculationConfig(gamma=3), batch_size=3)
    ask = SamplingParams(max_new_tokens=NEW, seed=1)
    goes_on = SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=1)
    stops = SamplingParams(max_new_tokens=NEW, ignore_eos=True, stop_token_ids=(first[9],), seed=1)
    found = decoder.generate([Request(prompt, p) for p in (ask, goes_on, stops)])
    assert [c.token_ids for c in found] == [first[:at], first, first[:at]]
    assert [c.finish_reason for c in found] == ["stop", "length", "stop"]


def test_progress_is_told_and_times_are_in_order() -> None:
    seen: list[int] = []
    decoder = Decoder(TARGET, DRAFTERS["ngram"], SpeculationConfig(gamma=3), batch_size=3)
    found = decoder.generate(requests()[:4], on_progress=seen.append)
    assert seen == [1, 2, 3, 4]
    for completion in found:
        assert 0 < completion.timing.prefill < completion.timing.first <= completion.timing.end


def test_no_request_no_answer() -> None:
    assert Decoder(TARGET).generate([]) == []


def test_prefill_width_does_not_matter() -> None:
    for width in (1, 7):
        decoder = Decoder(TARGET, batch_size=3, prefill_width=width)
        found = decoder.generate(requests()[:3])
        assert [c.token_ids for c in found] == [c.token_ids for c in plain()[:3]]


def test_bfloat16_caches_are_asked_for() -> None:
    decoder = Decoder(TARGET, cache_dtype="bfloat16")
    state = decoder.new_state(requests()[:2])
    assert state.cache.keys[0].dtype == np.dtype("bfloat16")
