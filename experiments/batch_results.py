"""Results of a batch job: the line of a row, and sums over lines for summary.json."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.rows import Row
from jspec import metrics
from jspec.errors import is_finite
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
_TOO_LARGE = 1 << 63  # and no count of anything
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
        "lossless": completion.lossless,
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


def is_whole(line: Mapping[str, Any]) -> bool:
    """Tell whether what is read as a line has what `line` gives one, so that `Totals` can add it.

    What a file holds after damage may be JSON, and still not be a result.
    """
    error, seed, turns = line.get("error", 0), line.get("seed", ""), line.get("turns", [line])
    return (
        isinstance(line.get("id"), str | int)
        and (error is None or isinstance(error, str))
        and (seed is None or isinstance(seed, int))
        and isinstance(line.get("finish_reason"), str)
        and isinstance(turns, list)
        and (len(turns) > 0 or error is not None)
        and all(map(_is_answer, turns))
    )


def _is_answer(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    tokens, samples = given.get("prompt_tokens", ""), given.get("samples", [given])
    return (
        (tokens is None or _is_size(tokens))
        and isinstance(given.get("finish_reason"), str)
        and isinstance(samples, list)
        and len(samples) > 0
        and all(map(_is_sample, samples))
    )


def _is_sample(given: Any) -> bool:
    if not isinstance(given, Mapping) or not _NO_ANSWER.keys() <= given.keys():
        return False
    counters, timing = given["counters"], given["timing"]
    return (
        isinstance(given["text"], str)
        and isinstance(given["token_ids"], list)
        and isinstance(given["finish_reason"], str)
        and (timing is None or isinstance(timing, Mapping))
        and (counters is None or _is_counters(counters))
    )


def _is_counters(given: Any) -> bool:
    return (
        isinstance(given, Mapping)
        and all(_is_size(given.get(name)) for name in _COUNTS)
        and all(given.get(name, "") is None or is_finite(given.get(name)) for name in _RATES)
    )


def _is_size(given: Any) -> bool:
    return type(given) is int and 0 <= given < _TOO_LARGE


class Totals:
    """Sums over lines, which are not kept.

    Attributes:
        rows: lines.
        failed: those with an error.
        generated_tokens: of all answers.
        lossless: no answer was verified by a lossy rule.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.failed = 0
        self.generated_tokens = 0
        self._prompt_tokens = 0
        self._reasons: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()
        self._overlap = 0.0
        self.lossless = True

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
        self.lossless &= bool(sample.get("lossless", True))
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
            "lossless": self.lossless,
            "finish_reasons": dict(sorted(self._reasons.items())),
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self.generated_tokens,
            **{name: counts[name] for name in _COUNTS},
            "block_efficiency": rate(counts["emitted"], "rounds"),
            "acceptance_rate": rate(counts["accepted"], "proposed"),
            "mean_overlap": rate(self._overlap, "examined"),
        }
