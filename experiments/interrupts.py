"""SIGINT and SIGTERM for a job that goes on later: the first one ends it after what is at hand."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from experiments.status import Status

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def until_interrupted(job: Callable[[Interrupts], int]) -> int:
    """Run a job that can go on later; returns its exit status, or that of the ending signal."""
    interrupts = Interrupts()
    with interrupts.handled():
        try:
            return job(interrupts)
        except Interrupted as interrupted:
            Status().say("interrupted; run the same command again to go on")
            return interrupted.status


class Interrupted(KeyboardInterrupt):
    """A signal asks the job to end.

    Attributes:
        status: the exit status by which shells know the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Interrupts:
    """Raises `Interrupted` at once, or where the work can be cut.

    Attributes:
        pending: number of the signal that waits for the work at hand, None without one.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self._holding = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Take both signals while inside; outside the main thread Python does not allow it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A shell's background job ignores SIGINT, and goes on doing so.
        before = {number: signal.getsignal(number) for number in _NUMBERS}
        taken = [number for number in _NUMBERS if before[number] != signal.SIG_IGN]
        try:
            for number in taken:
                signal.signal(number, self._handle)
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number] or signal.SIG_DFL)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let what is inside end before the first signal is heeded; a second one is at once."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self.pending is not None:
            raise Interrupted(self.pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holding and self.pending is None:
            self.pending = number
        else:
            raise Interrupted(number)
