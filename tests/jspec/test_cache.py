"""The cache: truth by length."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from tests import tiny


def filled(rows: int = 3, capacity: int = 5) -> kv.KVCache:
    cache = kv.init(tiny.CONFIG, rows, capacity, jnp.float32)
    rng = np.random.default_rng(0)
    keys, values = (
        tuple(jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in side)
        for side in (cache.keys, cache.values)
    )
    return kv.KVCache(keys, values, jnp.array([2, 0, 4], jnp.int32)[:rows])


def test_an_empty_cache_is_zeros_of_the_models_shapes() -> None:
    cache = kv.init(tiny.CONFIG, 3, 40, jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == tiny.CONFIG.num_layers
    for leaf in (*cache.keys, *cache.values):
        assert leaf.shape == (3, tiny.CONFIG.num_kv_heads, 40, tiny.CONFIG.head_dim)
        assert leaf.dtype == jnp.bfloat16
        assert not leaf.any()
    assert cache.capacity == 40
    assert list(cache.length) == [0, 0, 0]


def test_buffers_are_separate() -> None:
    # Donation needs a buffer each: a shared one would be aliased twice.
    cache = kv.init(tiny.CONFIG, 1, 8, jnp.float32)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in (*cache.keys, *cache.values)]
    assert len(set(pointers)) == len(pointers)


def test_write_goes_past_each_length_and_leaves_lengths_alone() -> None:
    cache = filled()
    entry = jnp.ones((3, 2, tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim), jnp.float32)
    keys, values = kv.write(cache, 1, entry, 2 * entry)
    for row, length in enumerate([2, 0, 4]):
        written = [slot for slot in (length, length + 1) if slot < 5]
        for slot in range(5):
            if slot in written:
                assert (keys[row, :, slot] == 1).all()
                assert (values[row, :, slot] == 2).all()
            else:
                np.testing.assert_array_equal(keys[row, :, slot], cache.keys[1][row, :, slot])
                np.testing.assert_array_equal(values[row, :, slot], cache.values[1][row, :, slot])


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_an_unusable_value_reaches_those_alone_who_attend_to_it(value: float) -> None:
    cache = filled()
    shape = (3, 3, tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim)
    bad_values = jnp.ones(shape, jnp.float32).at[0, 1, 0, 2].set(value)
    keys, values = kv.write(cache, 0, jnp.ones(shape, jnp.float32), bad_values)
    assert jnp.isnan(keys[0, 0, 3, 2])  # so that every score with it is NaN
    assert jnp.isfinite(values).all()
    # Everything else is as it was given.
    assert jnp.isnan(keys).sum() == 1
    assert (keys[0, :, 2:5].sum(where=~jnp.isnan(keys[0, :, 2:5]))) == 3 * shape[2] * shape[3] - 1
    assert (values[0, 0, jnp.array([2, 4])] == 1).all()


def test_an_unusable_key_is_kept() -> None:
    shape = (3, 3, tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim)
    bad_keys = jnp.ones(shape, jnp.float32).at[0, 1, 0, 3].set(jnp.nan)
    keys, _ = kv.write(filled(), 0, bad_keys, jnp.ones(shape, jnp.float32))
    assert jnp.isnan(keys[0, 0, 3, 3])


def test_commit_and_truncate_move_lengths_alone() -> None:
    cache = filled()
    longer = kv.commit(cache, jnp.array([3, 0, 1], jnp.int32))
    assert list(longer.length) == [5, 0, 5]
    cut = kv.truncate(longer, jnp.array([1, 4, 5], jnp.int32))
    assert list(cut.length) == [1, 0, 5]  # a shorter row is not lengthened
    for other in (longer, cut):
        same = dataclasses.replace(other, length=cache.length)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), same, cache))


def test_permuted_rows_carry_everything() -> None:
    cache = filled()
    moved = kv.permute_rows(cache, jnp.array([2, 2, 0], jnp.int32))
    assert list(moved.length) == [4, 4, 2]
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(after, np.asarray(before)[[2, 2, 0]])
