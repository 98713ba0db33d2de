"""Which implementation of an op runs: asked for by name, or picked by platform and on record.

Nothing falls back in silence. An implementation asked for by name runs or raises the reason why it
can't; "auto" takes the platform's kernel where that can run and XLA where it can't, and notes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import jax
from jax.experimental.pallas import tpu as pltpu

Implementation = Literal["auto", "xla", "tpu", "gpu", "triton", "tpu_interpret", "gpu_interpret"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
OPS = ("tree_attention", "cache_write", "cache_commit", "rejection_sampling")
# Lowering platform -> the kernel that "auto" takes there. Elsewhere it takes XLA.
KERNEL_OF = {"tpu": "tpu", "cuda": "gpu"}
# Width of a TPU register, along which a head's dimension lies.
LANES = 128
# On a CPU, copies land when waited for, unwritten memory is NaN, reads out of bounds raise, and
# races are looked for (found ones are printed).
STRICTEST = pltpu.InterpretParams(
    detect_races=True,
    dma_execution_mode="on_wait",
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)


class UnsupportedError(NotImplementedError):
    """An implementation that was asked for can't run a call."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What a whole program asks for. Hashable: part of what a program is compiled for.

    A bare implementation is the same of every op, so "triton", which only attention has, is asked
    for as an override.

    Attributes:
        implementation: of every op that `overrides` leaves out.
        overrides: (op, implementation) pairs.
        platform: lowering platform of the program ("cpu", "tpu", "cuda"), which "auto" goes by;
            None is this process's default backend.
        devices: over how many the program's arrays are spread. A kernel takes whole arrays, so
            "auto" takes XLA, which splits them, where there are several.
    """

    implementation: Implementation = "auto"
    overrides: tuple[tuple[str, Implementation], ...] = ()
    platform: str | None = None
    devices: int = 1

    @classmethod
    def parse(cls, text: str) -> Kernels:
        """Read "auto", "xla" or another implementation, then "op:implementation" for some ops.

        Raises:
            ValueError: there is no such op or implementation; the message says which there are.
        """
        implementation: str = "auto"
        overrides: list[tuple[str, Any]] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            op, colon, name = item.rpartition(":")
            if name not in IMPLEMENTATIONS:
                raise ValueError(f"{name!r} is no implementation; there are {IMPLEMENTATIONS}")
            if colon and op not in OPS:
                raise ValueError(f"{op!r} is no op; there are {OPS}")
            if colon and op in dict(overrides):
                raise ValueError(f"{op} is asked for twice")
            if colon:
                overrides.append((op, name))
            else:
                implementation = name
        return cls(cast("Implementation", implementation), tuple(overrides))

    def of(self, op: str) -> Implementation:
        """Return what is asked for of one op."""
        return dict(self.overrides).get(op, self.implementation)

    @property
    def lowered_for(self) -> str:
        """The lowering platform."""
        platform = jax.default_backend() if self.platform is None else self.platform
        return "cuda" if platform == "gpu" else platform

    def misfit(self, op: str) -> str | None:
        """Return why what is asked for of one op can't run where the program does, or None."""
        asked = self.of(op)
        wanted = {"tpu": "tpu", "gpu": "cuda", "triton": "cuda"}.get(asked)
        if wanted is not None and wanted != self.lowered_for:
            return f"it is a kernel for {wanted}, and the program runs on {self.lowered_for}"
        if asked not in ("auto", "xla") and self.devices > 1:
            return f"the program's arrays are spread over {self.devices} devices"
        return None

    def heads_a_lane_row(self, head_dim: int) -> int:
        """Return how many KV heads share a row of the cache, so that it fills a TPU's lanes."""
        asked = self.of("tree_attention")
        on_tpu = asked in ("tpu", "tpu_interpret") or (
            asked == "auto" and self.lowered_for == "tpu" and self.devices == 1
        )
        return LANES // head_dim if on_tpu and LANES % head_dim == 0 else 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """One decision of this process.

    Attributes:
        op: name of the op.
        requested: what was asked for.
        platform: lowering platform it holds for, or "any".
        ran: implementation that runs there.
        reason: why not the platform's kernel; None where that runs or something else was asked for.
    """

    op: str
    requested: str
    platform: str
    ran: str
    reason: str | None = None

    def __str__(self) -> str:
        """One line for a log or a results folder."""
        where = "" if self.platform == "any" else f" on {self.platform}"
        why = "" if self.reason is None else f" ({self.reason})"
        return f"{self.op}: {self.requested}{where} runs {self.ran}{why}"


_choices: dict[Choice, None] = {}


def choices(platform: str | None = None) -> tuple[Choice, ...]:
    """Return the decisions traced in this process so far, first come first.

    Args:
        platform: of the run ("cpu", "tpu", "cuda" or "gpu"); None returns those of every platform.
    """
    if platform is None:
        return tuple(_choices)
    platform = "cuda" if platform == "gpu" else platform
    named = ("any", platform) if platform in KERNEL_OF else ("any", platform, "others")
    return tuple(choice for choice in _choices if choice.platform in named)


def forget() -> None:
    """Clear the record, for tests and for one process with several runs."""
    _choices.clear()


def decide(
    op: str, requested: str | Kernels, reasons: Mapping[str, str | None]
) -> tuple[Choice, ...]:
    """Decide which implementation runs on which platform, without noting it.

    Args:
        op: name of the op.
        requested: one of `IMPLEMENTATIONS`, or what the program asks for.
        reasons: implementation -> why it can't run this call, None where it can. "xla" always can.

    Returns:
        One choice for "any" platform; for "auto" one for each of `KERNEL_OF` and for "others", or
        for the program's platform alone.

    Raises:
        ValueError: there is no such implementation.
        UnsupportedError: it can't run this call; the message says why.
    """
    platforms: tuple[str, ...] = (*KERNEL_OF, "others")
    spread, misfit = 1, None
    if isinstance(requested, Kernels):
        platforms = (requested.lowered_for,)
        misfit, spread = requested.misfit(op), requested.devices
        requested = requested.of(op)
    if requested not in IMPLEMENTATIONS:
        raise ValueError(f"{op} has no implementation {requested!r}; it has {IMPLEMENTATIONS}")
    if requested != "auto":
        kernel = requested.removesuffix("_interpret")
        reason = None if kernel == "xla" else reasons.get(kernel, "this op has no such kernel")
        if reason is not None or misfit is not None:
            raise UnsupportedError(f"{op} can't run as {requested!r}: {reason or misfit}")
        return (Choice(op, requested, "any", requested),)

    def pick(platform: str) -> Choice:
        kernel = KERNEL_OF.get(platform)
        if kernel is None:
            return Choice(op, requested, platform, "xla")
        reason = reasons.get(kernel, "this op has no such kernel")
        if spread > 1:
            reason = f"the program's arrays are spread over {spread} devices"
        return Choice(op, requested, platform, kernel if reason is None else "xla", reason)

    return tuple(map(pick, platforms))


def choose(op: str, kernels: Kernels, reasons: Mapping[str, str | None]) -> str:
    """Return the implementation that runs in a program, and note it.

    Raises:
        ValueError: as `decide`.
        UnsupportedError: as `decide`.
    """
    (decided,) = decide(op, kernels, reasons)
    _choices[decided] = None
    return decided.ran


def dispatch(
    op: str,
    requested: str | Kernels,
    reasons: Mapping[str, str | None],
    implementations: Mapping[str, Callable[..., Any]],
    *operands: Any,
) -> Any:
    """Run an op by the implementation asked for, and note which one that is.

    A bare "auto" is settled when the program is lowered, so a program compiled for a platform that
    this machine lacks gets that platform's kernel. `Kernels` name the platform beforehand, which
    spares a large program the tracing of every platform's kernels.

    Args:
        op: name of the op.
        requested: one of `IMPLEMENTATIONS`, or what the program asks for.
        reasons: as `decide`.
        implementations: name -> function of the operands. All return the same shapes.
        *operands: pytrees of arrays.

    Raises:
        ValueError: as `decide`.
        UnsupportedError: as `decide`.
    """
    decided = decide(op, requested, reasons)
    _choices.update(dict.fromkeys(decided))
    if len(decided) == 1:
        return implementations[decided[0].ran](*operands)
    by_platform = {choice.platform: implementations[choice.ran] for choice in decided}
    default = by_platform.pop("others")
    by_platform = {key: value for key, value in by_platform.items() if value is not default}
    if not by_platform:
        return default(*operands)
    return jax.lax.platform_dependent(*operands, default=default, **by_platform)
