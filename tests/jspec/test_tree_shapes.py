"""The best tree is the best of all trees, listed one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from jspec import tree_shapes, trees
from jspec.errors import InputError


def every_tree(nodes: int) -> Iterator[tuple[int, ...]]:
    for rest in itertools.product(*(range(node) for node in range(1, nodes))):
        yield (-1, *rest)


def depth(parents: tuple[int, ...]) -> int:
    return int(trees.from_parents(parents).depths.max())


def value(parents: tuple[int, ...], rates: list[float]) -> float:
    """Sum over nodes of the product of rates on the way, node by node."""
    total = 0.0
    for node in range(len(parents)):
        product = 1.0
        while node > 0:
            rank = parents[:node].count(parents[node])
            product *= rates[rank] if rank < len(rates) else 0.0
            node = parents[node]
        total += product
    return total


@pytest.mark.parametrize("rates", [[0.6, 0.2, 0.1], [0.4, 0.3], [0.9], [0.3, 0.3, 0.3], [0.0, 0.0]])
@pytest.mark.parametrize("most_depth", [0, 1, 2, 4])
def test_against_every_tree(rates: list[float], most_depth: int) -> None:
    for nodes in range(1, 7):
        best = tree_shapes.optimal(rates, nodes, most_depth)
        trees_of_size = [p for size in range(1, nodes + 1) for p in every_tree(size)]
        values = [value(p, rates) for p in trees_of_size if depth(p) <= most_depth]
        assert best.expected == pytest.approx(max(values))
        assert value(best.parents, rates) == pytest.approx(best.expected)
        assert tree_shapes.expected_tokens(best.parents, rates) == pytest.approx(best.expected)
        assert len(best.parents) <= nodes
        assert depth(best.parents) <= most_depth


def test_a_chain_is_the_tree_of_one_rate() -> None:
    best = tree_shapes.optimal([0.8, 0.0], 6, 9)
    assert best.parents == (-1, 0, 1, 2, 3, 4)
    assert best.expected == pytest.approx((1 - 0.8**6) / (1 - 0.8))  # Leviathan et al. 2023, eq. 1


def test_places_chances_and_rates_by_hand() -> None:
    #     0
    #   1   2
    #  3 4   5
    parents = (-1, 0, 0, 1, 1, 2)
    assert tree_shapes.depths(parents) == [0, 1, 1, 2, 2, 2]
    assert tree_shapes.ranks(parents) == [0, 0, 1, 0, 1, 0]
    expected = [1, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert tree_shapes.chances(parents, [0.5, 0.25]) == expected
    assert tree_shapes.chances(parents, [0.5]) == [1, 0.5, 0, 0.25, 0, 0]
    # Ten rounds: 6 took node 1 (one of them at its budget's end), 3 took node 2, 1 took neither;
    # of the 5 at node 1 two took 3, one took 4; of the 3 at node 2 one took 5.
    nodes = np.array([[10, 10], [6, 5], [3, 3], [2, 0], [1, 0], [1, 0]])
    first, second = (6 + 2 + 1) / (10 + 5 + 3), (3 + 1) / (10 + 5)
    assert tree_shapes.measured_rates(parents, nodes) == pytest.approx([first, second])
    assert tree_shapes.measured_rates((-1, 0), np.zeros((2, 2), int)) == [0.0]


def test_unconditional_rates() -> None:
    assert tree_shapes.unconditional([0.5, 0.5, 1.0]) == [0.5, 0.25, 0.25]


def test_k_ary() -> None:
    assert tree_shapes.k_ary([3, 1]) == (-1, 0, 0, 0, 1, 2, 3)
    assert tree_shapes.k_ary([]) == (-1,)
    with pytest.raises(InputError, match="branching"):
        tree_shapes.k_ary([2, 0])


def test_cost_decides_how_much() -> None:
    rates = [0.6, 0.2]

    def best(verify_a_node: float, draft_step: float) -> tuple[int, ...]:
        return tree_shapes.optimal_by_cost(
            rates,
            range(2, 17),
            range(1, 6),
            lambda nodes: draft_step,
            lambda nodes: 1 + verify_a_node * nodes,
        ).parents

    assert best(10.0, 0.1) == (-1,)  # compute-bound: do not speculate
    assert len(best(0.0, 0.0)) == 16  # nothing costs anything
    assert depth(best(0.0, 1.0)) < depth(best(0.0, 0.0))  # dear drafts make the tree shallow


@pytest.mark.parametrize(
    ("rates", "nodes", "deep", "field"),
    [
        ([0.9, 0.3], 4, 2, "rates"),
        ([-0.1], 4, 2, "rates"),
        ([0.5], 0, 2, "nodes"),
        ([0.5], 4, -1, "depth"),
    ],
)
def test_bad_input_is_refused(rates: list[float], nodes: int, deep: int, field: str) -> None:
    with pytest.raises(InputError) as caught:
        tree_shapes.optimal(rates, nodes, deep)
    assert caught.value.field == field
