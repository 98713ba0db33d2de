"""Verification is exact: every outcome of a round is listed and its law compared with the target's.

Vocabularies of 3 to 5, 0 to 3 drafts, p and q depending on the whole prefix. The round's tokens are
continued by plain p to gamma + 1 tokens, so that all outcomes have one length; their joint law must
be p(x1) p(x2 | x1) ... There is no sampling error: see `exact_rounds`.
"""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from jspec import sampling, trees
from jspec.config import Verification
from jspec.drafting.protocol import Dense, PointMass, Proposal
from jspec.sampling_params import SamplingParams
from jspec.verification import Verdict, verify_chain
from tests.jspec import exact_rounds
from tests.jspec.exact_rounds import TOLERANCE, Grid, check
from tests.oracles import chains, transforms
from tests.oracles.transforms import Transforms

RULES: tuple[Verification, ...] = ("token", "block")
SIZES = ((3, 0), (3, 3), (4, 2), (5, 1), (5, 3))
PLAIN = Transforms()

enumerator = functools.cache(exact_rounds.enumerator)


def random_tables(
    generator: np.random.Generator, vocab: int, depth: int, zeros: float, step: float
) -> list[np.ndarray]:
    """Logits for every prefix; some -inf, rounded to `step` (which makes ties)."""
    tables = []
    for k in range(depth):
        logits = generator.normal(0, 1.5, (vocab,) * (k + 1))
        logits = np.round(logits / step) * step
        gone = generator.random(logits.shape) < zeros
        gone &= np.arange(vocab) != generator.integers(0, vocab, (*logits.shape[:-1], 1))
        tables.append(np.where(gone, -np.inf, logits).astype(np.float32))
    return tables


def related(
    generator: np.random.Generator, target: list[np.ndarray], kind: str
) -> list[np.ndarray]:
    """Draft logits that stand in some relation to the target's."""
    vocab = target[0].shape[-1]
    if kind == "equal":
        return [table.copy() for table in target]
    if kind == "near":
        return [t + generator.normal(0, 0.3, t.shape).astype(np.float32) for t in target]
    if kind == "disjoint":
        # The target keeps to the tokens that the draft lacks, in place.
        low = np.arange(vocab) < vocab // 2
        free = random_tables(generator, vocab, len(target), 0.0, 1e-3)
        for table in target:
            table[...] = np.where(low, -np.inf, np.where(np.isfinite(table), table, 0.0))
        return [np.where(low, table, -np.inf).astype(np.float32) for table in free]
    return random_tables(generator, vocab, len(target), 0.3, 1e-3)


transforms_of_rows = st.builds(
    Transforms,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 2, 3]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)


def build(
    seed: int, vocab: int, gamma: int, rows: list[Transforms], kind: str, zeros: float, step: float
) -> Grid:
    generator = np.random.default_rng(seed)
    target = random_tables(generator, vocab, gamma + 1, zeros, step)
    draft = related(generator, target, kind)[:gamma]
    for row in rows:
        hypothesis.assume(not any(transforms.is_borderline(t, row) for t in [*target, *draft]))
    return exact_rounds.grid(
        target,
        [[transforms.laws(t, row) for t in target] for row in rows],
        [[transforms.laws(t, row) for t in draft] for row in rows],
        rows,
    )


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "point-mass"])
@pytest.mark.parametrize(("vocab", "gamma"), SIZES)
@hypothesis.settings(max_examples=8)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    row=transforms_of_rows,
    kind=st.sampled_from(["independent", "near", "equal", "disjoint"]),
    zeros=st.sampled_from([0.0, 0.3]),
    step=st.sampled_from([1e-3, 1.0]),
)
def test_the_law_of_a_round_is_the_targets(
    vocab: int,
    gamma: int,
    dense: bool,
    seed: int,
    row: Transforms,
    kind: str,
    zeros: float,
    step: float,
) -> None:
    # One batch: the drawn row, a greedy one and a plain one, each with 0 .. gamma drafts.
    rows = [row, Transforms(temperature=0.0), PLAIN]
    grid = build(seed, vocab, gamma, rows, kind, zeros, step)
    expected = {rule: check(grid, enumerator(rule, dense)(grid.rounds), dense) for rule in RULES}
    # Block verification never accepts fewer in expectation.
    assert (expected["block"] >= expected["token"] - TOLERANCE).all()
    np.testing.assert_allclose(expected["block"][1], expected["token"][1], atol=TOLERANCE)
    np.testing.assert_allclose(expected["block"][:, :2], expected["token"][:, :2], atol=TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_chains_that_end_where_the_drafter_is_unsure(rule: Verification, seed: int) -> None:
    # How many drafts there are depends on those drawn: known before the next, as by min_confidence.
    grid = build(seed, 4, 3, [PLAIN], "independent", 0.2, 1e-3)
    tokens, drafted = grid.paths.tokens, grid.paths.drafted
    sure = grid.q[0].max(axis=-1) >= 0.55
    until = np.cumprod(sure, axis=1).sum(axis=1)
    drawn = chains.drawing_probability(grid.q[0], grid.paths)
    ended = np.flatnonzero((drafted == until) & (drawn > 0))
    hypothesis.assume(len(set(drafted[ended].tolist())) > 1)
    np.testing.assert_allclose(drawn[ended].sum(), 1)
    outcomes = enumerator(rule, True)(grid.rounds)
    weight = exact_rounds.chances(outcomes, drawn)[ended]
    path, corner = np.nonzero(weight)
    at = ended[path]
    law = chains.emitted(
        grid.targets[0],
        tokens[at],
        outcomes.accepted[at, corner],
        weight[path, corner],
        outcomes.last[at, corner].astype(np.float64),
    )
    np.testing.assert_allclose(law, chains.joint(grid.targets[0]), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
def test_a_rejection_that_leaves_no_residual_falls_back_to_p(rule: Verification) -> None:
    # q is p, but for a rounding that makes every q a little larger: max(p - q, 0) is empty.
    target = random_tables(np.random.default_rng(4), 3, 3, 0.3, 1e-3)
    laws = [transforms.laws(table, PLAIN) for table in target]
    above = [law * (1 + 1e-5) for law in laws[:2]]
    grid = exact_rounds.grid(target, [laws], [laws[:2]], [PLAIN], [above])
    outcomes = enumerator(rule, True)(grid.rounds)
    assert (outcomes.accepting[grid.paths.drafted == 2] < exact_rounds.GRID).all()
    check(grid, outcomes, True)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "point-mass"])
