"""Trees are exact: every outcome of a round is listed and its law compared with the target's.

Vocabularies of 3 to 5, trees to depth 3, p and q depending on the whole prefix. As for chains
(`exact_rounds`), nothing is sampled: a coin is one of 2^23 numbers, bisection finds how many of
them accept a node that is examined, and the law of the token after the path is read off.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import tree_verification, trees
from jspec.drafting.protocol import PointMass, Proposal
from jspec.tree_verification import TreeDecision
from pallas_kernels.rejection_sampling.inputs import row_of
from tests.jspec.exact_rounds import GRID, TOLERANCE
from tests.oracles import chains

Kind = Literal["deterministic", "independent", "without replacement"]
KINDS: tuple[Kind, ...] = ("deterministic", "independent", "without replacement")
Parents = tuple[int, ...]


def children(parents: Parents, node: int) -> list[int]:
    return [t for t in range(1, len(parents)) if parents[t] == node]


def way(parents: Parents, node: int) -> list[int]:
    """Return the nodes from below the root to `node`."""
    return [] if node == 0 else [*way(parents, parents[node]), node]


class Rounds(NamedTuple):
    """N rounds of one tree that differ in their candidates.

    Attributes:
        tokens: [N, T - 1].
        chance: [N], of drawing these candidates.
        log_p: [N, T, V].
        log_q: [N, T, V].
    """

    tokens: np.ndarray
    chance: np.ndarray
    log_p: np.ndarray
    log_q: np.ndarray


def draws(q: np.ndarray, count: int, kind: Kind) -> Iterator[tuple[tuple[int, ...], float]]:
    """List the candidates that a node of law q may get, with their chances."""
    for chosen in itertools.product(range(len(q)), repeat=count):
        left, chance = q.copy(), 1.0
        for token in chosen:
            chance *= left[token] / left.sum() if left.sum() > 0 else 0.0
            if kind == "without replacement":
                left[token] = 0.0
        if chance > 0:
            yield chosen, chance


def listed(parents: Parents, p: list[np.ndarray], q: list[np.ndarray], kind: Kind) -> Rounds:
    """List all rounds: p and q are tables of laws for every prefix."""
    partial: list[tuple[dict[int, int], float]] = [({}, 1.0)]
    for node in range(len(parents)):
        kids = children(parents, node)
        if not kids:
            continue
        longer = []
        for tokens, chance in partial:
            prefix = tuple(tokens[t] for t in way(parents, node))
            if kind == "deterministic":
                options = [(c, 1.0) for c in itertools.product(range(len(p[0])), repeat=len(kids))]
            else:
                options = list(draws(q[len(prefix)][prefix], len(kids), kind))
            for chosen, share in options:
                longer.append((tokens | dict(zip(kids, chosen, strict=True)), chance * share))
        partial = longer
    nodes = range(len(parents))

    def along(tables: list[np.ndarray], tokens: dict[int, int]) -> list[np.ndarray]:
        return [
            tables[len(w)][tuple(tokens[t] for t in w)] for w in (way(parents, n) for n in nodes)
        ]

    with np.errstate(divide="ignore"):
        return Rounds(
            np.array([[tokens[n] for n in nodes if n] for tokens, _ in partial], np.int32),
            np.array([chance for _, chance in partial]),
            np.log(np.array([along(p, tokens) for tokens, _ in partial])).astype(np.float32),
            np.log(np.array([along(q, tokens) for tokens, _ in partial])).astype(np.float32),
        )


@functools.cache
def decider(kind: Kind) -> Callable[..., TreeDecision]:
    @jax.jit
    def decide(topology: trees.Topology, rounds: Rounds, coins: jax.Array) -> TreeDecision:
        tokens = jnp.asarray(rounds.tokens)
        proposal = Proposal(tokens, topology, jnp.ones(tokens.shape, bool), PointMass())
        log_p = jnp.asarray(rounds.log_p)
        if kind == "deterministic":
            return tree_verification.deterministic(log_p, proposal, coins)
        log_q = jnp.asarray(rounds.log_q)
        return tree_verification.drawn(log_p, proposal, coins, log_q, kind == "independent")

    return decide


class Measured(NamedTuple):
    """What the real code does: h [N, T], chance of a node once examined; rest [N, T, V]."""

    h: np.ndarray
    rest: np.ndarray


def measure(trees_of: list[Parents], rounds: Rounds, kind: Kind, own: bool = False) -> Measured:
    """Measure rounds of a tree each; `own` gives every row its topology, else all share one."""
    count, size = len(rounds.tokens), len(trees_of[0])
    if own:
        topology = trees.from_parent_rows(jnp.asarray(trees_of, jnp.int32))
    else:
        assert len(set(trees_of)) == 1
        topology = dataclasses.replace(trees.from_parents(trees_of[0]), is_chain=False)
    decide = functools.partial(decider(kind), topology, rounds)

    def leading(target: int) -> np.ndarray:
        """Coins under which the walk goes to `target`: only what is on its way accepts."""
        return np.array(
            [
                [0 if n in on else GRID - 1 for n in range(1, size)]
                for on in (way(parents, target) for parents in trees_of)
            ]
        )

    def run(numbers: np.ndarray) -> TreeDecision:
        return decide(jnp.asarray((numbers / GRID).astype(np.float32)))

    def depth(node: int) -> np.ndarray:
        return np.array([len(way(parents, node)) for parents in trees_of])

    def at(decision: TreeDecision, node: int) -> np.ndarray:
        path = np.asarray(decision.path)[np.arange(count), depth(node)]
        return (np.asarray(decision.accepted) >= depth(node)) & (path == node)

    h = np.zeros((count, size))
    rest = np.zeros((count, size, rounds.log_p.shape[-1]))
    for node in range(size):
        numbers = leading(node)
        decision = run(numbers)
        reached = at(decision, node) & (np.asarray(decision.accepted) == depth(node))
        rest[:, node] = np.where(reached[:, None], np.asarray(jax.nn.softmax(decision.log_rest)), 0)
        if node == 0:
            continue
        low, high = np.zeros(count, np.int64), np.full(count, GRID)
        while (low < high).any():
            middle = (low + high) // 2
            numbers[:, node - 1] = np.minimum(middle, GRID - 1)
            passes = at(run(numbers), node) & (low < high)
            low, high = (
                np.where(passes, middle + 1, low),
                np.where(passes | (low == high), high, middle),
            )
        h[:, node] = low / GRID
    return Measured(h, rest)


def emitted(
    parents: Parents, rounds: Rounds, measured: Measured, p: list[np.ndarray], row: int
) -> np.ndarray:
    """Return the joint law of depth + 1 tokens in one round, continued by plain p."""
    depth = len(p) - 1
    vocab = len(p[0])
    total = np.zeros((vocab,) * (depth + 1))

    def spread(prefix: tuple[int, ...], law: np.ndarray) -> None:
        """Add a law of the next token after a prefix."""
        for table in p[len(prefix) + 1 :]:
            law = law[..., None] * table[prefix]
        total[prefix] += law

    def visit(node: int, prefix: tuple[int, ...], chance: float) -> None:
        for child in children(parents, node):
            h = measured.h[row, child]
            visit(child, (*prefix, int(rounds.tokens[row, child - 1])), chance * h)
            chance *= 1 - h
        if chance > 0:
            assert measured.rest[row, node].sum() == pytest.approx(1, abs=1e-5)
        spread(prefix, chance * measured.rest[row, node].astype(np.float64))

    visit(0, (), 1.0)
    return total


def check(parents: Parents, p: list[np.ndarray], q: list[np.ndarray], kind: Kind) -> None:
    rounds = listed(parents, p, q, kind)
    compare(parents, rounds, measure([parents] * len(rounds.tokens), rounds, kind), p, kind)


def compare(
    parents: Parents, rounds: Rounds, measured: Measured, p: list[np.ndarray], kind: Kind
) -> None:
    laws = [emitted(parents, rounds, measured, p, row) for row in range(len(rounds.tokens))]
    truth = chains.joint(p)
    if kind == "deterministic":  # each set of candidates is a drafter of its own
        for law in laws:
            np.testing.assert_allclose(law, truth, rtol=0, atol=TOLERANCE)
    else:
        assert rounds.chance.sum() == pytest.approx(1)
        mean = sum(c * law for c, law in zip(rounds.chance, laws, strict=True))
        np.testing.assert_allclose(mean, truth, rtol=0, atol=TOLERANCE)


def tables(seed: int, vocab: int, depth: int, zeros: float) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    found = []
    for k in range(depth + 1):
        weights = generator.gamma(0.7, size=(vocab,) * (k + 1))
        gone = generator.random(weights.shape) < zeros
        gone &= np.arange(vocab) != generator.integers(0, vocab, (*weights.shape[:-1], 1))
        weights[gone] = 0
        found.append(weights / weights.sum(axis=-1, keepdims=True))
    return found


@st.composite
def shapes(draw: Any, nodes: int) -> Parents:
    parents = [-1]
    depths = [0]
    for node in range(1, nodes):
        parent = draw(st.integers(0, node - 1).filter(lambda n: depths[n] < 3))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tuple(parents)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "nodes"), [(3, 5), (5, 4), (4, 3)])
@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31), zeros=st.sampled_from([0.0, 0.3]))
def test_the_law_of_a_round_is_the_targets(
    vocab: int, nodes: int, kind: Kind, data: st.DataObject, seed: int, zeros: float
) -> None:
    parents = data.draw(shapes(nodes))
    # Without replacement no node can have more children than there are tokens.
    hypothesis.assume(max(parents.count(node) for node in range(nodes)) <= vocab)
    depth = max(len(way(parents, node)) for node in range(nodes))
    p, q = tables(seed, vocab, depth, zeros), tables(seed + 1, vocab, depth, 0.0)
    if data.draw(st.booleans()):  # near, where acceptance is high and residuals small
        q = [0.9 * table + 0.1 * other for table, other in zip(p, q, strict=True)]
    check(parents, p, q, kind)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=4, deadline=None)
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31))
def test_the_law_of_rows_with_trees_of_their_own(
    kind: Kind, data: st.DataObject, seed: int
) -> None:
    vocab, nodes = 3, 5
    rows = data.draw(st.lists(shapes(nodes), min_size=2, max_size=3, unique=True))
    hypothesis.assume(all(parents.count(n) <= vocab for parents in rows for n in range(nodes)))
    p, q = tables(seed, vocab, 3, 0.2), tables(seed + 1, vocab, 3, 0.0)
    parts = [listed(parents, p, q, kind) for parents in rows]
    trees_of = [parents for parents, part in zip(rows, parts, strict=True) for _ in part.tokens]
    # Rows of different trees lie side by side, as in a batch.
    order = np.random.default_rng(seed).permutation(len(trees_of))
    mixed = Rounds(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))
    measured = measure([trees_of[i] for i in order], mixed, kind, own=True)
    back = np.argsort(order)
    start = 0
    for parents, part in zip(rows, parts, strict=True):
        mine = back[start : start + len(part.tokens)]
        start += len(part.tokens)
        compare(parents, part, Measured(measured.h[mine], measured.rest[mine]), p, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_more_children_than_tokens_left(kind: Kind) -> None:
    # Two of three tokens have chance 0 under p; without replacement the third child exhausts q.
    p = [np.array([0.0, 0.0, 1.0]), np.full((3, 3), 1 / 3)]
    q = [np.array([0.5, 0.3, 0.2]), np.full((3, 3), 1 / 3)]
    check((-1, 0, 0, 0), p, q, kind)


def test_the_children_of_an_invalid_node_are_not_accepted() -> None:
    topology = trees.from_parents((-1, 0, 1, 0))
    logits = jnp.zeros((1, 4, 3), jnp.float32).at[0, :, 1].set(50.0)
    tokens = jnp.asarray([[1, 1, 2]], jnp.int32)
    valid = jnp.asarray([[False, True, True]])
    from jspec import sampling
    from jspec.sampling_params import SamplingParams

    keys = jax.random.split(jax.random.key(0), 1)
    for temperature in (0.0, 1.0):
        rows = sampling.rows([SamplingParams(temperature=temperature)])
        proposal = Proposal(tokens, topology, valid, PointMass())
        verdict = tree_verification.verify_tree(logits, proposal, rows, keys)
        assert int(verdict.accepted[0]) == 0
        assert int(verdict.final[0]) == 1


@pytest.mark.parametrize("wrong", ["keeps r", "forgets q"])
def test_known_mistakes_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*arguments: Any) -> TreeDecision:
        decided = tree_verification.drawn(*arguments)
        if wrong == "keeps r":  # the token after the path from p, not from what is left
            rest = row_of(
                arguments[0],
                jnp.take_along_axis(decided.path, decided.accepted[:, None], axis=1)[:, 0],
            )
            return decided._replace(log_rest=rest)
        return decided

    @jax.jit
    def decide(topology: trees.Topology, rounds: Rounds, coins: jax.Array) -> TreeDecision:
        tokens = jnp.asarray(rounds.tokens)
        proposal = Proposal(tokens, topology, jnp.ones(tokens.shape, bool), PointMass())
        replaced = wrong == "forgets q"  # what was drawn without replacement is judged as with
        return drawn(
            jnp.asarray(rounds.log_p), proposal, coins, jnp.asarray(rounds.log_q), replaced
        )

    monkeypatch.setitem(globals(), "decider", lambda kind: decide)
    p, q = tables(1, 3, 1, 0.0), tables(2, 3, 1, 0.0)
    with pytest.raises(AssertionError):
        check((-1, 0, 0), p, q, "without replacement")
