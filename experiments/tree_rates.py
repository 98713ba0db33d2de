"""Measuring what the best tree depends on: acceptance by place among siblings, and costs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

import jspec
from experiments import timing
from experiments.status import Status
from jspec import metrics, tree_shapes
from jspec.requests import Request

SIZES = (1, 2, 4, 8, 16, 32)
_TURNS, _STEPS = 7, 4
_CONTEXT, _CAPACITY = 200, 384  # committed tokens in the cache, and its slots


@dataclasses.dataclass(frozen=True)
class Rates:
    """Unconditional acceptance by place among siblings.

    Attributes:
        values: p_1, p_2, ...
        rounds: that were counted; 0 where the rates are given, not measured.
    """

    values: tuple[float, ...]
    rounds: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of forward passes, by tokens run in one.

    Attributes:
        verify: of the target.
        draft: of the draft model.
    """

    verify: dict[int, float]
    draft: dict[int, float]

    @staticmethod
    def _at(seconds: dict[int, float], nodes: int) -> float:
        return float(np.interp(nodes, list(seconds), list(seconds.values())))

    def target_pass(self, nodes: int) -> float:
        """Return the seconds of a target pass, straight between the sizes measured."""
        return self._at(self.verify, nodes)

    def draft_pass(self, nodes: int) -> float:
        """Return the seconds that drafting a level takes: a pass over the whole tree."""
        return self._at(self.draft, nodes)


def measure_rates(
    target: jspec.Model,
    drafter: jspec.BoundDrafter,
    parents: Sequence[int],
    requests: Sequence[Request],
    batch_size: int,
) -> Rates:
    """Decode with a tree, and count which child was taken at each of its nodes.

    With a tree of one level every round counts once, at the token after its pending one.

    Args:
        target: what is drafted for.
        drafter: of the tree.
        parents: of the tree.
        requests: what is decoded.
        batch_size: rows decoded together.
    """
    decoder = jspec.Decoder(target, drafter, batch_size=batch_size)
    nodes = metrics.total([done.counts for done in decoder.generate(requests)]).nodes
    return Rates(tuple(tree_shapes.measured_rates(parents, nodes)), int(nodes[0, 1]))


def measure_costs(
    target: jspec.Model, model: jspec.Model, sizes: Sequence[int], status: Status
) -> Costs:
    """Time passes of target and draft model over several tokens, interleaved, at batch 1."""
    timers: dict[str, Callable[[], float]] = {}
    for kind, run in (("verify", target), ("draft", model)):
        for nodes in sizes:
            timers[f"{kind} {nodes}"] = timing.step_timer(
                run, 1, nodes, _CAPACITY, _CONTEXT, _STEPS
            )
    status.busy(f"Timing {len(timers)} passes, {_TURNS} turns ...")
    samples = timing.interleave(timers, _TURNS)
    verify, draft = (
        {nodes: statistics.median(samples[f"{kind} {nodes}"]) for nodes in sizes}
        for kind in ("verify", "draft")
    )
    return Costs(verify, draft)
