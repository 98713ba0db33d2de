"""Tokens a second of plain and speculative decoding when more rows are decoded together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import jspec
from experiments import latency
from experiments.status import Status
from experiments.workloads import Workload
from jspec import metrics
from jspec.errors import InputError
from jspec.requests import Completion, Request

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Turn:
    """All prompts decoded once plainly and once speculatively, at one batch.

    Attributes:
        plain: by group of rows decoded together, the rows' completions.
        speculative: the same rows.
    """

    plain: tuple[tuple[Completion, ...], ...]
    speculative: tuple[tuple[Completion, ...], ...]


def choose(
    tokenize: Callable[[str], Ids], found: Sequence[Workload], count: int, longest: int
) -> list[tuple[Workload, Ids]]:
    """Return prompts of the categories in turn, each category's in the order given.

    Args:
        tokenize: turns a prompt into tokens.
        found: where to choose from.
        count: how many; fewer are returned where there are no more.
        longest: most tokens of a prompt. Rows are padded to the longest of their batch.

    Raises:
        InputError: no prompt is that short.
    """

    def short(category: str) -> Iterator[tuple[Workload, Ids]]:
        for workload in found:
            if workload.category == category and len(ids := tokenize(workload.prompt)) <= longest:
                yield workload, ids

    waiting = [short(category) for category in dict.fromkeys(w.category for w in found)]
    chosen: list[tuple[Workload, Ids]] = []
    while waiting and len(chosen) < count:
        source = waiting.pop(0)
        prompt = next(source, None)
        if prompt is not None:
            chosen.append(prompt)
            waiting.append(source)
    if not chosen:
        raise InputError(
            "throughput_prompt_tokens", longest, "leaves no prompt", "allow for longer ones"
        )
    return chosen


def groups(requests: Sequence[Request], batch: int) -> list[list[Request]]:
    """Return the requests in full groups of `batch`; the last one goes on with the first ones."""
    count = math.ceil(len(requests) / batch)
    rows = [requests[index % len(requests)] for index in range(count * batch)]
    return [rows[start : start + batch] for start in range(0, len(rows), batch)]


def measure(
    decoders: Callable[[int], tuple[jspec.Decoder, jspec.Decoder]],
    requests: Sequence[Request],
    batches: Sequence[int],
    repeats: int,
    status: Status,
) -> dict[int, list[Turn]]:
    """Decode the same requests at every batch, plainly and speculatively, again and again.

    Batches and modes take turns within a repeat, so that slow spells of the machine hit all alike.

    Args:
        decoders: returns the plain and the speculative decoder of a batch.
        requests: decoded by every batch, in groups of it.
        batches: rows decoded together.
        repeats: turns of each batch, after a first prefill and round that compile.
        status: where progress is shown.
    """
    pairs = {batch: decoders(batch) for batch in batches}
    for batch, pair in pairs.items():
        status.busy(f"Compiling for {batch} rows ...")
        for rows in groups(requests, batch):
            for decoder in pair:
                next(decoder.stream(rows))
    turns: dict[int, list[Turn]] = {batch: [] for batch in batches}
    for repeat in range(repeats):
        for batch, pair in pairs.items():
            status.busy(f"Throughput, turn {repeat + 1} of {repeats}: {batch} rows ...")
            done: tuple[list[tuple[Completion, ...]], ...] = ([], [])
            for index, rows in enumerate(groups(requests, batch)):
                for mode in (0, 1) if (repeat + index) % 2 == 0 else (1, 0):
                    done[mode].append(tuple(pair[mode].generate(rows)))
            turns[batch].append(Turn(tuple(done[0]), tuple(done[1])))
    return turns


def lines(turns: dict[int, list[Turn]]) -> Iterator[dict[str, Any]]:
    """Yield what was measured: a line for each group of rows decoded together, in seconds."""
    for batch, repeats in turns.items():
        for repeat, turn in enumerate(repeats):
            for mode in latency.MODES:
                for group in getattr(turn, mode):
                    yield {
                        "batch": batch,
                        "repeat": repeat,
                        "mode": mode,
                        "tokens": [len(done.token_ids) for done in group],
                        "rounds": [done.counts.rounds for done in group],
                        "prefill": group[0].timing.prefill,
                        "first": [done.timing.first for done in group],
                        "end": [done.timing.end for done in group],
                    }


def _rate(decoded: Sequence[Sequence[Completion]], *, prefill: bool) -> float:
    """Return tokens a second; a group lasts until its slowest row has finished."""
    tokens = sum(len(done.token_ids) for group in decoded for done in group)
    seconds = math.fsum(
        max(done.timing.end for done in group) - (0 if prefill else group[0].timing.prefill)
        for group in decoded
    )
    return tokens / seconds


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return what the turns of one batch say: medians over them, ratios turn by turn."""
    rates = {
        (mode, whole): np.array([_rate(getattr(turn, mode), prefill=whole) for turn in turns])
        for mode in latency.MODES
        for whole in (False, True)
    }
    speedups = rates["speculative", False] / rates["plain", False]
    with_prefill = rates["speculative", True] / rates["plain", True]
    rows = {
        mode: [done for turn in turns for group in getattr(turn, mode) for done in group]
        for mode in latency.MODES
    }
    counts = metrics.total([done.counts for done in rows["speculative"]])
    same = [p.token_ids == s.token_ids for p, s in zip(*rows.values(), strict=True)]
    return {
        "plain_tokens_per_second": float(np.median(rates["plain", False])),
        "speculative_tokens_per_second": float(np.median(rates["speculative", False])),
        "plain_range": [float(f(rates["plain", False])) for f in (np.min, np.max)],
        "speculative_range": [float(f(rates["speculative", False])) for f in (np.min, np.max)],
        "speedup": float(np.median(speedups)),
        "speedup_range": [float(speedups.min()), float(speedups.max())],
        "plain_tokens_per_second_with_prefill": float(np.median(rates["plain", True])),
        "speculative_tokens_per_second_with_prefill": float(np.median(rates["speculative", True])),
        "speedup_with_prefill": float(np.median(with_prefill)),
        "block_efficiency": metrics.block_efficiency(counts),
        "acceptance_rate": metrics.acceptance_rate(counts),
        "identical": sum(same),
        "rows": len(same),
        "latency": {mode: latency.summarise(done) for mode, done in rows.items()},
    }


