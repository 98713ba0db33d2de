"""Completions as lines of metrics.jsonl, and sums over them for summary.json and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec import metrics
from jspec.requests import Completion

# Stands below every table with these columns.
TERMS = (
    "Block efficiency: tokens a round commits on average, its correction or bonus token included;\n"
    "plain decoding has 1. Acceptance: share of the proposed drafts that the target kept."
)

# Stands with whatever is said of such results.
LOSSY = (
    "LOSSY: --verification=typical accepts drafts that the target merely finds typical, so these\n"
    "outputs do not have the target's law."
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A finished request.

    Attributes:
        index: of the request.
        prompt_tokens: length of the prompt.
        first_tokens: tokens that came with the first round.
        completion: the result.
    """

    index: int
    prompt_tokens: int
    first_tokens: int
    completion: Completion

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        return metrics.tpot(self.completion.timing, len(self.completion.token_ids))

    def line(self, **more: Any) -> dict[str, Any]:
        """Return the request's line of metrics.jsonl; times are in seconds."""
        done = self.completion
        return {
            "index": self.index,
            "sample": done.sample,
            **more,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": len(done.token_ids),
            "first_round_tokens": self.first_tokens,
            "finish_reason": done.finish_reason,
            "error": done.error,
            "lossless": done.lossless,
            "timing": dataclasses.asdict(done.timing),
            "tpot": self.tpot,
            "overlap": done.counts.overlap.tolist(),
            **metrics.summary(done.counts),
        }


def tokens_per_second(measured: Sequence[Measured], batch_size: int) -> float | None:
    """Return tokens a second after the first round of each batch, which prefills and compiles.

    Args:
        measured: in order of index.
        batch_size: requests that were decoded together.
    """
    tokens, seconds = 0, 0.0
    for start in range(0, len(measured), batch_size):
        batch = measured[start : start + batch_size]
        late = [m for m in batch if len(m.completion.token_ids) > m.first_tokens]
        if not late:
            continue
        tokens += sum(len(m.completion.token_ids) - m.first_tokens for m in late)
        ends = [m.completion.timing.end for m in late]
        seconds += max(ends) - min(m.completion.timing.first for m in late)
    return tokens / seconds if seconds > 0 else None


def quantile(values: Sequence[float | None], q: float) -> float | None:
    """Return the q-quantile of the finite values, None without any."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.quantile(known, q)) if known else None


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return sums and medians over requests; times are in seconds."""
    tpots = [m.tpot for m in measured]
    reasons = [m.completion.finish_reason for m in measured]
    return {
        "label": "measured",
        "requests": len(measured),
        "lossless": all(m.completion.lossless for m in measured),
        "prompt_tokens": sum(m.prompt_tokens for m in measured),
        "generated_tokens": sum(len(m.completion.token_ids) for m in measured),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "tpot_p50": quantile(tpots, 0.5),
        "tpot_p90": quantile(tpots, 0.9),
        **metrics.summary(metrics.total([m.completion.counts for m in measured])),
    }
