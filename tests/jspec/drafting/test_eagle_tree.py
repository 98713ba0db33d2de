"""EAGLE trees, of given shapes and dynamic ones, against heads in NumPy that draft from scratch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jspec.drafting import BoundDrafter
from jspec.drafting.eagle_dynamic_tree import eagle_dynamic_tree
from jspec.drafting.eagle_tree import eagle_tree
from jspec.drafting.protocol import Proposal, WithoutReplacement
from jspec.errors import InputError
from jspec.generation import run_chunk
from tests import tiny, tiny_eagle
from tests.jspec.drafting.eagle_rounds import Oracle, advance, check_greedy, drafts, prefilled
from tests.tiny_eagle import TARGET, Variant

# Levels of 2, 3, 2 and 1 nodes, out of order: the last level's comes before two of the others.
TREE = (-1, 0, 1, 0, 2, 4, 3, 3, 6)
DEPTH, WIDTH, NODES = 4, 2, 8


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def static(kind: Variant, parents: tuple[int, ...] = TREE) -> BoundDrafter:
    config, params = tiny_eagle.config(kind), tiny_eagle.params(kind)
    return eagle_tree(TARGET.config, config, params, parents)


@functools.cache
def dynamic(kind: Variant) -> BoundDrafter:
    config, params = tiny_eagle.config(kind), tiny_eagle.params(kind)
    return eagle_dynamic_tree(TARGET.config, config, params, NODES, DEPTH, WIDTH)


def ways(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """Return the drafts on the way to each node, the root's first."""
    parents = np.asarray(proposal.topology.by_row().parents)
    own = parents[min(row, len(parents) - 1), 1:].tolist()
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tokens[row].tolist(), own, strict=True):
        found.append((*found[parent], token))
    return found


def test_the_drafts_of_given_trees() -> None:
    kind: Variant = "eagle"
    bound = static(kind)
    state = prefilled(bound, 1.0)
    outcomes: set[int] = set()
    for _ in range(5):
        proposal = drafts(bound, state)
        for row, length in enumerate(state.length.tolist()):
            assert proposal.valid[row].tolist() == [length > 1] * (len(TREE) - 1)
            if length == 1:
                continue
            oracle, nodes = Oracle(kind, state, row), ways(proposal, row)
            for node in sorted(set(TREE[1:])):
                law = oracle.log_q(nodes[node])
                children = [nodes[child][-1] for child, up in enumerate(TREE) if up == node]
                assert isinstance(proposal.law, WithoutReplacement)
                np.testing.assert_allclose(proposal.law.log_q[row, node], law, atol=2e-4)
                assert len(set(children)) == len(children)
        before, state = state, advance(bound, state)
        outcomes |= set((state.length - before.length).tolist())
    assert outcomes >= {1, 2, 3}


def by_hand(log_q: Callable[[tuple[int, ...]], np.ndarray]) -> list[tuple[int, ...]]:
    """Return the ways to the nodes that EAGLE-2 keeps, best first."""
    pool: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(DEPTH):
        found: dict[tuple[int, ...], float] = {}
        for way, value in frontier.items():
            law = log_q(way)
            for token in np.argsort(-law)[:WIDTH].tolist():
                found[*way, token] = value + float(law[token])
        pool |= found
        frontier = dict(sorted(found.items(), key=lambda item: -item[1])[:WIDTH])
    return sorted(pool, key=lambda way: -pool[way])[:NODES]


def test_the_drafts_of_dynamic_trees() -> None:
    kind: Variant = "eagle3"
    bound = dynamic(kind)
    state = prefilled(bound, 1.0)
    outcomes: set[int] = set()
    for _ in range(5):
        proposal = drafts(bound, state)
        for row, length in enumerate(state.length.tolist()):
            assert proposal.valid[row].tolist() == [length > 1] * NODES
            if length > 1:
                assert ways(proposal, row)[1:] == by_hand(Oracle(kind, state, row).log_q)
        before, state = state, advance(bound, state)
        outcomes |= set((state.length - before.length).tolist())
    assert outcomes >= {1, 2}


def test_greedy_is_plain_decoding_to_the_end_of_the_context() -> None:
    check_greedy(static("eagle"), 30)
    check_greedy(dynamic("eagle3"), 30)
    # Another tree of the same sizes runs the same program.
    before = run_chunk._cache_size()  # type: ignore[attr-defined]
    check_greedy(static("eagle", parents=(-1, 0, 0, 2, 2, 1, 5, 3, 6)), 30)
    assert run_chunk._cache_size() == before  # type: ignore[attr-defined]


def test_what_makes_no_tree_is_refused() -> None:
    config, params = tiny_eagle.config("eagle3"), tiny_eagle.params("eagle3")
    wide = (-1, *[0] * (len(tiny_eagle.KNOWN) + 1))  # more children than the head has tokens
    with pytest.raises(InputError) as caught:
        eagle_tree(TARGET.config, config, params, wide)
    assert caught.value.field == "parents"
    with pytest.raises(InputError) as caught:
        eagle_dynamic_tree(TARGET.config, config, params, 8, 3, len(tiny_eagle.KNOWN) + 1)
    assert caught.value.field == "width"
