"""Decoding prompts with a drafter, and forcing the target's own text on it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import jspec
from experiments import differences, teacher_forcing
from experiments.differences import Difference
from experiments.status import Status
from experiments.teacher_forcing import Forced
from experiments.workloads import Workload
from jspec import metrics
from jspec.requests import Completion, Request


@dataclasses.dataclass(frozen=True)
class Measured:
    """One prompt by one drafter at one temperature.

    Attributes:
        workload: the prompt.
        temperature: of target and drafter.
        drafter: as it was asked for.
        done: the prompt decoded with the drafter.
        forced: the drafter along plain decoding's text.
        difference: where the greedy outputs part; None where they don't, and of sampled text, which
            has the law of plain decoding's but other tokens.
    """

    workload: Workload
    temperature: float
    drafter: str
    done: Completion
    forced: Forced
    difference: Difference | None

    def line(self) -> dict[str, Any]:
        """Return its line of metrics.jsonl."""
        return {
            "question_id": self.workload.question_id,
            "category": self.workload.category,
            "temperature": self.temperature,
            "drafter": self.drafter,
            "tokens": len(self.done.token_ids),
            "error": self.done.error,
            "identical": self.difference is None if self.temperature == 0 else None,
            "difference": self.difference and dataclasses.asdict(self.difference),
            "forced_positions": len(self.forced.overlap),
            "forced_drafted": int(self.forced.drafted.sum()),
            "forced_overlap": float(self.forced.overlap.sum(dtype=np.float64)),
            "overlap": self.done.counts.overlap.tolist(),
            **metrics.summary(self.done.counts),
        }


class Progress:
    """Says how many prompts are done, of all that will be decoded or forced.

    Args:
        status: where to.
        total: prompts, each as often as it will be run.
    """

    def __init__(self, status: Status, total: int) -> None:
        self._status, self._total = status, total
        self._done = self._tokens = 0
        self._started = time.monotonic()

    def add(self, prompts: int, tokens: int) -> None:
        """Count prompts that were run."""
        self._done += prompts
        self._tokens += tokens
        elapsed = time.monotonic() - self._started
        self._status.progress(self._done, self._total, self._tokens, elapsed)


def decode(
    decoder: jspec.Decoder, requests: Sequence[Request], progress: Progress
) -> list[Completion]:
    """Decode requests, a batch at a time."""
    found: list[Completion] = []
    for start in range(0, len(requests), decoder.batch_size):
        batch = decoder.generate(requests[start : start + decoder.batch_size])
        found += batch
        progress.add(len(batch), sum(len(done.token_ids) for done in batch))
    return found


def measure(
    plain: jspec.Decoder,
    drafter: jspec.BoundDrafter,
    speculation: jspec.SpeculationConfig,
    prompts: Sequence[tuple[Workload, Request]],
    texts: Sequence[Completion],
    progress: Progress,
) -> list[Measured]:
    """Measure one drafter at the requests' one temperature.

    Args:
        plain: the target without a drafter.
        drafter: proposes tokens.
        speculation: of the decoding.
        prompts: all of them at one temperature.
        texts: what plain decoding made of each.
        progress: told of every batch.
    """
    target, size = plain.target, plain.batch_size
    requests = [request for _, request in prompts]
    decoder = jspec.Decoder(target, drafter, speculation, batch_size=size)
    done = decode(decoder, requests, progress)
    forced: list[Forced] = []
    for start in range(0, len(requests), size):
        given = [text.token_ids for text in texts[start : start + size]]
        batch = requests[start : start + size]
        forced += teacher_forcing.along(target, drafter, batch, given, size)
        progress.add(len(batch), sum(map(len, given)))
    results = []
    for (workload, request), one, seen, text in zip(prompts, done, forced, texts, strict=True):
        temperature, parting = request.sampling.temperature, None
        if temperature == 0:
            parting = differences.between(plain, request, one.token_ids, text.token_ids)
        results.append(Measured(workload, temperature, drafter.name, one, seen, parting))
    return results
