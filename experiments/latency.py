"""Latency percentiles: time to first token, time per output token, end-to-end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import results, tables
from jspec import metrics
from jspec.requests import Completion

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MODES = ("plain", "speculative")
_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "end_to_end": "end-to-end"}
NOTE = (
    "TTFT: time to the first token, prefill and first round. TPOT: (end-to-end - TTFT) / "
    "(tokens - 1). Programs are compiled before. Percentiles are over the samples, interpolated "
    "linearly; with fewer than 100, p99 is next to the slowest."
)


def summarise(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the percentiles of finished requests, in seconds.

    Args:
        completions: timed from the start of their batch, without compilation.

    Returns:
        for each of `ttft`, `tpot` and `end_to_end` its `p50`, `p90`, `p99` and number of
        `samples`. A completion of one token has no TPOT.
    """
    values: dict[str, list[float | None]] = {
        "ttft": [done.timing.first for done in completions],
        "tpot": [metrics.tpot(done.timing, len(done.token_ids)) for done in completions],
        "end_to_end": [done.timing.end for done in completions],
    }
    return {name: _percentiles(times) for name, times in values.items()}


def _percentiles(times: Sequence[float | None]) -> dict[str, Any]:
    known = [time for time in times if time is not None]
    found = {name: results.quantile(known, q) for name, q in QUANTILES.items()}
    return {"samples": len(known), **found}


def cells(
    groups: Sequence[tuple[str, dict[str, Any]]], title: str
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table with two rows, plain and speculative, a group.

    Args:
        groups: the first row's label, and by mode what `summarise` returns.
        title: of the labels' column.
    """
    header = [title, "mode", "samples"]
    for name, short in _TIMES.items():
        unit = "s" if name == "end_to_end" else "ms"
        header += [f"{short}\n{quantile} {unit}" for quantile in QUANTILES]
    rows = []
    for label, by_mode in groups:
        for mode in MODES:
            times = by_mode[mode]
            counts = list(dict.fromkeys(str(times[name]["samples"]) for name in _TIMES))
            row = [label if mode == MODES[0] else "", mode, "/".join(counts)]
            for name in _TIMES:
                scale = 1 if name == "end_to_end" else 1000
                row += [tables.figure(times[name][quantile], scale) for quantile in QUANTILES]
            rows.append(row)
    return header, rows
