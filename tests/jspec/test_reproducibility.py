"""The same request gives the same sample whatever is decoded beside it, and how it is chunked."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest

from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.ngram import ngram
from jspec.generation import Decoder
from jspec.requests import Completion, Request
from jspec.sampling_params import SamplingParams
from tests import tiny

TARGET = tiny.model()
GAMMA = 3
DRAFTERS: dict[str, BoundDrafter | None] = {
    "plain": None,
    "ngram": ngram(3, 1),
    "nearby": draft_model(TARGET.config, tiny.nearby(TARGET.params, 0.1)),
}


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def requests() -> list[Request]:
    """Rows of several temperatures and truncations; the last one is greedy."""
    sampled = [
        SamplingParams(temperature=0.7, seed=1, max_new_tokens=30),
        SamplingParams(temperature=1.0, top_k=8, seed=2, max_new_tokens=24),
        SamplingParams(temperature=0.9, top_p=0.8, seed=2**63 + 5, max_new_tokens=30),
        SamplingParams(temperature=1.2, min_p=0.05, seed=4, max_new_tokens=17),
        SamplingParams(temperature=0.0, max_new_tokens=30, seed=5),
    ]
    return [Request(p, params) for p, params in zip(tiny.prompts(5), sampled, strict=True)]


def decode(
    name: str, asked: Sequence[Request], batch_size: int = 3, rounds_per_chunk: int = 64
) -> list[Completion]:
    speculation = SpeculationConfig(
        gamma=0 if DRAFTERS[name] is None else GAMMA, rounds_per_chunk=rounds_per_chunk
    )
    return Decoder(TARGET, DRAFTERS[name], speculation, batch_size=batch_size).generate(asked)


@functools.cache
def baseline(name: str) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in decode(name, requests())]


@pytest.mark.parametrize("name", DRAFTERS)
def test_order_slot_and_neighbours_do_not_matter(name: str) -> None:
    asked = requests()
    for order in ([4, 3, 2, 1, 0], [2, 0, 4], [1, 1, 1, 3]):
        found = decode(name, [asked[i] for i in order])
        assert [c.token_ids for c in found] == [baseline(name)[i] for i in order]


@pytest.mark.parametrize("name", DRAFTERS)
def test_batch_size_does_not_matter(name: str) -> None:
    for batch_size in (1, 8):
        found = decode(name, requests(), batch_size)
        assert [c.token_ids for c in found] == baseline(name)


@pytest.mark.parametrize("name", DRAFTERS)
def test_chunking_does_not_matter(name: str) -> None:
    for rounds in (1, 2, 5):
        found = decode(name, requests(), rounds_per_chunk=rounds)
        assert [c.token_ids for c in found] == baseline(name)


def test_seeds_matter_and_greedy_rows_ignore_them() -> None:
    prompt = tiny.prompts(2)[1]
    rows = [SamplingParams(temperature=1.0, seed=s, max_new_tokens=30) for s in (1, 2, 1)]
    found = decode("ngram", [Request(prompt, params) for params in rows])
    assert found[0].token_ids == found[2].token_ids != found[1].token_ids
    rows = [SamplingParams(seed=s, max_new_tokens=30) for s in (1, 2, None)]
    found = decode("ngram", [Request(prompt, params) for params in rows])
    assert len({c.token_ids for c in found}) == 1


def test_unseeded_requests_share_no_stream() -> None:
    params = SamplingParams(temperature=1.5, max_new_tokens=30)
    asked = [Request(tiny.prompts(2)[1], params)] * 3
    found = [c.token_ids for _ in range(2) for c in decode("ngram", asked)]
    assert len(set(found)) == 6


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    prompts = tiny.prompts(3)
    cold = [Request(p, SamplingParams(temperature=1e-30, max_new_tokens=30)) for p in prompts]
    greedy = [Request(p, SamplingParams(max_new_tokens=30)) for p in prompts]
    expected = [c.token_ids for c in decode("plain", greedy)]
    for name in DRAFTERS:
        assert [c.token_ids for c in decode(name, cold)] == expected
