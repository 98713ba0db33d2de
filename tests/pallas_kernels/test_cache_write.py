"""The ragged cache write against a loop over single entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cache_write import cache_write

write = jax.jit(cache_write)


def by_hand(cache: np.ndarray, entries: np.ndarray, start: list[int]) -> np.ndarray:
    result = cache.copy()
    for row, first in enumerate(start):
        for step in range(entries.shape[1]):
            if first + step < cache.shape[2]:
                result[row, :, first + step] = entries[row, step]
    return result


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 3), (3, 1), (3, 4)])
@settings(max_examples=25)
@given(data=st.data())
def test_every_row_at_its_own_start_and_nothing_past_the_capacity(
    rows: int, count: int, data: st.DataObject
) -> None:
    slots = 6
    start = data.draw(st.lists(st.integers(0, slots + 2), min_size=rows, max_size=rows))
    cache = np.arange(rows * 2 * slots * 3, dtype=np.float32).reshape(rows, 2, slots, 3)
    entries = -1 - np.arange(rows * count * 2 * 3, dtype=np.float32).reshape(rows, count, 2, 3)
    found = write(jnp.asarray(cache), jnp.asarray(entries), jnp.array(start, jnp.int32))
    np.testing.assert_array_equal(found, by_hand(cache, entries, start))


def test_dtype_is_kept() -> None:
    cache = jnp.zeros((1, 1, 4, 2), jnp.bfloat16)
    found = write(cache, jnp.ones((1, 2, 1, 2), jnp.bfloat16), jnp.array([1], jnp.int32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0, 0, :, 0].astype(jnp.float32), [0, 1, 1, 0])
