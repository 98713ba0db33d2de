"""Topologies against a walk from node to root."""

from __future__ import annotations

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import trees


def unpack(ancestors: Any, size: int) -> np.ndarray:
    """Return [T, T] bool from packed words, bit j of word w being node 32 w + j."""
    words = np.asarray(ancestors)
    assert words.dtype == np.uint32
    assert words.shape == (size, -(-size // 32))
    dense = np.array([[(int(word) >> j) & 1 for word in row for j in range(32)] for row in words])
    assert not dense[:, size:].any()  # the padding of the last word
    return dense[:, :size].astype(bool)


def check(topology: trees.Topology, parents: list[int]) -> None:
    size = len(parents)
    assert topology.size == size
    assert topology.depths.dtype == topology.parents.dtype == np.int32
    np.testing.assert_array_equal(topology.parents, parents)
    dense = unpack(topology.ancestors, size)
    for node in range(size):
        path, at = {node}, node
        while parents[at] >= 0:
            at = parents[at]
            path.add(at)
        assert set(np.flatnonzero(dense[node]).tolist()) == path
        assert int(topology.depths[node]) == len(path) - 1


sizes = st.one_of(st.integers(1, 12), st.sampled_from([31, 32, 33, 63, 64, 65, 97]))


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data(), size=sizes)
def test_from_parents(data: st.DataObject, size: int) -> None:
    parents = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)]
    check(trees.from_parents(tuple(parents)), parents)


build = jax.jit(trees.from_parent_rows)


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data(), size=st.sampled_from([1, 2, 3, 7, 32, 33, 65]))
def test_from_parent_rows(data: st.DataObject, size: int) -> None:
    def draw(bushy: bool) -> list[int]:
        least = [0 if bushy else max(node - 2, 0) for node in range(size)]  # deep ones too
        return [-1] + [data.draw(st.integers(least[node], node - 1)) for node in range(1, size)]

    rows = [draw(True), draw(False), list(range(-1, size - 1))]
    topology = build(jnp.asarray(rows, jnp.int32))
    for row, parents in enumerate(rows):
        check(jax.tree.map(lambda array: np.asarray(array)[row], topology), parents)  # noqa: B023


def test_paths_of_each_rows_own_tree() -> None:
    rows = [(-1, 0, 0, 1, 3), (-1, 0, 1, 2, 0)]
    topology = trees.from_parent_rows(jnp.asarray(rows, jnp.int32))
    drafts = jnp.asarray([[11, 12, 13, 14], [21, 22, 23, 24]], jnp.int32)
    found = np.asarray(trees.paths(drafts, topology))
    for row, parents in enumerate(rows):
        for node in range(5):
            way: list[int] = []
            at = node
            while at > 0:
                way.insert(0, int(drafts[row, at - 1]))
                at = parents[at]
            assert found[row, node].tolist() == way + [-1] * (4 - len(way))
        shared = trees.from_parents(parents)
        np.testing.assert_array_equal(trees.paths(drafts, shared)[row], found[row])


@pytest.mark.parametrize("gamma", [0, 1, 2, 30, 31, 32, 33, 62, 63, 64, 127])
def test_chain(gamma: int) -> None:
    check(trees.chain(gamma), list(range(-1, gamma)))
    np.testing.assert_array_equal(trees.chain(gamma).depths, np.arange(gamma + 1))


@pytest.mark.parametrize(
    ("parents", "problem"),
    [
        ((), "root"),
        ((0,), "root"),
        ((0, -1), "root"),
        ((-1, -1), "node 1 has parent -1"),
        ((-1, 1), "node 1 has parent 1"),
        ((-1, 0, 3, 1), "node 2 has parent 3"),
        ((-1, 0, -2), "node 2 has parent -2"),
    ],
)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        trees.from_parents(parents)
