"""Runs the real verification over every outcome of a round, with its chance taken out.

Coins are fed in instead of drawn, and the token after the accepted drafts is not drawn: its law is
read off. A coin is one of 2^23 equally likely numbers and can only turn acceptance off as it grows,
so bisection finds how many of them accept, and the round's law is a finite sum without sampling
error and without any formula of the rule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jspec import randomness, sampling, trees
from jspec.config import Verification
from jspec.drafting.protocol import Dense, PointMass, Proposal
from jspec.sampling import RowSampling
from jspec.sampling_params import SamplingParams
from jspec.verification import Verdict, verify_chain
from tests.oracles import chains
from tests.oracles.edits import Wishes
from tests.oracles.transforms import Transforms

TOLERANCE = 1e-6
GRID = 2**23  # a uniform float32 in [0, 1) is a multiple of 2^-23


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounds:
    """N rounds that differ in their drafts; log_q of point-mass drafts is ignored."""

    logits: jax.Array
    log_q: jax.Array
    tokens: jax.Array
    valid: jax.Array
    rows: RowSampling


class Outcomes(NamedTuple):
    """What the real code does with N rounds.

    Attributes:
        accepting: [N, K], how many of a coin's `GRID` values accept the draft.
        accepted: [N, C], for every combination of coins on either side of their thresholds.
        edges: [N, C], the same with the coins at 0 and just under 1.
        last: [N, C, V] float32, law of the token after the accepted drafts.
        overlap: [N, K].
        finite: [N].
    """

    accepting: np.ndarray
    accepted: np.ndarray
    edges: np.ndarray
    last: np.ndarray
    overlap: np.ndarray
    finite: np.ndarray


def sides(depth: int) -> np.ndarray:
    """Return [2^K, K] bool: for every combination, which coins lie below their threshold."""
    combinations = list(itertools.product((True, False), repeat=depth))
    return np.array(combinations, bool).reshape(len(combinations), depth)


def enumerator(rule: Verification, dense: bool) -> Callable[[Rounds], Outcomes]:
    """Return a freshly traced program, so that what is patched at the first call is what runs."""

    @jax.jit
    def verify(rounds: Rounds, coins: jax.Array, column: jax.Array) -> tuple[Verdict, jax.Array]:
        """Return a verdict of [N, K] coins, and its law of the next token at one column."""

        def read(log_p: jax.Array, keys: jax.Array) -> jax.Array:
            chosen = jnp.take(jax.nn.softmax(log_p, axis=-1), column, axis=1)
            return jax.lax.bitcast_convert_type(chosen, jnp.int32)  # the type of a token

        batch, depth = rounds.tokens.shape
        proposal = Proposal(
            tokens=rounds.tokens,
            topology=trees.chain(depth),
            valid=rounds.valid,
            law=Dense(log_q=rounds.log_q) if dense else PointMass(),
        )
        keys = jax.random.wrap_key_data(jnp.zeros((batch, 2), jnp.uint32), impl="threefry2x32")
        with (
            mock.patch.object(randomness, "uniforms", return_value=coins),
            mock.patch.object(sampling, "draw", read),
        ):
            verdict = verify_chain(rounds.logits, proposal, rounds.rows, keys, rule)
        return verdict, jax.lax.bitcast_convert_type(verdict.final, jnp.float32)

    def run(rounds: Rounds) -> Outcomes:
        (count, depth), vocab = rounds.tokens.shape, rounds.logits.shape[-1]

        def accepted(numbers: np.ndarray) -> np.ndarray:
            coins = (np.clip(numbers, 0, GRID - 1) / GRID).astype(np.float32)
            return np.asarray(verify(rounds, coins, 0)[0].accepted)

        accepting = np.zeros((count, depth), np.int64)
        for index in range(depth):
            # The coins before this one at 0, those after it just under 1.
            numbers = np.where(np.arange(depth) < index, 0, GRID - 1) + np.zeros_like(accepting)
            low, high = np.zeros(count, np.int64), np.full(count, GRID)
            while (low < high).any():
                numbers[:, index] = (low + high) // 2
                passes = (accepted(numbers) > index) & (low < high)
                low, high = (
                    np.where(passes, numbers[:, index] + 1, low),
                    np.where(passes | (low == high), high, numbers[:, index]),
                )
            accepting[:, index] = low

        results, edges, last = [], [], []
        for below in sides(depth):
            numbers = accepting - below  # the last that accepts, or the first that doesn't
            coins = (np.clip(numbers, 0, GRID - 1) / GRID).astype(np.float32)
            columns = [verify(rounds, coins, column) for column in range(vocab)]
            last.append(np.stack([np.asarray(law) for _, law in columns], axis=-1))
            results.append(np.asarray(columns[0][0].accepted))
            edges.append(accepted(np.where(below, 0, GRID - 1) + np.zeros_like(accepting)))
        verdict = columns[0][0]
        return Outcomes(
            accepting=accepting,
            accepted=np.stack(results, axis=1),
            edges=np.stack(edges, axis=1),
            last=np.stack(last, axis=1),
            overlap=np.asarray(verdict.overlap),
            finite=np.asarray(verdict.finite),
        )

    return run


def chances(outcomes: Outcomes, drawn: np.ndarray) -> np.ndarray:
    """Return [N, C] float64: the probability of each combination of coins.

    Args:
        outcomes: of N rounds.
        drawn: [N], the chance of each round's drafts; those without one need not make sense.
    """
    below = sides(outcomes.accepting.shape[1])[None]
    share = outcomes.accepting[:, None, :] / GRID
    weight: np.ndarray = drawn[:, None] * np.where(below, share, 1.0 - share).prod(axis=-1)
    possible = weight > 0
    np.testing.assert_array_equal(
        outcomes.accepted[possible],
        outcomes.edges[possible],
        "acceptance is not a threshold on each coin",
    )
    return weight


class Grid(NamedTuple):
    """Every draft path of every length under every row's transforms.

    Attributes:
        rounds: N = rows x paths rounds.
        paths: of one row.
        targets: for every row, tables of p after its transforms.
        p: [rows, paths, K + 1, V].
        q: [rows, paths, K, V], after the row's transforms.
    """

    rounds: Rounds
    paths: chains.Paths
    targets: list[list[np.ndarray]]
    p: np.ndarray
    q: np.ndarray


def grid(
    target_logits: Sequence[np.ndarray],
    targets: list[list[np.ndarray]],
    draft_laws: list[list[np.ndarray]],
    rows: Sequence[Transforms],
    given_q: list[list[np.ndarray]] | None = None,
) -> Grid:
    """List the rounds.

    Args:
        target_logits: K + 1 tables.
        targets: for every row, K + 1 tables of p.
        draft_laws: for every row, K tables of the law that drafts are drawn from.
        rows: transforms.
        given_q: what verification is told instead of `draft_laws`.
    """
    vocab, depth = target_logits[0].shape[-1], len(target_logits) - 1
    paths = chains.all_paths(vocab, depth, np.random.default_rng(0))
    count = len(paths.drafted)
    logits = chains.along(target_logits, paths.tokens)
    empty = np.zeros((count, 0, vocab))

    def spread(tables: list[list[np.ndarray]]) -> np.ndarray:
        return np.stack([chains.along(t, paths.tokens) if t else empty for t in tables])

    told = spread(draft_laws if given_q is None else given_q)
    with np.errstate(divide="ignore"):
        log_q = np.log(told).astype(np.float32)
    valid = np.arange(depth)[None, :] < paths.drafted[:, None]
    field = np.array(rows, np.float64).repeat(count, axis=0)
    return Grid(
        rounds=Rounds(
            logits=jnp.asarray(np.tile(logits, (len(rows), 1, 1)).astype(np.float32)),
            log_q=jnp.asarray(log_q.reshape(len(rows) * count, depth, vocab)),
            tokens=jnp.asarray(np.tile(paths.tokens, (len(rows), 1))),
            valid=jnp.asarray(np.tile(valid, (len(rows), 1))),
            rows=RowSampling(
                temperature=jnp.asarray(field[:, 0].astype(np.float32)),
                top_k=jnp.asarray(field[:, 1].astype(np.int32)),
                top_p=jnp.asarray(field[:, 2].astype(np.float32)),
                min_p=jnp.asarray(field[:, 3].astype(np.float32)),
            ),
        ),
        paths=paths,
        targets=targets,
        p=spread(targets),
        q=spread(draft_laws),
    )


def check(grid: Grid, outcomes: Outcomes, dense: bool) -> np.ndarray:
    """Compare with the target's law; return the expected accepted drafts, [rows, K + 1].

    Its column d is for rounds of d drafts: drawn ones, or (point mass) the mean over all paths.
    """
    (rows, count, depth, _), tokens = grid.q.shape, grid.paths.tokens
    drawn = np.array([chains.drawing_probability(q, grid.paths) for q in grid.q])
    drawn = drawn if dense else np.ones_like(drawn)
    chance = chances(outcomes, drawn.reshape(-1)).reshape(rows, count, -1)
    accepted = outcomes.accepted.reshape(chance.shape)
    last = outcomes.last.reshape(*chance.shape, -1).astype(np.float64)
    assert (accepted <= grid.paths.drafted[:, None]).all()
    assert outcomes.finite.all()
    expected = np.zeros((rows, depth + 1))
    for row, drafts in itertools.product(range(rows), range(depth + 1)):
        group = np.flatnonzero((grid.paths.drafted == drafts) & (drawn[row] > 0))
        expected[row, drafts] = (chance[row] * accepted[row])[group].sum() / drawn[row, group].sum()
        # Deterministic drafts: each path is a drafter of its own, and each must be exact.
        for members in [group] if dense else [[path] for path in group]:
            path, corner = np.nonzero(chance[row, members])
            path = np.asarray(members)[path]
            law = chains.emitted(
                grid.targets[row],
                tokens[path],
                accepted[row, path, corner],
                chance[row, path, corner],
                last[row, path, corner],
            )
            truth = chains.joint(grid.targets[row])
            np.testing.assert_allclose(law, truth, rtol=0, atol=TOLERANCE)
        never_impossible(
            grid.p[row, group],
            tokens[group],
            chance[row, group],
            accepted[row, group],
            last[row, group],
        )
    return expected


def never_impossible(
    p: np.ndarray, tokens: np.ndarray, chance: np.ndarray, accepted: np.ndarray, last: np.ndarray
) -> None:
    """A token of target probability 0 is neither accepted nor what follows, whatever the coins."""
    of_draft = chains.of_drafts(p[:, :-1], tokens)
    for n in range(p.shape[1]):
        happens = (accepted == n) & (chance > 0)
        path, _ = np.nonzero(happens)
        assert (of_draft[path, :n] > 0).all()
        assert (last[happens][p[path, n] == 0] == 0).all()


def params(row: Transforms, wishes: Wishes, max_new: int = 9) -> SamplingParams:
    """Return the sampling parameters that an oracle's transforms and wishes stand for."""
    return SamplingParams(
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
        logit_bias=wishes.bias,
        repetition_penalty=wishes.repetition,
        frequency_penalty=wishes.frequency,
        presence_penalty=wishes.presence,
        bad_words=tuple(tuple(word) for word in wishes.bad_words),
        min_new_tokens=wishes.min_new,
        max_new_tokens=max_new,
    )
