"""What is compiled: how often, and what the compiled chunk does with the caches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.dynamic_tree import dynamic_draft_tree
from jspec.drafting.eagle import eagle
from jspec.drafting.hybrid import hybrid
from jspec.drafting.ngram import ngram
from jspec.drafting.ngram_tree import ngram_tree
from jspec.generation import Decoder, run_chunk, run_prefill
from jspec.model import Model
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import tiny, tiny_eagle
from tests.oracles import hlo

TARGET = tiny.model(max_context=4096)
# Another number of key/value heads than the target's, so that their caches have other shapes.
SMALL = dataclasses.replace(TARGET.config, num_layers=1, num_kv_heads=1)
# Its tokens are fewer than this target's, which is of no matter here.
HEAD = (TARGET.config, tiny_eagle.config("eagle3"), tiny_eagle.params("eagle3"))
CASES: dict[str, tuple[BoundDrafter | None, int]] = {
    "plain": (None, 0),
    "ngram": (ngram(), 7),
    "draft-model": (draft_model(SMALL, tiny.params(SMALL)), 4),
    "draft-tree": (draft_tree(SMALL, tiny.params(SMALL), (-1, 0, 0, 1, 2), "top-k"), 4),
    # 7 nodes are run for 4 that are kept: its cache has more slots than the target's.
    "dynamic-tree": (dynamic_draft_tree(SMALL, tiny.params(SMALL), 4, 3, 3), 4),
    "ngram-tree": (ngram_tree(5, 4), 5),
    "eagle": (eagle(*HEAD), 4),
    "hybrid": (hybrid(draft_model(SMALL, tiny.params(SMALL))), 4),
}


@functools.cache
def compiled(name: str, rows: int, slots: int) -> tuple[Any, Any]:
    """Return the compiled chunk and its state."""
    drafter, gamma = CASES[name]
    decoder = Decoder(TARGET, drafter, SpeculationConfig(gamma), batch_size=rows)
    params = SamplingParams(max_new_tokens=slots - 30)
    state = decoder.new_state([Request((1, 2, 3), params)] * rows)
    assert state.cache.capacity == slots
    lowered = run_chunk.lower(
        program=decoder._program,
        params=TARGET.params,
        drafter_params=decoder._drafter_params,
        state=state,
        max_rounds=np.int32(4),
        until_finish=np.bool_(False),
    )
    # Of the compiler's stages only the last one, which no buffer depends on, is cut short.
    return lowered.compile({"xla_llvm_disable_expensive_passes": True}), state


def cache_buffers(state: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves((state.cache, state.drafter)) if leaf.ndim == 4]


# A single row is compiled otherwise only by what leaves its rows' axis out.
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 3) for name in CASES), ("plain", 1), ("dynamic-tree", 1)]
)
def test_caches_are_updated_in_place(name: str, rows: int) -> None:
    chunk, state = compiled(name, rows, 640)
    buffers = cache_buffers(state)
    total = sum(leaf.nbytes for leaf in buffers)
    assert chunk.memory_analysis().alias_size_in_bytes >= total
    shapes = {leaf.shape for leaf in buffers}
    writes = [write for write in hlo.loop_writes(chunk.as_text()) if write.shape in shapes]
    # A scatter fusion whose result aliases its operand writes the new entries alone.
    assert {write.op for write in writes} == {"scatter"}
    assert len(writes) >= len(buffers)
    # A copy inside a fusion is part of a read.
    text = chunk.as_text()
    every = [*hlo.loop_writes(text), *hlo.entry_writes(text)]
    assert not [write for write in every if write.op == "copy" and write.shape in shapes]


# Of drafters with caches of their own these have most to lose; lookups keep none.
@pytest.mark.parametrize("name", ["plain", "dynamic-tree", "eagle", "hybrid"])
def test_scratch_memory_does_not_grow_with_the_caches(name: str) -> None:
    rows, config, (bound, gamma) = 3, TARGET.config, CASES[name]
    small, _ = compiled(name, rows, 640)
    large, _ = compiled(name, rows, 1280)
    grown = large.memory_analysis().temp_size_in_bytes - small.memory_analysis().temp_size_in_bytes
    nodes = max(gamma + 1, getattr(bound and bound.drafter, "scratch", 0))
    # A further slot costs scores and weights of every head and node, the mask, a few integers and
    # no cache entry of any layer.
    scores = 2 * config.num_heads * nodes * 4
    assert grown <= 640 * rows * (scores + nodes + 64)


class Compilations:
    """Counts the programs that `run_chunk` and `run_prefill` compile from now on."""

    def __init__(self) -> None:
        # A method of every jitted function, though the public type does not name it. The cache is
        # not emptied: other tests use what is in it.
        self._functions: list[Any] = [run_chunk, run_prefill]
        self._before = [function._cache_size() for function in self._functions]

    def so_far(self) -> tuple[int, int]:
        now = [function._cache_size() for function in self._functions]
        return now[0] - self._before[0], now[1] - self._before[1]


def test_one_program_serves_every_request_of_a_bucket() -> None:
    def decode(*rows: tuple[int, SamplingParams], rounds: int = 64, model: Model = TARGET) -> None:
        speculation = SpeculationConfig(2, rounds_per_chunk=rounds)
        decoder = Decoder(model, ngram(2, 1), speculation, batch_size=2)
        decoder.generate([Request((size,) * size, params) for size, params in rows])

    settings = [
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=100, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3),
        SamplingParams(max_new_tokens=3, stop_token_ids=(5, 6, 7), ignore_eos=True),
        SamplingParams(max_new_tokens=9, temperature=1.3),
    ]
    with tiny.quick_compilation():
        count = Compilations()
        decode((9, settings[0]), (16, settings[0]))
        assert count.so_far() == (1, 1)
        for first in settings:
            for second in settings:
                decode((10, first), (13, second))
        decode(*((size, settings[0]) for size in (12, 11, 15, 14)))  # more requests than rows
        decode((9, settings[0]), (16, settings[1]), rounds=3)
        # Another model of the same architecture brings other values, not another program.
        other = dataclasses.replace(TARGET, params=tiny.params(seed=2), eos_token_ids=(4,))
        decode((9, settings[0]), (16, settings[1]), model=other)
        assert count.so_far() == (1, 1)


@pytest.mark.parametrize("name", ["eagle", "hybrid", "dynamic-tree"])
def test_every_chunk_is_one_program(name: str) -> None:
    drafter, gamma = CASES[name]
    with tiny.quick_compilation():
        count = Compilations()
        decoder = Decoder(TARGET, drafter, SpeculationConfig(gamma, rounds_per_chunk=1))
        decoder.generate([Request((1, 2, 3), SamplingParams(max_new_tokens=30))])
        assert count.so_far()[0] == 1


def test_another_bucket_is_another_program() -> None:
    # Otherwise the test above would count nothing.
    with tiny.quick_compilation():
        decoder = Decoder(TARGET, batch_size=2)
        count = Compilations()
        request = Request((1,) * 9, SamplingParams(max_new_tokens=5))
        decoder.generate([request])
        assert count.so_far() == (1, 1)
        decoder.generate([request] * 2)  # two rows
        assert count.so_far() == (2, 2)
        decoder.generate([Request((1,) * 9, SamplingParams(max_new_tokens=130))])  # more slots
        assert count.so_far() == (3, 3)
