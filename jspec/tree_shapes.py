"""Which tree to speculate with: k-ary trees, and the best one for measured acceptance and cost.

Rates p_1, p_2, ... are P(the walk takes the b-th child | it reached the parent), unconditional on
siblings; a walk's expected length is then the sum over nodes of the product of rates on the way
(Sequoia, Chen et al., arXiv 2402.12374).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jspec.errors import InputError, require, require_integer


def k_ary(branching: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of a tree whose nodes of depth d have branching[d] children each.

    Nodes are in order of depth.

    Raises:
        InputError: a number is no integer or below 1.
    """
    parents, level = [-1], [0]
    for width in branching:
        require_integer("branching", width)
        require(width >= 1, "branching", width, "is below 1", "give a child at least to each level")
        following = []
        for node in level:
            for _ in range(width):
                following.append(len(parents))
                parents.append(node)
        level = following
    return tuple(parents)


def unconditional(conditional: Sequence[float]) -> list[float]:
    """Return p_b from c_b = P(the b-th child is accepted | its earlier siblings were rejected)."""
    rates, left = [], 1.0
    for rate in conditional:
        rates.append(rate * left)
        left *= 1.0 - rate
    return rates


def expected_tokens(parents: Sequence[int], rates: Sequence[float]) -> float:
    """Return the tokens that a round commits on average: accepted nodes and one token more."""
    return sum(chances(parents, rates))


class Best(NamedTuple):
    """The best tree of its kind.

    Attributes:
        parents: of each node, by depth.
        expected: tokens a round.
    """

    parents: tuple[int, ...]
    expected: float


def optimal(rates: Sequence[float], nodes: int, depth: int) -> Best:
    """Return the tree of at most `nodes` nodes (the root is one) and `depth` that commits most.

    Sequoia's dynamic programme over (nodes, depth, children of the root).

    Args:
        rates: p_b, falling, of sum at most 1.
        nodes: at least 1.
        depth: at least 0.

    Raises:
        InputError: the rates do not make sense, or a size is out of range.
    """
    require(1 <= nodes <= 128, "nodes", nodes, "is outside 1..128", "give a size in it")
    require(depth >= 0, "depth", depth, "is negative", "give a depth of 0 or more")
    if not all(0 <= rate <= 1 for rate in rates) or sum(rates) > 1 + 1e-6:
        raise InputError(
            "rates", list(rates), "are no probabilities of sum at most 1", "see `unconditional`"
        )
    most = len(rates)

    @functools.cache
    def best(size: int, deep: int, children: int) -> tuple[float, int, int]:
        """Return F of exactly `size` nodes, nodes of the last child, and that child's children."""
        if children == 0:
            return (1.0, 0, 0) if size == 1 else (-math.inf, 0, 0)
        found = (-math.inf, 0, 0)
        if deep == 0 or size <= children:
            return found
        for last in range(1, size - children + 1):
            before = best(size - last, deep, children - 1)[0]
            below, grand = root(last, deep - 1)
            found = max(found, (before + rates[children - 1] * below, last, grand))
        return found

    @functools.cache
    def root(size: int, deep: int) -> tuple[float, int]:
        """Return the best F of exactly `size` nodes, and the number of the root's children."""
        return max((best(size, deep, children)[0], children) for children in range(most + 1))

    expected, size = max((root(size, depth)[0], -size) for size in range(1, nodes + 1))
    edges: list[tuple[int, int, int]] = []  # depth, own number, parent's number

    def build(size: int, deep: int, level: int, number: int) -> None:
        children = root(size, deep)[1]
        parts = []
        while children > 0:
            _, last, _ = best(size, deep, children)
            parts.append(last)
            size, children = size - last, children - 1
        for part in reversed(parts):
            edges.append((level + 1, len(edges) + 1, number))
            build(part, deep - 1, level + 1, len(edges))

    build(-size, depth, 0, 0)
    return Best(_by_depth(edges), expected)


def _by_depth(edges: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Number nodes by depth, siblings in their order."""
    place = {0: 0}
    parents = [-1]
    for _, number, parent in sorted(edges, key=lambda edge: edge[0]):
        place[number] = len(parents)
        parents.append(place[parent])
    return tuple(parents)


def optimal_by_cost(
    rates: Sequence[float],
    sizes: Sequence[int],
    depths: Sequence[int],
    draft_step: Callable[[int], float],
    verify: Callable[[int], float],
) -> Best:
    """Return the tree of least expected time a token, a single node (no drafts) being one of them.

    Args:
        rates: as for `optimal`.
        sizes: candidates for the number of nodes.
        depths: candidates for the depth.
        draft_step: from a tree's number of nodes to the seconds that drafting a level of it takes.
        verify: from a number of nodes to the seconds of a target pass over them.
    """
    trees = [Best((-1,), 1.0)]
    trees += [optimal(rates, size, depth) for size in sizes for depth in depths]
    return min(trees, key=lambda tree: seconds_a_token(tree, draft_step, verify))


def seconds_a_token(
    tree: Best, draft_step: Callable[[int], float], verify: Callable[[int], float]
) -> float:
    """Return the seconds a token that a tree should take; see `optimal_by_cost`."""
    size = len(tree.parents)
    drafting = max(depths(tree.parents)) * draft_step(size) if size > 1 else 0.0
    return (drafting + verify(size)) / tree.expected


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node, 0 for the root."""
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def ranks(parents: Sequence[int]) -> list[int]:
    """Return the place of every node among its siblings, from 0."""
    given = [0] * len(parents)
    found = [0]
    for parent in parents[1:]:
        found.append(given[parent])
        given[parent] += 1
    return found


def chances(parents: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Return every node's chance to be on the accepted path."""
    found = [1.0]
    for parent, rank in zip(parents[1:], ranks(parents)[1:], strict=True):
        found.append(found[parent] * (rates[rank] if rank < len(rates) else 0.0))
    return found


def measured_rates(parents: Sequence[int], nodes: np.ndarray) -> list[float]:
    """Return p_b from what became of rounds with a tree, nodes of all depths taken together.

    Args:
        parents: of the tree that all rounds drafted.
        nodes: [T, 2], `metrics.Counts.nodes` of the rounds.

    Returns:
        A rate for each place among siblings; only parents that have such a child count for it.
    """
    place = ranks(parents)
    taken, reached = [0] * (max(place) + 1), [0] * (max(place) + 1)
    for node, parent in enumerate(parents[1:], start=1):
        taken[place[node]] += int(nodes[node, 0])
        reached[place[node]] += int(nodes[parent, 1])
    return [t / r if r else 0.0 for t, r in zip(taken, reached, strict=True)]
