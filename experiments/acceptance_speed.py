"""Walltime of drafters over plain decoding, one prompt at a time, in turn, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jspec
from experiments import tree_compare
from experiments.runs import Run
from experiments.status import Status
from experiments.tree_compare import PLAIN, Result
from experiments.workloads import Workload
from jspec.requests import Completion, Request

FILE = "timing.jsonl"


def measure(
    decoders: Mapping[str, jspec.Decoder],
    prompts: Sequence[tuple[Workload, Request]],
    repeats: int,
    run: Run,
    status: Status,
) -> dict[str, Any]:
    """Decode every prompt by every method, `repeats` times over; who begins takes turns.

    Args:
        decoders: by method, `PLAIN` first, of one row each.
        prompts: of one temperature.
        repeats: turns.
        run: gets timing.jsonl.
        status: where progress is shown.

    Returns:
        As `summarise`.
    """
    results = tree_compare.measure(decoders, [*prompts] * repeats, run, status, set(), FILE)
    return summarise(results)


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Return, by method, the speed over plain: medians over prompts of each prompt's own median."""
    methods = [name for name in results[0].done if name != PLAIN]
    return {name: _section(results, name) for name in methods}


def _section(results: Sequence[Result], method: str) -> dict[str, Any]:
    by_prompt: dict[Workload, list[float]] = {}
    for result in results:
        ratio = _rate(result.done[method]) / _rate(result.done[PLAIN])
        by_prompt.setdefault(result.workload, []).append(ratio)
    medians = {workload: statistics.median(ratios) for workload, ratios in by_prompt.items()}
    groups: dict[str, list[float]] = {}
    for workload, speed in medians.items():
        groups.setdefault(workload.category, []).append(speed)
    categories = {name: _group(speeds) for name, speeds in groups.items()}
    speeds = {name: group["speedup"] for name, group in categories.items()}
    worst = min(speeds, key=lambda name: speeds[name])
    return {
        "categories": categories,
        "total": _group(list(medians.values())),
        "mean": statistics.fmean(speeds.values()),
        "worst": {"category": worst, "speedup": speeds[worst]},
        "repeats": max(map(len, by_prompt.values())),
    }


def _group(speeds: Sequence[float]) -> dict[str, Any]:
    return {
        "prompts": len(speeds),
        "speedup": statistics.median(speeds),
        "range": [min(speeds), max(speeds)],
    }


def _rate(done: Completion) -> float:
    return len(done.token_ids) / tree_compare.seconds(done)
