"""Expand and rerank against sorting in Python; ties everywhere, since values are small integers."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.drafting import expansion

POOL = 11
NODES, VOCAB, CHILDREN = 3, 5, 4

rerank = jax.jit(expansion.rerank, static_argnames="count")
children = functools.partial(jax.jit(expansion.children, static_argnames="count"), count=CHILDREN)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    values: list[float] = []
    parents: list[int] = []
    for place in range(POOL):
        parent = draw(st.integers(-1, place - 1))
        above = 0.0 if parent < 0 else values[parent]
        fall = draw(st.sampled_from([0.0, 0.0, 1.0, 2.0, math.inf]))
        values.append(above - fall)
        parents.append(parent)
    return values, parents


@settings(max_examples=80)
@given(first=forests(), second=forests())
def test_the_most_valuable_candidates_are_kept_connected(
    first: tuple[list[float], list[int]], second: tuple[list[float], list[int]]
) -> None:
    values, parents = [first[0], second[0]], [first[1], second[1]]
    for count in (1, 6, POOL):
        kept = rerank(jnp.asarray(values, jnp.float32), jnp.asarray(parents, jnp.int32), count)
        for row in range(2):
            order = sorted(range(POOL), key=lambda p: (-values[row][p], p))
            expected = [p for p in order[:count] if values[row][p] > -math.inf]
            valid = np.asarray(kept.valid[row])
            assert valid.sum() == len(expected)
            assert valid[: len(expected)].all()
            assert kept.places[row, : len(expected)].tolist() == expected
            tree = kept.parents[row].tolist()
            assert tree[0] == -1
            node_of = {-1: 0} | {place: node for node, place in enumerate(expected, 1)}
            for node, place in enumerate(expected, 1):
                assert tree[node] == node_of[parents[row][place]] < node
            assert tree[len(expected) + 1 :] == [0] * (count - len(expected))


scores = st.sampled_from([-3.0, -2.0, -1.0, -0.5, 0.0, -math.inf, math.nan])


@settings(max_examples=60)
@given(
    values=st.lists(st.sampled_from([0.0, -1.0, -math.inf]), min_size=NODES, max_size=NODES),
    confidence=st.lists(
        st.lists(scores, min_size=VOCAB, max_size=VOCAB), min_size=NODES, max_size=NODES
    ),
)
def test_children_are_the_most_probable(values: list[float], confidence: list[list[float]]) -> None:
    found = children(jnp.asarray([values], jnp.float32), jnp.asarray([confidence], jnp.float32))
    assert found.parents.tolist() == [node for node in range(NODES) for _ in range(CHILDREN)]
    for node in range(NODES):
        known = [-math.inf if math.isnan(c) else c for c in confidence[node]]
        order = sorted(range(VOCAB), key=lambda token: (-known[token], token))[:CHILDREN]
        mine = slice(node * CHILDREN, (node + 1) * CHILDREN)
        assert found.tokens[0, mine].tolist() == order
        assert found.values[0, mine].tolist() == [values[node] + known[t] for t in order]