@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), row=transforms_of_rows)
def test_thresholds_and_overlap_are_the_papers(dense: bool, seed: int, row: Transforms) -> None:
    grid = build(seed, 4, 2, [row, PLAIN], "independent", 0.3, 1e-3)
    overlaps, depth = [], grid.q.shape[2]
    for rule in RULES:
        outcomes = enumerator(rule, dense)(grid.rounds)
        measured = (outcomes.accepting / exact_rounds.GRID).reshape(*grid.q.shape[:2], depth)
        overlaps.append(outcomes.overlap.reshape(measured.shape))
        for r in range(len(measured)):
            q = grid.q[r] if dense else np.eye(4)[grid.paths.tokens]
            drawn = np.flatnonzero(chains.drawing_probability(q, grid.paths) > 0)
            paths = chains.Paths(grid.paths.tokens[drawn], grid.paths.drafted[drawn])
            with np.errstate(divide="ignore", invalid="ignore"):  # filler has q = 0
                token = chains.token_coins(grid.p[r, drawn], q[drawn], paths.tokens)
            used = np.arange(depth) < paths.drafted[:, None]
            if rule == "block":
                paper = chains.block_coins(grid.p[r, drawn], q[drawn], paths)
                # A longer block that is certain hides the shorter one's coin.
                used &= np.cumsum((paper[:, ::-1] > 1 - 1e-5), axis=1)[:, ::-1] == 0
            else:
                paper = token
                # After a draft that cannot pass, no coin is looked at.
                used &= np.cumprod(np.pad(token > 0, [(0, 0), (1, 0)], constant_values=True), 1)[
                    :, :-1
                ].astype(bool)
            used &= ~np.isnan(paper)
            np.testing.assert_allclose(measured[r, drawn][used], paper[used], atol=2e-5)
            overlap = np.minimum(grid.p[r, :, :-1], grid.q[r] if dense else q).sum(axis=-1)
            overlap *= np.arange(depth) < grid.paths.drafted[:, None]
            np.testing.assert_allclose(overlaps[-1][r], overlap, atol=1e-6)


def _verify(
    logits: np.ndarray,
    tokens: np.ndarray,
    drafted: np.ndarray,
    temperatures: list[float],
    rule: Verification,
    log_q: np.ndarray | None,
    seed: int = 0,
) -> Verdict:
    """Verify chains without patches; log_q of None is for point-mass drafts."""
    batch, depth = tokens.shape
    proposal = Proposal(
        tokens=jnp.asarray(tokens),
        topology=trees.chain(depth),
        valid=jnp.asarray(np.arange(depth) < drafted[:, None]),
        law=PointMass() if log_q is None else Dense(log_q=jnp.asarray(log_q)),
    )
    rows = sampling.rows([SamplingParams(temperature=t) for t in temperatures])
    return _verify_chain(
        jnp.asarray(logits), proposal, rows, jax.random.split(jax.random.key(seed), batch), rule
    )