def summarise(
    turns: dict[int, list[Turn]], chosen: Sequence[tuple[Workload, Ids]], tokens: int
) -> dict[str, Any]:
    """Return the section of summary.json.

    Args:
        turns: by batch.
        chosen: the prompts.
        tokens: budget of a row.
    """
    by_batch = {batch: figures(done) for batch, done in sorted(turns.items())}
    return {
        "tokens_a_row": tokens,
        "repeats": len(next(iter(turns.values()))),
        "prompts": [w.question_id for w, _ in chosen],
        "prompt_tokens": [len(ids) for _, ids in chosen],
        "categories": list(dict.fromkeys(w.category for w, _ in chosen)),
        "batches": {str(batch): found for batch, found in by_batch.items()},
        "crossings": crossings({batch: found["speedup"] for batch, found in by_batch.items()}),
    }


def crossings(speedups: dict[int, float]) -> list[dict[str, Any]]:
    """Return where the speedup passes 1 between two batches, straight over log(batch).

    Args:
        speedups: by batch, in rising order.

    Returns:
        for each crossing the batches `after` and `before` which it lies, and `batch` in between.
    """
    found = []
    points = list(speedups.items())
    for (low, first), (high, second) in itertools.pairwise(points):
        if (first >= 1) != (second >= 1):
            share = (first - 1) / (first - second)
            between = low * (high / low) ** share
            found.append({"after": low, "before": high, "batch": between})
    return found


def verdict(section: dict[str, Any]) -> str:
    """Return in a sentence how the speedup goes with the batch, and where it crosses 1."""
    batches = section["batches"]
    ends = list(dict.fromkeys([next(iter(batches)), list(batches)[-1]]))
    speedups = " and ".join(f"{batches[end]['speedup']:.2f}x at batch {end}" for end in ends)
    prompts = len(section["prompts"])
    text = f"On {prompts} short prompts in batches, speculation over plain decoding is {speedups}"
    if not section["crossings"]:
        side = "at least" if batches[ends[0]]["speedup"] >= 1 else "below"
        return f"{text}; it is {side} 1 at every batch measured, so it crosses 1 nowhere."
    where = " and ".join(
        f"between batches {crossing['after']} and {crossing['before']} "
        f"(near {crossing['batch']:.1f})"
        for crossing in section["crossings"]
    )
    return f"{text}; it crosses 1 {where}."
