"""Tree attention against softmax written out in float64, node by node."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.reference import BLOCK, WIDE, unpack_ancestors

SLOTS = 12
attention = jax.jit(tree_attention, static_argnames=("scale", "softcap", "window"))


def pack(parents: list[int]) -> tuple[np.ndarray, list[list[int]]]:
    """Return the packed ancestor-or-self bits and each node's ancestors as a list."""
    lists: list[list[int]] = []
    for node, parent in enumerate(parents):
        lists.append([node] if parent < 0 else [*lists[parent], node])
    words = -(-len(parents) // 32)
    packed = np.zeros((len(parents), words), np.uint32)
    for node, ancestors in enumerate(lists):
        for other in ancestors:
            packed[node, other // 32] |= np.uint32(1 << (other % 32))
    return packed, lists


def by_hand(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    prefix: list[int],
    ancestors: list[list[int]],
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    batch, nodes, heads, head_dim = query.shape
    per = heads // keys.shape[1]
    out = np.zeros(query.shape, np.float64)
    for b in range(batch):
        for t in range(nodes):
            # The path lies at the positions after the prefix, in order, wherever its slots are.
            slots = [*range(prefix[b]), *(prefix[b] + a for a in ancestors[t])]
            slots = slots if window is None else slots[-window:]
            for n in range(heads):
                k = keys[b, n // per, slots].astype(np.float64)
                score = k @ query[b, t, n].astype(np.float64)
                score = score * (1 / math.sqrt(head_dim) if scale is None else scale)
                score = score if softcap is None else softcap * np.tanh(score / softcap)
                weight = np.exp(score - score.max())
                v = values[b, n // per, slots].astype(np.float64)
                out[b, t, n] = weight @ v / weight.sum()
    return out


@pytest.mark.parametrize(
    ("rows", "nodes", "heads", "groups", "head_dim", "dtype", "tolerance"),
    [
        (1, 1, 2, 1, 4, np.float32, 1e-5),
        (2, 3, 4, 2, 8, np.float32, 1e-5),
        (3, 5, 6, 2, 4, np.float32, 1e-5),
        (2, 4, 4, 4, 8, jnp.bfloat16, 4e-2),
    ],
)
@settings(max_examples=25)
@given(data=st.data())
def test_prefix_and_ancestors_and_nothing_else(
    rows: int,
    nodes: int,
    heads: int,
    groups: int,
    head_dim: int,
    dtype: type,
    tolerance: float,
    data: st.DataObject,
) -> None:
    full = SLOTS - nodes
    length = st.one_of(st.sampled_from([0, 1, full]), st.integers(0, full))
    prefix = data.draw(st.lists(length, min_size=rows, max_size=rows))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    poison = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    query: np.ndarray = rng.normal(size=(rows, nodes, heads, head_dim)).astype(dtype)
    keys: np.ndarray = rng.normal(size=(rows, groups, SLOTS, head_dim)).astype(dtype)
    values: np.ndarray = rng.normal(size=(rows, groups, SLOTS, head_dim)).astype(dtype)
    for row, first in enumerate(prefix):
        keys[row, :, first + nodes :] = poison
        values[row, :, first + nodes :] = 1e30  # the op asks for finite values
    packed, ancestors = pack(parents)
    found = attention(
        jnp.asarray(query),
        jnp.asarray(keys),
        jnp.asarray(values),
        jnp.array(prefix, jnp.int32),
        jnp.asarray(packed),
    )
    assert found.dtype == dtype
    expected = by_hand(query, keys, values, prefix, ancestors)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("prefixes", [(0, 1), (88, 127), (128, 129), (300, 4), (340, 344)])
def test_wide_passes_go_by_blocks_of_slots(prefixes: tuple[int, int]) -> None:
    slots, nodes = 3 * BLOCK, WIDE + 8
    rng = np.random.default_rng(sum(prefixes))
    query = rng.normal(size=(2, nodes, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(2, 2, slots, 8)).astype(np.float32)
    values = rng.normal(size=(2, 2, slots, 8)).astype(np.float32)
    for row, first in enumerate(prefixes):
        keys[row, :, first + nodes :] = math.nan
        values[row, :, first + nodes :] = 1e30
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    packed, ancestors = pack(parents)
    found = attention(
        jnp.asarray(query),
        jnp.asarray(keys),
        jnp.asarray(values),
        jnp.array(prefixes, jnp.int32),
        jnp.asarray(packed),
    )
    expected = by_hand(query, keys, values, list(prefixes), ancestors)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=40)
@given(data=st.data())
def test_windows_go_by_position_and_caps_by_score(data: st.DataObject) -> None:
    nodes, full = 6, SLOTS - 6
    prefix = data.draw(st.lists(st.integers(0, full), min_size=2, max_size=2))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, nodes))]
    window = data.draw(st.sampled_from([1, 2, 3, 5, 9]))
    scale, softcap = data.draw(st.sampled_from([(None, None), (0.3, 1.5), (2.0, 0.7)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    query = rng.normal(size=(2, nodes, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(2, 2, SLOTS, 8)).astype(np.float32)
    values = rng.normal(size=(2, 2, SLOTS, 8)).astype(np.float32)
    for row, first in enumerate(prefix):
        keys[row, :, first + nodes :] = math.nan
    packed, ancestors = pack(parents)
    found = attention(
        jnp.asarray(query),
        jnp.asarray(keys),
        jnp.asarray(values),
        jnp.array(prefix, jnp.int32),
        jnp.asarray(packed),
        scale=scale,
        softcap=softcap,
        window=window,
    )
    expected = by_hand(query, keys, values, prefix, ancestors, scale, softcap, window)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 20, BLOCK, 200])
@pytest.mark.parametrize("prefixes", [(0, 1), (300, 4), (340, 129)])
def test_wide_passes_with_windows_and_caps(prefixes: tuple[int, int], window: int) -> None:
    slots, nodes = 3 * BLOCK, WIDE + 8
    rng = np.random.default_rng(sum(prefixes) + window)
    query = rng.normal(size=(2, nodes, 4, 8)).astype(np.float32)
    keys = rng.normal(size=(2, 2, slots, 8)).astype(np.float32)
    values = rng.normal(size=(2, 2, slots, 8)).astype(np.float32)
    parents = [-1, *(max(0, node - 1 - int(rng.integers(0, 3))) for node in range(1, nodes))]
    packed, ancestors = pack(parents)
    found = attention(
        jnp.asarray(query),
        jnp.asarray(keys),
        jnp.asarray(values),
        jnp.array(prefixes, jnp.int32),
        jnp.asarray(packed),
        softcap=1.3,
        window=window,
    )
    expected = by_hand(query, keys, values, list(prefixes), ancestors, None, 1.3, window)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=1e-5, rtol=1e-5)


def test_each_row_may_have_its_own_tree() -> None:
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)
    keys = rng.normal(size=(2, 1, SLOTS, 4)).astype(np.float32)
    values = rng.normal(size=(2, 1, SLOTS, 4)).astype(np.float32)
    trees = [pack([-1, 0, 1]), pack([-1, 0, 0])]
    both = jnp.asarray(np.stack([packed for packed, _ in trees]))
    found = attention(
        jnp.asarray(query),
        jnp.asarray(keys),
        jnp.asarray(values),
        jnp.array([4, 2], jnp.int32),
        both,
    )
    for row, (_, ancestors) in enumerate(trees):
        one = slice(row, row + 1)
        expected = by_hand(query[one], keys[one], values[one], [[4, 2][row]], ancestors)
        np.testing.assert_allclose(found[one], expected, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    query = jnp.full((1, 1, 1, 4), 1e4, jnp.float32)
    keys = jnp.zeros((1, 1, SLOTS, 4), jnp.float32).at[0, 0, 1].set(1e4)
    values = jnp.zeros((1, 1, SLOTS, 4), jnp.float32).at[0, 0, 1].set(7.0)
    found = attention(query, keys, values, jnp.array([3], jnp.int32), jnp.array([[1]], jnp.uint32))
    np.testing.assert_array_equal(found[0, 0, 0], [7.0] * 4)


def test_unpacking_past_one_word() -> None:
    packed, ancestors = pack([-1, *range(39)])
    dense = unpack_ancestors(jnp.asarray(packed), 40)
    assert packed.shape == (40, 2)
    for node in range(40):
        assert list(np.flatnonzero(dense[node])) == ancestors[node]
