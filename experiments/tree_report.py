"""What is known of a tree beside the chain and the best tree of its size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments import tables, tree_flags, tree_text
from experiments.tree_rates import Costs, Rates
from jspec import tree_shapes
from jspec.tree_shapes import Best


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tree and its alternatives for some rates.

    Attributes:
        rates: what they are judged by.
        tree: the one given, or the best.
        best: what commits most tokens with as many drafts.
        depth: most levels that `best` may have.
        by_cost: what takes the least time a token; None without costs.
        costs: None where nothing was timed.
    """

    rates: Rates
    tree: tuple[int, ...]
    best: Best
    depth: int
    by_cost: Best | None
    costs: Costs | None

    @property
    def named(self) -> list[tuple[str, Sequence[int]]]:
        """The tree, the chain and the best tree of its size, and the best by cost, with names."""
        found: list[tuple[str, Sequence[int]]] = [
            ("tree", self.tree),
            ("chain", _chain(len(self.tree) - 1)),
            ("best by tokens", self.best.parents),
        ]
        if self.by_cost is not None:
            found.append(("best by cost", self.by_cost.parents))
        return found


def make(
    rates: Rates, given: tuple[int, ...], drafts: int, depth: int, costs: Costs | None
) -> Plan:
    """Find the best trees.

    Args:
        rates: as measured.
        given: the tree asked for; () where the best one is.
        drafts: most of the best tree.
        depth: most levels of the best trees.
        costs: what passes cost, None if not known.
    """
    best = tree_shapes.optimal(rates.values, drafts + 1, depth)
    by_cost = None
    if costs is not None:
        sizes = [size for size in costs.verify if size > 1]
        depths = range(1, min(depth, max(sizes) - 1) + 1)
        by_cost = tree_shapes.optimal_by_cost(
            rates.values, sizes, depths, costs.draft_pass, costs.target_pass
        )
        chains = [_valued(_chain(drafts), rates) for drafts in depths]
        by_cost = min([by_cost, *chains], key=lambda tree: _seconds_a_token(tree, costs))
    return Plan(rates, given or best.parents, best, depth, by_cost, costs)


def speed(plan: Plan, parents: Sequence[int]) -> float | None:
    """Return the speed over plain decoding that rates and costs predict."""
    costs = plan.costs
    if costs is None:
        return None
    return costs.target_pass(1) / _seconds_a_token(_valued(parents, plan.rates), costs)


def _chain(drafts: int) -> tuple[int, ...]:
    return tuple(range(-1, drafts))


def _valued(parents: Sequence[int], rates: Rates) -> Best:
    return Best(tuple(parents), tree_shapes.expected_tokens(parents, rates.values))


def _seconds_a_token(tree: Best, costs: Costs) -> float:
    # A chain is drafted token by token, a tree with a pass over all of it for each level.
    is_chain = tree.parents == _chain(len(tree.parents) - 1)
    return tree_shapes.seconds_a_token(
        tree, lambda nodes: costs.draft_pass(1 if is_chain else nodes), costs.target_pass
    )


def text(plan: Plan) -> str:
    """Return the tree and a comparison with its alternatives as text."""
    rates = plan.rates
    whence = f"measured in {rates.rounds} rounds" if rates.rounds else "given"
    parts = [
        "Chance that a node's first, second, .. child is accepted once the node is "
        f"({whence}): {', '.join(map(tables.percent, rates.values))}.",
    ]
    header = ["", "drafts", "depth", "tokens\na round"]
    if plan.costs is not None:
        header.append("speed over plain\n(predicted)")
    rows = []
    for name, parents in plan.named:
        row = [
            name,
            str(len(parents) - 1),
            str(max(tree_shapes.depths(parents))),
            tables.number(tree_shapes.expected_tokens(parents, rates.values)),
        ]
        if plan.costs is not None:
            row.append(tables.ratio(speed(plan, parents)))
        rows.append(row)
    parts.append(tables.render(header, rows))
    limit = f"at most {len(plan.tree) - 1} drafts and {plan.depth} levels"
    parts.append(f"Best by tokens ({limit}):\n  --tree={tree_flags.written(plan.best.parents)}")
    if plan.costs is not None and plan.by_cost is not None:
        parts.append(_costs(plan.costs))
        parts.append(_by_cost(plan.by_cost.parents, max(plan.costs.verify) - 1))
    parts.append(tree_text.describe(plan.tree, rates.values))
    return "\n\n".join(parts)


def _by_cost(parents: Sequence[int], drafts: int) -> str:
    if len(parents) > 1:
        return (
            f"Best by cost (least time a token; passes of up to {drafts} drafts were timed):\n"
            f"  --tree={tree_flags.written(parents)}"
        )
    return (
        "Best by cost: do not speculate. Plain decoding is faster than any tree of up to "
        f"{drafts} drafts,\nwhose passes were timed."
    )


def _costs(costs: Costs) -> str:
    header = ["tokens in a pass", *map(str, costs.verify)]
    plain = costs.verify[1]
    rows = [
        [name, *(tables.milliseconds(seconds) for seconds in found.values())]
        for name, found in (("target", costs.verify), ("draft model", costs.draft))
    ]
    rows.append(
        ["target over one token's", *(tables.ratio(s / plain) for s in costs.verify.values())]
    )
    return tables.render(header, rows)


def summary(plan: Plan) -> dict[str, Any]:
    """Return the plan for summary.json; seconds."""
    rates = plan.rates.values
    return {
        "rates": list(rates),
        "rounds": plan.rates.rounds,
        "verify_seconds": plan.costs.verify if plan.costs else None,
        "draft_seconds": plan.costs.draft if plan.costs else None,
        "trees": {
            name: {
                "parents": list(parents),
                "depth": max(tree_shapes.depths(parents)),
                "reached": tree_shapes.chances(parents, rates),
                "expected_tokens": tree_shapes.expected_tokens(parents, rates),
                "speed_predicted": speed(plan, parents),
            }
            for name, parents in plan.named
        },
    }
