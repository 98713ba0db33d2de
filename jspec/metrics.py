"""Every figure that is derived from raw counts, defined once.

Names and meanings follow Leviathan et al. 2023 (arXiv 2211.17192) where the paper has them. Nothing
here is measured; times come in with the counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
    """Raw counts of one request, or the sum over several.

    Attributes:
        histogram: [G + 1, G + 1] int64, rounds by (drafts proposed, drafts accepted).
        overlap: [G] float64, sum over examined positions of sum_x min(p, q).
        emitted: tokens committed.
        discarded: tokens verified and then cut because a stop came first.
        nodes: [G + 1, 2] int64, for each node of the tree (of a static one; the root is node 0) the
            rounds that accepted it, and those of them that proposed drafts deeper than it.
    """

    histogram: np.ndarray
    overlap: np.ndarray
    emitted: int
    discarded: int
    nodes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 2), np.int64))

    @property
    def rounds(self) -> int:
        """Row-rounds."""
        return int(self.histogram.sum())

    @property
    def rounds_without_draft(self) -> int:
        """Row-rounds in which nothing was proposed."""
        return int(self.histogram[0].sum())

    @property
    def proposed(self) -> np.ndarray:
        """[G] int64: rounds that proposed a draft at each position."""
        return self.histogram[::-1].cumsum(axis=0)[::-1].sum(axis=1)[1:]

    @property
    def accepted(self) -> np.ndarray:
        """[G] int64: rounds that accepted the draft at each position."""
        return self.histogram[:, ::-1].cumsum(axis=1)[:, ::-1].sum(axis=0)[1:]

    @property
    def examined(self) -> np.ndarray:
        """[G] int64: rounds that proposed a draft at a position and accepted all before it."""
        size = self.histogram.shape[0]
        return np.array(
            [int(self.histogram[i:, i - 1 :].sum()) for i in range(1, size)], dtype=np.int64
        )


def total(counts: Sequence[Counts]) -> Counts:
    """Add up counts; those of a smaller G are padded.

    Raises:
        ValueError: there is nothing to add.
    """
    if not counts:
        raise ValueError("no counts to add up")
    gamma = max(c.overlap.shape[0] for c in counts)
    histogram = np.zeros((gamma + 1, gamma + 1), np.int64)
    overlap = np.zeros(gamma, np.float64)
    nodes = np.zeros((gamma + 1, 2), np.int64)
    for c in counts:
        size = c.overlap.shape[0]
        histogram[: size + 1, : size + 1] += c.histogram
        overlap[:size] += c.overlap
        nodes[: len(c.nodes)] += c.nodes
    return Counts(
        histogram=histogram,
        overlap=overlap,
        emitted=sum(c.emitted for c in counts),
        discarded=sum(c.discarded for c in counts),
        nodes=nodes,
    )


def _ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None where there is nothing to divide by."""
    return part / whole if whole else None


def block_efficiency(counts: Counts) -> float | None:
    """Return tau: tokens emitted a row-round, correction or bonus token included."""
    return _ratio(counts.emitted, counts.rounds)


def acceptance_rate(counts: Counts) -> float | None:
    """Return accepted / proposed drafts. It falls with gamma; it is not alpha."""
    return _ratio(int(counts.accepted.sum()), int(counts.proposed.sum()))


def conditional_rates(counts: Counts) -> list[float | None]:
    """Return, for each position, P(accepted | proposed and all before it accepted)."""
    return [_ratio(int(a), int(e)) for a, e in zip(counts.accepted, counts.examined, strict=True)]


def mean_overlap(counts: Counts) -> float | None:
    """Return the mean of sum_x min(p, q) over examined positions.

    An estimate of alpha that still depends on gamma: later positions are examined only in rounds
    that survived the earlier ones.
    """
    return _ratio(float(counts.overlap.sum()), int(counts.examined.sum()))


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return E[tokens a round] for i.i.d. acceptance alpha (Leviathan et al. 2023, eq. 1)."""
    # The sum rather than its closed form, which cancels near alpha = 1.
    return float(sum(alpha**accepted for accepted in range(gamma + 1)))


def walltime_improvement(alpha: float, gamma: int, cost: float) -> float:
    """Return S(gamma) for c = draft time / target time (Leviathan et al. 2023, theorem 3.8)."""
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall times of one request, in seconds from the start of its batch.

    Attributes:
        prefill: end of the prefill.
        first: the first token was at hand.
        end: the last token was at hand. Where a row ended inside a chunk of rounds, the chunk's
            time is split evenly over its rounds.
    """

    prefill: float
    first: float
    end: float


def tpot(timing: Timing, tokens: int) -> float | None:
    """Return seconds a token after the first: (end-to-end - TTFT) / (tokens - 1)."""
    return _ratio(timing.end - timing.first, tokens - 1) if tokens > 1 else None


def summary(counts: Counts) -> dict[str, Any]:
    """Return raw counts and every figure derived from them, ready for JSON."""
    return {
        "rounds": counts.rounds,
        "rounds_without_draft": counts.rounds_without_draft,
        "proposed": counts.proposed.tolist(),
        "accepted": counts.accepted.tolist(),
        "examined": counts.examined.tolist(),
        "histogram": counts.histogram.tolist(),
        "emitted": counts.emitted,
        "discarded": counts.discarded,
        "block_efficiency": block_efficiency(counts),
        "acceptance_rate": acceptance_rate(counts),
        "conditional_rates": conditional_rates(counts),
        "mean_overlap": mean_overlap(counts),
    }
