"""The cache kernels, interpreted: single entries written and moved by hand beside them."""

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

from pallas_kernels.cache_write import gpu, tpu, windows

STRICT = pltpu.InterpretParams(
    detect_races=True,
    dma_execution_mode="on_wait",
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)
KERNELS = {
    "tpu": jax.jit(functools.partial(tpu.cache_write, interpret=STRICT)),
    "gpu": jax.jit(functools.partial(gpu.cache_write, interpret=True)),
}


def by_hand(cache: np.ndarray, entries: np.ndarray, start: list[int]) -> np.ndarray:
    result = cache.copy()
    for row, first in enumerate(start):
        for step in range(entries.shape[1]):
            if first + step < cache.shape[2]:
                result[row, :, first + step] = entries[row, step]
    return result


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("rows", "count", "heads", "slots", "head_dim", "dtype"),
    [
        (3, 5, 2, 64, 64, np.float32),
        (2, 17, 3, 64, 128, jnp.bfloat16),
        (1, 1, 1, 16, 64, jnp.bfloat16),
    ],
)
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_every_row_at_its_own_start_and_nothing_past_the_capacity(
    kernel: str,
    rows: int,
    count: int,
    heads: int,
    slots: int,
    head_dim: int,
    dtype: type,
    data: st.DataObject,
) -> None:
    edge = st.sampled_from([0, 1, 7, 8, 15, 16, slots - count, slots - 1, slots, slots + 9])
    start = data.draw(
        st.lists(st.one_of(edge, st.integers(0, slots)), min_size=rows, max_size=rows)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cache: np.ndarray = rng.normal(size=(rows, heads, slots, head_dim)).astype(dtype)
    cache[0, 0, 3] = np.nan  # what is in other slots stays there, and nowhere else
    entries: np.ndarray = rng.normal(size=(rows, count, heads, head_dim)).astype(dtype)
    found = KERNELS[kernel](jnp.asarray(cache), jnp.asarray(entries), jnp.array(start, jnp.int32))
    if kernel == "tpu":
        races: Any = interpret_pallas_call.races
        assert not races.races_found
    assert found.dtype == dtype
    # NumPy does not take two NaNs of bfloat16 for equal.
    truth = by_hand(cache, entries, start)
    np.testing.assert_array_equal(found.astype(np.float32), truth.astype(np.float32))


def test_windows_of_a_large_batch_come_in_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "MOST_BYTES", 100_000)
    cache = jnp.zeros((6, 2, 64, 64), jnp.float32)
    entries = jnp.ones((6, 2, 2, 64), jnp.float32)
    start = jnp.array([0, 3, 62, 63, 31, 7], jnp.int32)
    assert windows.rows_at_once(cache, 2) == 3
    found = tpu.cache_write(cache, entries, start, interpret=STRICT)
    races: Any = interpret_pallas_call.races
    assert not races.races_found
    np.testing.assert_array_equal(
        found, by_hand(np.asarray(cache), np.asarray(entries), start.tolist())
    )


def test_reasons_for_refusal() -> None:
    def cache(slots: int, head_dim: int = 64, dtype: type = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct((1, 2, slots, head_dim), dtype)

    entries: Any = jax.ShapeDtypeStruct((1, 3, 2, 64), jnp.bfloat16)
    assert tpu.supports(cache(32), entries) is None
    assert "tile" in str(tpu.supports(cache(40), entries))
    assert "multiple of 64" in str(tpu.supports(cache(32, 80), entries))
    assert "bfloat16" in str(tpu.supports(cache(32, 64, jnp.float32), entries))
    assert "bfloat16" in str(gpu.supports(cache(32, 64, jnp.float32), entries))
    with pytest.raises(ValueError, match="tile"):
        tpu.cache_write(cache(40), entries, jnp.zeros(1, jnp.int32))
