"""What the host reads of a batch after every chunk: tokens, text, stop texts, results."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jspec import trace
from jspec.config import SpeculationConfig
from jspec.logprobs import LogProbs
from jspec.metrics import Timing
from jspec.requests import Completion, Delta, Request, TokenLogProbs
from jspec.state import DecodeState, Finish
from jspec.stop_texts import StopTexts
from jspec.tokenizers import Tokenizer
from jspec.trace import Trace


@dataclasses.dataclass(frozen=True)
class Sample:
    """One row of a batch.

    Attributes:
        index: of the request.
        number: of the sample, below the request's n.
        request: what it is a sample of.
    """

    index: int
    number: int
    request: Request


@dataclasses.dataclass(frozen=True)
class View:
    """What of a state the host looks at, fetched at once.

    Attributes:
        tokens: [B, S].
        length: [B].
        finish: [B].
        trace: of the rounds.
        logprobs: None where not asked for.
        rounds: that the chunk ran.
    """

    tokens: np.ndarray
    length: np.ndarray
    finish: np.ndarray
    trace: Trace
    logprobs: LogProbs | None
    rounds: int

    @classmethod
    def fetch(cls, state: DecodeState, rounds: jax.Array) -> View:
        """Wait for the chunk and copy."""
        fields: tuple[Any, ...] = (
            state.tokens,
            state.length,
            state.finish,
            state.trace,
            state.logprobs,
            rounds,
        )
        tokens, length, finish, rounds_of, known, count = jax.device_get(fields)
        return cls(tokens, length, finish, rounds_of, known, int(count))


class Clock:
    """Wall times of a batch's rows, split evenly over the rounds of a chunk."""

    def __init__(self, rows: int, started: float) -> None:
        self._started = started
        self._last = time.perf_counter() - started
        self.prefill = self._last
        self._rounds: np.ndarray = np.zeros(rows, np.int64)
        self.first = np.full(rows, np.nan)
        self.end = np.full(rows, np.nan)

    def chunk(self, view: View) -> None:
        """Note the end of a chunk."""
        now = time.perf_counter() - self._started
        words = np.asarray(view.trace.rounds)[: len(self._rounds)]
        total = np.count_nonzero(words >= 0, axis=1)
        taken = total - self._rounds
        share = (now - self._last) / max(view.rounds, 1)
        self.first[np.isnan(self.first)] = self._last + share
        self.end = np.where(taken > 0, self._last + share * taken, self.end)
        self._rounds = total
        self._last = now


class Reader:
    """What the host has read of one row so far.

    Args:
        sample: the row's.
        row: its place in the batch.
        tokenizer: None gives no text.
        speculation: of the decoder.
    """

    def __init__(
        self,
        sample: Sample,
        row: int,
        tokenizer: Tokenizer | None,
        speculation: SpeculationConfig,
    ) -> None:
        self._sample = sample
        self._row = row
        self._speculation = speculation
        self._params = sample.request.sampling
        self._text = tokenizer.stream() if tokenizer is not None else None
        self._stops = StopTexts(self._params.stop)
        self._prompt = len(sample.request.token_ids)
        self._read = self._prompt
        self._pieces: list[str] = []
        self.done = False

    def read(self, view: View, clock: Clock) -> Delta | None:
        """Return what the chunk brought, None if nothing."""
        length, finish = int(view.length[self._row]), Finish(int(view.finish[self._row]))
        new = [int(token) for token in view.tokens[self._row, self._read : length]]
        pieces, kept = self._push(new)
        end = self._read + kept
        if self._stops.found is not None:
            finish = Finish.STOP
        self.done = finish is not Finish.NONE
        self._read = end
        if not kept and not self.done:
            return None
        if self.done and self._stops.found is None and self._text is not None:
            pieces.append(self._stops.push(self._text.finish(), may_stop=False))
            pieces.append(self._stops.finish())
        text = "".join(pieces)
        self._pieces.append(text)
        return Delta(
            index=self._sample.index,
            sample=self._sample.number,
            token_ids=tuple(new[:kept]),
            text=text,
            completion=self._complete(view, clock, end, finish) if self.done else None,
        )

    def _push(self, new: list[int]) -> tuple[list[str], int]:
        """Return the text of new tokens, and how many of them come up to a stop text's end."""
        if self._text is None:
            return [], len(new)
        if not self._params.stop:
            return [self._text.push(new)], len(new)
        pieces = []
        for count, token in enumerate(new, start=1):
            generated = self._read - self._prompt + count
            may_stop = generated > self._params.min_new_tokens
            text = self._text.push([token])
            pieces.append(self._stops.push(text, ahead=self._text.peek(), may_stop=may_stop))
            if self._stops.found is not None:
                return pieces, count
        return pieces, len(new)

    def _complete(self, view: View, clock: Clock, end: int, finish: Finish) -> Completion:
        row, sample = self._row, self._sample
        tokens = [int(token) for token in view.tokens[row, :end]]
        stop_reason = None
        if finish is Finish.STOP:
            stop_reason = self._stops.found or tokens[-1]
        wants, of_prompt = self._params.logprobs, self._params.prompt_logprobs
        error = None
        if finish is Finish.ERROR:
            step = end - self._prompt
            error = f"the target's logits of request {sample.index} are not finite at step {step}"
        return Completion(
            token_ids=tuple(tokens[self._prompt :]),
            text="".join(self._pieces),
            finish_reason=finish.name.lower(),
            stop_reason=stop_reason,
            error=error,
            counts=trace.counts(
                view.trace,
                row,
                self._prompt,
                end,
                int(view.length[row]),
                self._speculation.gamma,
            ),
            timing=Timing(clock.prefill, float(clock.first[row]), float(clock.end[row])),
            sample=sample.number,
            lossless=self._speculation.lossless,
            logprobs=(
                None
                if wants is None
                else tuple(_logprobs(view, row, range(self._prompt, end), wants, False))
            ),
            prompt_logprobs=(
                None
                if of_prompt is None
                else (None, *_logprobs(view, row, range(1, self._prompt), of_prompt, True))
            ),
        )


def _logprobs(
    view: View, row: int, slots: range, top: int, prompt: bool
) -> Iterator[TokenLogProbs]:
    known = view.logprobs
    assert known is not None  # the batch has a row that asks for them
    for slot in slots:
        yield TokenLogProbs(
            token_id=int(view.tokens[row, slot]),
            raw=float(known.raw[row, slot]),
            processed=None if prompt else float(known.processed[row, slot]),
            top_raw=_pairs(known.top_raw_ids, known.top_raw, row, slot, top),
            top_processed=(
                ()
                if prompt
                else _pairs(known.top_processed_ids, known.top_processed, row, slot, top)
            ),
        )


def _pairs(
    ids: jax.Array, values: jax.Array, row: int, slot: int, top: int
) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids[row, slot, :top], values[row, slot, :top], strict=True)
    return tuple((int(token), float(value)) for token, value in pairs)
