"""The accepted path's move: reference and interpreted kernels against a loop by hand."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_commit import cache_commit, gpu, tpu

STRICT = pltpu.InterpretParams(
    detect_races=True,
    dma_execution_mode="on_wait",
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)
OPS = {
    "reference": jax.jit(cache_commit, static_argnames="nodes"),
    "tpu": jax.jit(functools.partial(tpu.cache_commit, interpret=STRICT), static_argnames="nodes"),
    "gpu": jax.jit(functools.partial(gpu.cache_commit, interpret=True), static_argnames="nodes"),
}
ROWS, HEADS, SLOTS, HEAD_DIM = 3, 2, 48, 64


def by_hand(cache: np.ndarray, start: list[int], paths: list[list[int]]) -> np.ndarray:
    result = cache.copy()
    for row, path in enumerate(paths):
        for step, node in enumerate(path):
            if start[row] + node < cache.shape[2]:
                result[row, :, start[row] + step] = cache[row, :, start[row] + node]
    return result


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_the_path_lies_behind_the_prefix_and_nothing_else_moves(
    op: str, dtype: type, data: st.DataObject
) -> None:
    nodes, depth = 13, 6
    start = data.draw(
        st.lists(
            st.one_of(st.integers(0, SLOTS - nodes), st.sampled_from([SLOTS - 4, SLOTS, 70])),
            min_size=ROWS,
            max_size=ROWS,
        )
    )
    path = st.lists(st.integers(0, nodes - 1), max_size=depth, unique=True).map(sorted)
    paths = data.draw(st.lists(path, min_size=ROWS, max_size=ROWS))
    padded = np.full((ROWS, depth), -1, np.int32)
    for row, way in enumerate(paths):
        padded[row, : len(way)] = way
    rng = np.random.default_rng(0)
    cache: np.ndarray = rng.normal(size=(ROWS, HEADS, SLOTS, HEAD_DIM)).astype(dtype)
    found = OPS[op](
        jnp.asarray(cache), jnp.array(start, jnp.int32), jnp.asarray(padded), nodes=nodes
    )
    if op == "tpu":
        races: Any = interpret_pallas_call.races
        assert not races.races_found
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, by_hand(cache, start, paths))


def test_reasons_for_refusal() -> None:
    cache: Any = jax.ShapeDtypeStruct((1, 2, 32, 64), jnp.float32)
    path: Any = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    for module in (tpu, gpu):
        assert module.supports(cache, path, 8) is None
        assert "5 entries" in str(module.supports(cache, path, 4))
    with pytest.raises(ValueError, match="5 entries"):
        tpu.cache_commit(cache, path, path, 4)