_verify_chain = jax.jit(verify_chain, static_argnames="rule")
BATCH = 64


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "point-mass"])
@pytest.mark.parametrize("rule", RULES)
def test_a_wholly_greedy_batch_keeps_the_drafts_that_are_the_argmax(
    rule: Verification, dense: bool
) -> None:
    generator = np.random.default_rng(7)
    logits = generator.integers(0, 3, (BATCH, 4, 5)).astype(np.float32)  # many ties
    best = logits.argmax(axis=-1)
    hit = generator.random((BATCH, 3)) < 0.7
    tokens = np.where(hit, best[:, :3], generator.integers(0, 5, (BATCH, 3))).astype(np.int32)
    drafted = generator.integers(0, 4, BATCH)
    with np.errstate(divide="ignore"):
        log_q = np.log(np.eye(5, dtype=np.float32)[tokens]) if dense else None
    verdict = _verify(logits, tokens, drafted, [0.0] * BATCH, rule, log_q)
    mixed = _verify(logits, tokens, drafted, [0.0] * (BATCH - 1) + [1.0], rule, log_q)
    for row in range(BATCH):
        n = 0
        while n < drafted[row] and tokens[row, n] == best[row, n]:
            n += 1
        assert int(verdict.accepted[row]) == n
        assert int(verdict.final[row]) == best[row, n]
        examined = slice(0, min(n + 1, int(drafted[row])))
        overlap = (tokens == best[:, :3])[row, examined]
        np.testing.assert_array_equal(np.asarray(verdict.overlap)[row, examined], overlap)
        if row < BATCH - 1:  # nor does a stochastic neighbour change anything
            assert int(mixed.accepted[row]) == n
            assert int(mixed.final[row]) == best[row, n]
            np.testing.assert_array_equal(np.asarray(mixed.overlap)[row, examined], overlap)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_unusable_logits_end_the_row_where_they_are_reached_and_only_there(
    rule: Verification, temperature: float, poison: float
) -> None:
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 1, (BATCH, 4, 5)).astype(np.float32)
    tokens = generator.integers(0, 5, (BATCH, 3)).astype(np.int32)
    if temperature == 0:
        tokens[::2] = logits.argmax(axis=-1)[::2, :3]
    bad = np.arange(BATCH) % 5  # the poisoned node; 4 is none
    for row in np.flatnonzero(bad < 4):
        if poison == -np.inf:
            logits[row, bad[row]] = poison
        else:
            logits[row, bad[row], generator.integers(5)] = poison
    log_q = np.full((BATCH, 3, 5), np.log(0.2), np.float32)
    verdict = _verify(logits, tokens, np.full(BATCH, 3), [temperature] * BATCH, rule, log_q)
    accepted, finite = np.asarray(verdict.accepted), np.asarray(verdict.finite)
    np.testing.assert_array_equal(finite, accepted < bad)
    assert (accepted <= bad).all()
    assert 0 < (~finite[(bad > 0)]).sum() < (bad > 0).sum()  # both kinds occurred
    final = np.asarray(verdict.final)
    assert ((final >= 0) & (final < 5)).all()
    assert np.isfinite(np.asarray(verdict.overlap)[finite][:, 0]).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_nan_is_seen_in_a_large_vocabulary(rule: Verification) -> None:
    # Where XLA's maximum on CPU no longer propagates it.
    logits = np.zeros((1, 1, 49152), np.float32)
    logits[0, 0, 30000] = np.nan
    for temperature in (0.0, 1.0):
        nothing = np.zeros((1, 0), np.int32)
        verdict = _verify(logits, nothing, np.zeros(1), [temperature], rule, None)
        assert not np.asarray(verdict.finite)[0]


@pytest.mark.parametrize("rule", RULES)
def test_a_node_with_unusable_logits_ends_the_chain_and_keeps_the_law(rule: Verification) -> None:
    # What is drawn before the node is exact, and the node is reached with p's own probability.
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.2, 0.6])
    logits = np.log(np.stack([p, p, p])).astype(np.float32)
    logits[1, 2] = np.nan
    count = 20000
    tokens = np.random.default_rng(0).choice(3, (count, 2), p=q).astype(np.int32)
    verdict = _verify(
        np.broadcast_to(logits, (count, 3, 3)),
        tokens,
        np.full(count, 2),
        [1.0] * count,
        rule,
        np.log(np.broadcast_to(q, (count, 2, 3))).astype(np.float32),
    )
    first = np.where(np.asarray(verdict.accepted) > 0, tokens[:, 0], np.asarray(verdict.final))
    assert stats.chisquare(np.bincount(first, minlength=3), count * p).pvalue > 1e-3
    np.testing.assert_array_equal(np.asarray(verdict.finite), np.asarray(verdict.accepted) == 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_went_nan_changes_no_law(rule: Verification) -> None:
    p = np.array([0.6, 0.3, 0.1])
    count = 20000
    log_q = np.log(np.full((count, 2, 3), 1 / 3)).astype(np.float32)
    log_q[:, 0] = np.nan
    tokens = np.zeros((count, 2), np.int32)
    logits = np.broadcast_to(np.log(p).astype(np.float32), (count, 3, 3))
    verdict = _verify(logits, tokens, np.full(count, 2), [1.0] * count, rule, log_q)
    assert not np.asarray(verdict.accepted).any()
    assert np.asarray(verdict.finite).all()
    assert np.isfinite(np.asarray(verdict.overlap)).all()
    counts = np.bincount(np.asarray(verdict.final), minlength=3)
    assert stats.chisquare(counts, count * p).pvalue > 1e-3
