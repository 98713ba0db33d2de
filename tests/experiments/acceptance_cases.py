"""Drafters measured by hand, of which tables and pictures are made."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments import acceptance_report
from experiments.acceptance_measure import Measured
from experiments.differences import Difference
from experiments.teacher_forcing import Forced
from experiments.workloads import Workload
from jspec.metrics import Counts, Timing
from jspec.requests import Completion


def completion(rounds: dict[tuple[int, int], int], gamma: int, overlap: list[float]) -> Completion:
    """Return one of so many rounds by (drafts proposed, drafts accepted)."""
    histogram = np.zeros((gamma + 1, gamma + 1), np.int64)
    for place, count in rounds.items():
        histogram[place] = count
    emitted = sum((accepted + 1) * count for (_, accepted), count in rounds.items())
    padded = np.zeros(gamma)
    padded[: len(overlap)] = overlap
    return Completion(
        token_ids=tuple(range(emitted)),
        text="",
        finish_reason="length",
        stop_reason=None,
        error=None,
        counts=Counts(histogram, padded, emitted, 0),
        timing=Timing(1.0, 1.5, 2.0),
    )


def measured(drafter: str, temperature: float, gamma: int = 4) -> list[Measured]:
    """Return two prompts of one category and one of another, drafted to depth 2."""
    rows = [
        ("1", "sql", {(2, 0): 1, (2, 1): 1, (0, 0): 1}, [1.5, 0.5], [0.5, 0.0], None),
        ("2", "sql", {(2, 2): 2}, [1.5, 1.5], [0.9, 0.8], None),
        ("3", "math_reasoning", {(2, 0): 3, (1, 1): 1}, [1.0, 0.0], [0.31], Difference(4, 2e-6)),
    ]
    return [
        Measured(
            Workload(question, category, "p"),
            temperature,
            drafter,
            completion(rounds, gamma, overlap),
            Forced(np.array(forced, np.float32), np.array(forced) > 0),
            difference if temperature == 0 else None,
        )
        for question, category, rounds, overlap, forced, difference in rows
    ]


def summary(drafters: list[str], temperatures: tuple[float, ...] = (0.0, 0.7)) -> dict[str, Any]:
    """Return the content of a summary.json."""
    memory = {
        "own": 2_000_000,
        "lent": 10_000_000,
        "state": 500_000,
        "own_share": 0.02,
        "lent_share": 0.1,
        "state_share": 0.03,
        "capacity": 1024,
    }
    group = {"prompts": 2, "speedup": 1.25, "range": [1.0, 1.5]}
    speed = {
        "categories": {"sql": group, "math_reasoning": group | {"speedup": 0.75}},
        "total": group,
        "mean": 1.0,
        "worst": {"category": "math_reasoning", "speedup": 0.75},
        "repeats": 3,
    }
    return {
        "label": "measured",
        "setting": "a model, a machine, a day",
        "drafters": {name: {"drafts": 4, "shape": "chain", "memory": memory} for name in drafters},
        "acceptance": {
            f"{temperature:g}": {
                name: acceptance_report.summarise(measured(name, temperature)) for name in drafters
            }
            for temperature in temperatures
        },
        "speed": {"0": {drafters[0]: speed}},
    }
