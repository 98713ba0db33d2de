"""Time left, and programs compiled side by side within it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

MOST_THREADS = 12
# XLA compiles outside of Python's lock, tracing and lowering do not: one at a time, in order, they
# keep the compilers busy from the start.
_tracing = threading.Lock()
# Products go to cuBLAS, whose few algorithms XLA tries out at once. To try its own Triton products
# as well would take minutes for many programs.
_QUICK_ON_GPU = {"xla_gpu_enable_triton_gemm": False}


def quick_flags() -> dict[str, Any]:
    """Return XLA's flags by which many programs compile in little time here."""
    return dict(_QUICK_ON_GPU) if jax.default_backend() == "gpu" else {}


@dataclasses.dataclass(frozen=True)
class Deadline:
    """A moment of `time.monotonic`."""

    moment: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the moment so many seconds from now."""
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.moment - time.monotonic())

    def earlier(self, seconds: float) -> Deadline:
        """Return the moment so many seconds from now, or this one where it comes first."""
        return Deadline(min(self.moment, time.monotonic() + seconds))


class NotReached(Exception):
    """There was no time left for it."""

    def __str__(self) -> str:
        return "not reached in the time given"


class Compiler:
    """Compiles programs in threads. What runs when the time is up is left to end by itself."""

    def __init__(self) -> None:
        count = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._started: list[concurrent.futures.Future[Any]] = []

    def submit(
        self,
        function: Callable[..., Any],
        *operands: Any,
        flags: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> concurrent.futures.Future[Any]:
        """Start to compile a function for abstract or real operands.

        Args:
            function: of the operands.
            *operands: its arguments.
            flags: of XLA; left out where it knows them no longer.
            **options: of `jax.jit`.
        """
        return self.call(lambda: _compile(function, operands, flags, options))

    def call(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Call a function beside the compilations, such as one that makes inputs."""
        future = self._pool.submit(function)
        self._started.append(future)
        return future

    def settle(self) -> None:
        """Drop what has not begun and wait for the rest: compilers would disturb a measurement."""
        for future in self._started:
            future.cancel()
        concurrent.futures.wait(self._started)
        self._started.clear()

    def close(self) -> None:
        """Start nothing more, and wait for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    flags: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> Any:
    with _tracing:
        lowered = jax.jit(function, **options).lower(*operands)
    if flags:
        try:
            return lowered.compile(compiler_options=dict(flags))
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
    return lowered.compile()


def result(future: concurrent.futures.Future[Any], deadline: Deadline) -> Any:
    """Return a compiled program.

    Raises:
        NotReached: it was not ready in time.
        Exception: what compiling it raised.
    """
    try:
        return future.result(timeout=deadline.left())
    except concurrent.futures.TimeoutError:
        raise NotReached from None
    except concurrent.futures.CancelledError:
        raise NotReached from None


def said(error: BaseException) -> str:
    """Return an error in one line, for a row of a table."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return text if isinstance(error, NotReached) else f"{name}: {text}"[:300]
