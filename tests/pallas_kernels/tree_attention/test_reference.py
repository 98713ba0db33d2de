"""Tree attention against softmax written out in float64, node by node."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tree_attention.reference import (
    BLOCK,
    WIDE,
    plan,
    tree_attention,
    unpack_ancestors,
)
from tests.oracles.attention import by_hand, draw_inputs, pack

SLOTS = 12
attention = jax.jit(tree_attention, static_argnames=("scale", "softcap", "window"))


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


@pytest.mark.parametrize("page", [1, 4, 12])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("prefix", [(0, 9), (4, 7)])
def test_pages_anywhere_in_the_pool(prefix: tuple[int, int], window: int | None, page: int) -> None:
    shape: dict[str, int] = {"nodes": 3, "heads": 4, "groups": 2, "slots": SLOTS, "head_dim": 4}
    inputs = draw_inputs(page, [*prefix], **shape, dtype=np.float32, stale=1e30)
    found = attention(**inputs.arguments(page), window=window)
    np.testing.assert_allclose(found, inputs.expected(window=window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sides", [("key",), ("value",), ("key", "value")])
@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_narrow_entries_times_their_scales(
    dtype: type, page: int | None, sides: tuple[str, ...]
) -> None:
    shape: dict[str, int] = {"nodes": 3, "heads": 4, "groups": 2, "slots": SLOTS, "head_dim": 4}
    inputs = draw_inputs(1, [0, 8], **shape, dtype=np.float32, stale=1.0)
    rng = np.random.default_rng(2)
    arguments = inputs.arguments(page)
    wide = {"keys": inputs.keys, "values": inputs.values}
    for side, one in (("keys", "key"), ("values", "value")):
        limit = 127 if dtype == jnp.int8 else 200
        stored = jnp.asarray(rng.integers(-limit, limit, arguments[side].shape)).astype(dtype)
        arguments[side] = stored
        scales = np.ones(stored.shape[:3], np.float32)
        if one in sides:
            scales = rng.uniform(0.001, 0.02, scales.shape).astype(np.float32)
            arguments[f"{one}_scales"] = jnp.asarray(scales)
        product = np.asarray(stored, np.float64) * scales[..., None]
        if page is not None:
            table = np.minimum(np.asarray(arguments["block_table"]), len(product) - 1)
            product = product[table].transpose(0, 2, 1, 3, 4).reshape(inputs.keys.shape)
        wide[side] = product
    found = attention(**arguments)
    exact = dataclasses.replace(inputs, keys=wide["keys"], values=wide["values"])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact.expected(), atol=1e-4, rtol=1e-4)


def test_a_plan_made_before_is_the_plan_made_here() -> None:
    shape: dict[str, int] = {"nodes": 3, "heads": 2, "groups": 1, "slots": SLOTS, "head_dim": 4}
    inputs = draw_inputs(1, [0, 8], **shape, dtype=np.float32, stale=1.0)
    arguments = inputs.arguments()
    planned = plan(arguments["prefix_length"], arguments["ancestors"], SLOTS, 2)
    found = attention(**arguments, planned=planned)
    np.testing.assert_allclose(found, inputs.expected(window=2), atol=1e-5)
