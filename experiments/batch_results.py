"""Results of a batch job: the line of a row, and sums over lines for summary.json."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.rows import Row
from jspec import metrics
from jspec.requests import Completion

# Of `metrics.summary`; lists by position are summed up, so that a line stays short.
_COUNTS = (
    "rounds",
    "rounds_without_draft",
    "proposed",
    "accepted",
    "examined",
    "emitted",
    "discarded",
)
_RATES = ("block_efficiency", "acceptance_rate", "mean_overlap")
_NO_ANSWER: dict[str, Any] = {
    "text": "",
    "token_ids": [],
    "finish_reason": "error",
    "stop_reason": None,
    "counters": None,
    "timing": None,
}


def answer(completions: Sequence[Completion], prompt_tokens: int) -> dict[str, Any]:
    """Return what a result says of an answered prompt; times are in seconds.

    Args:
        completions: all samples; several are under "samples".
        prompt_tokens: length of the prompt.
    """
    if len(completions) == 1:
        return _sample(completions[0]) | {"prompt_tokens": prompt_tokens}
    failed = [c.finish_reason for c in completions if c.error is not None]
    return {
        "samples": [_sample(completion) for completion in completions],
        "finish_reason": failed[0] if failed else completions[0].finish_reason,
        "prompt_tokens": prompt_tokens,
    }


def _sample(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "counters": _counters(completion),
        "timing": dataclasses.asdict(completion.timing),
        **completion.known_logprobs(),
    }


def _counters(completion: Completion) -> dict[str, Any]:
    figures = metrics.summary(completion.counts)
    sums = {name: figures[name] for name in _COUNTS}
    sums = {name: sum(item) if isinstance(item, list) else item for name, item in sums.items()}
    return sums | {name: figures[name] for name in _RATES}


def line(row: Row) -> dict[str, Any]:
    """Return the result of a finished row: its answer, or "turns" with an answer each."""
    result: dict[str, Any] = {
        "id": row.id,
        **row.copied,
        "error": row.error,
        "seed": row.sampling.seed if row.sampling is not None else None,
    }
    if row.kind != "turns":
        given = row.answers[0] if row.answers else _NO_ANSWER | {"prompt_tokens": None}
        return result | given
    reason = "error" if row.error is not None else row.answers[-1]["finish_reason"]
    return result | {"finish_reason": reason, "turns": row.answers}


class Totals:
    """Sums over lines, which are not kept.

    Attributes:
        rows: lines.
        failed: those with an error.
        generated_tokens: of all answers.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.failed = 0
        self.generated_tokens = 0
        self._prompt_tokens = 0
        self._reasons: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()
        self._overlap = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        self.rows += 1
        self.failed += line["error"] is not None
        self._reasons[line["finish_reason"]] += 1
        for given in line.get("turns", [line]):
            self._prompt_tokens += given["prompt_tokens"] or 0
            for sample in given.get("samples", [given]):
                self._add_sample(sample)

    def _add_sample(self, sample: Mapping[str, Any]) -> None:
        self.generated_tokens += len(sample["token_ids"])
        counters = sample["counters"]
        if counters is not None:
            self._counts.update({name: counters[name] for name in _COUNTS})
            self._overlap += (counters["mean_overlap"] or 0.0) * counters["examined"]

    def summary(self) -> dict[str, Any]:
        """Return the sums, and the rates that follow from them."""
        counts = self._counts

        def rate(part: float, whole: str) -> float | None:
            return part / counts[whole] if counts[whole] else None

        return {
            "label": "measured",
            "rows": self.rows,
            "failed": self.failed,
            "finish_reasons": dict(sorted(self._reasons.items())),
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self.generated_tokens,
            **{name: counts[name] for name in _COUNTS},
            "block_efficiency": rate(counts["emitted"], "rounds"),
            "acceptance_rate": rate(counts["accepted"], "proposed"),
            "mean_overlap": rate(self._overlap, "examined"),
        }
