"""Decoding the rows of a batch job: which go together, turn after turn, and errors row by row."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from experiments import batch_results
from experiments.batch_results import Totals
from experiments.interrupts import Interrupts
from experiments.journal import Results
from experiments.rows import Row
from experiments.status import Status
from jspec import metrics
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.metrics import Counts
from jspec.requests import Completion, Request

# Errors that are shown as they come; a job may have a million.
_SHOWN = 5

# A row and what is to be decoded of it next.
Pair = tuple[Row, Request]


class Session:
    """What one process decodes of a job.

    Args:
        decoder: decodes.
        raw: texts are continued as they stand.
        results: where finished rows go.
        totals: sums over them.
        status: shows progress.
        interrupts: end the session between two groups of rows.

    Attributes:
        counts: sum over everything decoded, None before there is any.
    """

    def __init__(
        self,
        decoder: Decoder,
        raw: bool,
        results: Results,
        totals: Totals,
        status: Status,
        interrupts: Interrupts,
    ) -> None:
        self._decoder = decoder
        self._raw = raw
        self._results = results
        self._totals = totals
        self._status = status
        self._interrupts = interrupts
        self._earlier = results.finished
        self._begun: float | None = None
        self._tokens = 0
        self._shown = 0
        self._warned = False
        self.counts: Counts | None = None

    def decode(self, rows: Sequence[Row]) -> None:
        """Decode what is missing of a window of rows.

        Raises:
            InputError: not one row is at fault but the job: the model has no chat template, the
                device's memory or the disk is full.
        """
        ready: list[Pair] = []
        for row in rows:
            request = self._prepare(row) if row.error is None else None
            if request is None:
                self._record(row)
            else:
                ready.append((row, request))
        for group in groups(ready, self._decoder.batch_size):
            if all(self._results.has(row.index) for row, _ in group):
                continue
            with self._interrupts.held():
                self._decode_group(group)

    def summary(self) -> dict[str, Any]:
        """Return what this process has done, from its first token on."""
        seconds = None if self._begun is None else time.perf_counter() - self._begun
        return {
            "rows": self._results.finished - self._earlier,
            "tokens": self._tokens,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds if seconds else None,
        }

    def _prepare(self, row: Row) -> Request | None:
        """Return the row's next request; None where it cannot be decoded, which ends the row."""
        try:
            request = row.request(self._decoder.target, self._raw)
            self._decoder.check(request)
        except InputError as error:
            if error.field == "model":  # then it is wrong for every row
                raise
            row.fail(error)
        # What the expressions of a chat template may raise, beside its own complaints.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
            problem = f"cannot be made a prompt ({type(error).__name__}: {error})"
            row.fail(InputError(row.kind, row.content, problem, "change the row"))
        else:
            return request
        return None

    def _decode_group(self, group: list[Pair]) -> None:
        """Decode rows together, those with turns turn by turn."""
        while group:
            following: list[Pair] = []
            for index, completions in self._completed([request for _, request in group]):
                row, request = group[index]
                row.answers.append(batch_results.answer(completions, len(request.token_ids)))
                errors = [c.error for c in completions if c.error is not None]
                if errors:
                    # Its number in this group says nothing to the reader of the results.
                    row.error = re.sub(r" of request \d+", "", errors[0])
                after = None if row.finished else self._prepare(row)
                if after is None:
                    self._record(row)
                else:
                    following.append((row, after))
            group = sorted(following, key=lambda pair: pair[0].index)

    def _completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Completion]]]:
        """Decode, and yield each request with all its samples when the last one has finished."""
        samples: dict[int, list[Completion]] = collections.defaultdict(list)
        try:
            for delta in self._decoder.stream(requests):
                self._note(len(delta.token_ids))
                if delta.completion is None:
                    continue
                done = samples[delta.index]
                done.append(delta.completion)
                counts = delta.completion.counts
                self.counts = (
                    counts if self.counts is None else metrics.total([self.counts, counts])
                )
                if len(done) == requests[delta.index].sampling.n:
                    yield delta.index, sorted(done, key=lambda completion: completion.sample)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise InputError(
                "batch_size",
                self._decoder.batch_size,
                "is too large for the device's memory with rows of this length",
                "give a smaller one; what is finished is kept",
            ) from error

    def _note(self, tokens: int) -> None:
        """Show how far it is."""
        now = time.perf_counter()
        if self._begun is None:
            self._begun = now
            self._status.clear()
        self._tokens += tokens
        if self._interrupts.pending is not None and not self._warned:
            self._warned = True
            self._status.say("Ending after the rows at hand; the same signal again ends at once")
        self._status.progress(
            self._results.finished,
            self._results.rows,
            self._tokens,
            now - self._begun,
            self._earlier,
        )

    def _record(self, row: Row) -> None:
        """Write a finished row, unless it was decoded beside a missing one."""
        if self._results.has(row.index):
            return
        line = batch_results.line(row)
        self._results.write(row.index, line)
        self._totals.add(line)
        if row.error is not None:
            self._shown += 1
            if self._shown <= _SHOWN:
                self._status.say(f"error: row {row.id}: {row.error}")
            elif self._shown == _SHOWN + 1:
                self._status.say("More rows failed; see the results")


def groups(pairs: Sequence[Pair], size: int) -> Iterator[list[Pair]]:
    """Yield rows that are decoded together: of one number of turns and of similar lengths.

    Args:
        pairs: of a window, those that are finished too, so that groups are the same every time.
        size: samples a group; a row with more is a group of its own.
    """

    def order(pair: Pair) -> tuple[int, int, int, int]:
        row, request = pair
        return row.turns, request.sampling.max_new_tokens, len(request.token_ids), row.index

    group: list[Pair] = []
    samples = 0
    for pair in sorted(pairs, key=order):
        count = pair[1].sampling.n
        if group and samples + count > size:
            yield group
            group, samples = [], 0
        group.append(pair)
        samples += count
    if group:
        yield group
