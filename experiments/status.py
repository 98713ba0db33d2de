"""Progress on standard error: one line that renews itself on a terminal, rare lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import IO

from experiments import tables

_EVERY = {True: 0.2, False: 10.0}  # seconds between two updates, on a terminal and elsewhere
_LEAST = 1.0  # seconds before a rate means anything
_CLEAR = "\r\x1b[K"


class Status:
    """Says what is going on.

    Args:
        stream: where to; None is standard error as it is now.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = False
        self._next = 0.0

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self.clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def busy(self, text: str, *, terminal_only: bool = False) -> None:
        """Say what takes a while; on a terminal the line goes with the next one."""
        if not self._terminal:
            if not terminal_only:
                self.say(text)
            return
        self._stream.write(f"{_CLEAR}{text}")
        self._stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Take a passing line away."""
        if self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._shown = False

    def progress(
        self, done: int, total: int, tokens: int, elapsed: float, earlier: int | None = None
    ) -> None:
        """Say how far a batch of requests is, not too often.

        Args:
            done: requests finished.
            total: requests in all.
            tokens: tokens so far.
            elapsed: seconds so far.
            earlier: those of `done` that an earlier process finished, at no cost of this one's
                time; a job that counts them is also told its requests a second.
        """
        if elapsed < _LEAST:
            return
        ours = done - (earlier or 0)
        left = tables.seconds(elapsed / ours * (total - done)) if ours else "unknown time"
        rates = f"{tables.rate(tokens / elapsed)} tokens/s"
        if earlier is not None:
            rates += f", {tables.rate(ours / elapsed)} rows/s"
        self.passing(f"{done}/{total} done, {rates}, {left} left")

    def passing(self, text: str) -> None:
        """Say how far it is, unless that was said just now."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY[self._terminal]
        self.busy(text)
