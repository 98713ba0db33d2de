"""Derived figures against hand-computed cases and a replay of random rounds."""

from __future__ import annotations

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import metrics
from jspec.metrics import Counts, Timing


def counts_of(rounds: list[tuple[int, int]], gamma: int, overlap: float = 0.0) -> Counts:
    """Return the counts of (proposed, accepted) rounds that emit all they verify."""
    histogram = np.zeros((gamma + 1, gamma + 1), np.int64)
    for proposed, accepted in rounds:
        histogram[proposed, accepted] += 1
    emitted = sum(accepted + 1 for _, accepted in rounds)
    return Counts(histogram, np.full(gamma, overlap), emitted, 0)


gammas = st.shared(st.integers(0, 6), key="gamma")
some_rounds = gammas.flatmap(
    lambda gamma: st.lists(
        st.integers(0, gamma).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
        max_size=30,
    )
)


@hypothesis.given(gamma=gammas, rounds=some_rounds)
def test_positions_are_counted_as_a_replay_counts_them(
    gamma: int, rounds: list[tuple[int, int]]
) -> None:
    proposed, examined, accepted = [0] * gamma, [0] * gamma, [0] * gamma
    for drafts, kept in rounds:
        alive = True
        for position in range(drafts):
            proposed[position] += 1
            examined[position] += alive
            alive = alive and position < kept
            accepted[position] += alive
    counts = counts_of(rounds, gamma)
    assert counts.rounds == len(rounds)
    assert counts.rounds_without_draft == sum(drafts == 0 for drafts, _ in rounds)
    assert counts.proposed.tolist() == proposed
    assert counts.examined.tolist() == examined
    assert counts.accepted.tolist() == accepted
    assert counts.emitted == sum(accepted) + len(rounds)

    rate = metrics.acceptance_rate(counts)
    assert rate == (sum(accepted) / sum(proposed) if sum(proposed) else None)
    conditional = [a / e if e else None for a, e in zip(accepted, examined, strict=True)]
    assert metrics.conditional_rates(counts) == conditional
    assert all(r is None or 0 <= r <= 1 for r in [rate, *conditional])
    tau = metrics.block_efficiency(counts)
    assert tau == ((sum(accepted) + len(rounds)) / len(rounds) if rounds else None)
    assert tau is None or 1 <= tau <= gamma + 1


def test_by_hand() -> None:
    # Three rounds of 3 drafts (3, 1 and 0 accepted), one of 2 (2 accepted), one without.
    rounds = [(3, 3), (3, 1), (3, 0), (2, 2), (0, 0)]
    counts = counts_of(rounds, 3)
    counts = Counts(counts.histogram, np.array([3.0, 2.0, 0.5]), counts.emitted, 4)
    assert metrics.summary(counts) == {
        "rounds": 5,
        "rounds_without_draft": 1,
        "proposed": [4, 4, 3],
        "accepted": [3, 2, 1],
        "examined": [4, 3, 1],
        "histogram": [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]],
        "emitted": 11,
        "discarded": 4,
        "block_efficiency": 11 / 5,
        "acceptance_rate": 6 / 11,
        "conditional_rates": [3 / 4, 2 / 3, 1.0],
        "mean_overlap": 5.5 / 8,
    }


def test_nothing_divides_by_nothing() -> None:
    counts = counts_of([], 2)
    assert metrics.block_efficiency(counts) is None
    assert metrics.acceptance_rate(counts) is None
    assert metrics.conditional_rates(counts) == [None, None]
    assert metrics.mean_overlap(counts) is None
    plain = counts_of([(0, 0)] * 3, 0)
    assert metrics.block_efficiency(plain) == 1
    assert metrics.conditional_rates(plain) == []


@hypothesis.given(gamma=gammas, rounds=some_rounds, extra=st.integers(0, 3))
def test_total_is_the_counts_of_all_rounds(
    gamma: int, rounds: list[tuple[int, int]], extra: int
) -> None:
    split = len(rounds) // 3
    parts = [counts_of(rounds[:split], gamma, 0.5), counts_of(rounds[split:], gamma + extra, 0.25)]
    added, whole = metrics.total(parts), counts_of(rounds, gamma + extra)
    np.testing.assert_array_equal(added.histogram, whole.histogram)
    assert added.emitted == whole.emitted
    assert added.overlap.tolist() == [0.75] * gamma + [0.25] * extra
    with pytest.raises(ValueError, match="no counts"):
        metrics.total([])


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"),
    [
        (0.0, 5, 1.0),
        (0.5, 0, 1.0),
        (0.5, 1, 1.5),
        (0.5, 3, 1.875),
        (0.8, 2, 2.44),
        (0.9, 4, 4.0951),
        (1.0, 0, 1.0),
        (1.0, 7, 8.0),
        (1 - 1e-13, 7, 8 - 28e-13),
    ],
)
def test_expected_tokens(alpha: float, gamma: int, tokens: float) -> None:
    assert metrics.expected_tokens(alpha, gamma) == pytest.approx(tokens, rel=1e-15, abs=0)


def test_expected_tokens_are_those_of_coin_flips() -> None:
    # P(n accepted) = alpha^n (1 - alpha) for n < gamma, alpha^gamma for n = gamma.
    for alpha in (0.1, 0.6, 0.95):
        for gamma in (1, 4, 9):
            mean = sum(alpha**n * (1 - alpha) * (n + 1) for n in range(gamma))
            mean += alpha**gamma * (gamma + 1)
            assert metrics.expected_tokens(alpha, gamma) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "cost", "real_optimum", "best", "speedup"),
    [
        (0.6, 0.05, 4.06, 4, 1.92),
        (0.7, 0.05, 5.48, 6, 2.35),
        (0.8, 0.05, 7.86, 8, 3.09),
        (0.8, 0.1, 5.76, 6, 2.47),
        (0.9, 0.1, 9.65, 10, 3.43),
        (0.5, 0.2, 1.45, 1, 1.25),
    ],
)
def test_the_best_gamma_by_walltime_improvement(
    alpha: float, cost: float, real_optimum: float, best: int, speedup: float
) -> None:
    figures = [metrics.walltime_improvement(alpha, gamma, cost) for gamma in range(65)]
    assert int(np.argmax(figures)) == best
    assert figures[best] == pytest.approx(speedup, abs=0.005)
    assert best in (math.floor(real_optimum), math.ceil(real_optimum))
    assert figures[0] == 1


@pytest.mark.parametrize(("alpha", "cost"), [(0.3, 0.3), (0.3, 0.5), (0.0, 0.01)])
def test_no_gamma_pays_unless_alpha_exceeds_the_cost(alpha: float, cost: float) -> None:
    # Corollary 3.9; gamma = 1 gives (1 + alpha) / (1 + c).
    assert all(metrics.walltime_improvement(alpha, gamma, cost) <= 1 for gamma in range(1, 65))
    assert metrics.walltime_improvement(0.6, 1, 0.2) == pytest.approx(1.6 / 1.2)


def test_tpot_leaves_the_first_token_out() -> None:
    timing = Timing(prefill=0.5, first=0.75, end=2.75)
    assert metrics.tpot(timing, 5) == 0.5
    assert metrics.tpot(timing, 1) is None
    assert metrics.tpot(timing, 0) is None
