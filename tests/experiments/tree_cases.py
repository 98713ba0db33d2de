"""A comparison of trees with chains made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import tree_compare
from experiments.tree_compare import Result
from experiments.workloads import Workload
from jspec.metrics import Counts, Timing
from jspec.requests import Completion


def completion(rounds: int, tokens: int, seconds: float, first: int = 1) -> Completion:
    """Return one of so many rounds and tokens, the first of which is `first`."""
    histogram = np.zeros((4, 4), np.int64)
    histogram[3, 0] = rounds
    return Completion(
        token_ids=(first, *range(2, tokens + 1)),
        text="",
        finish_reason="length",
        stop_reason=None,
        error=None,
        counts=Counts(histogram, np.zeros(3), tokens, 0),
        timing=Timing(1.0, 1.5, 1.0 + seconds),
    )


def results() -> list[Result]:
    """Return prompts of two categories; in the last one a tree's output differs."""
    rows = [("open_chat", 12, 6, 4, 1), ("open_chat", 8, 8, 4, 1), ("sql", 10, 5, 5, 7)]
    return [
        Result(
            Workload(str(index), category, "p"),
            {
                "plain": completion(tokens, tokens, tokens * 1.0),
                "chain 3": completion(chain, tokens, chain * 1.25),
                "tree 3": completion(tree, tokens, tree * 1.5, first),
            },
        )
        for index, (category, tokens, chain, tree, first) in enumerate(rows)
    ]


def comparison() -> dict[str, Any]:
    """Return the section of one temperature."""
    return tree_compare.summarise(results())
