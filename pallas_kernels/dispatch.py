"""Which implementation of an op runs: asked for by name, or picked by platform and on record.

Nothing falls back in silence. An implementation asked for by name runs or raises the reason why it
can't; "auto" takes the platform's kernel where that can run and XLA where it can't, and notes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

Implementation = Literal["auto", "xla", "tpu", "gpu", "triton", "tpu_interpret", "gpu_interpret"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
# Lowering platform -> the kernel that "auto" takes there. Elsewhere it takes XLA.
KERNEL_OF = {"tpu": "tpu", "cuda": "gpu"}


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
        platform: of the run ("cpu", "tpu", "cuda"); None returns those of every platform.
    """
    if platform is None:
        return tuple(_choices)
    named = platform if platform in KERNEL_OF else "others"
    return tuple(choice for choice in _choices if choice.platform in ("any", named))


def forget() -> None:
    """Clear the record, for tests and for one process with several runs."""
    _choices.clear()


def decide(op: str, requested: str, reasons: Mapping[str, str | None]) -> tuple[Choice, ...]:
    """Decide which implementation runs on which platform, without noting it.

    Args:
        op: name of the op.
        requested: one of `IMPLEMENTATIONS`.
        reasons: implementation -> why it can't run this call, None where it can. "xla" always can.

    Returns:
        One choice for "any" platform, or for "auto" one for each of `KERNEL_OF` and for "others".

    Raises:
        ValueError: there is no such implementation.
        NotImplementedError: it can't run this call; the message says why.
    """
    if requested not in IMPLEMENTATIONS:
        raise ValueError(f"{op} has no implementation {requested!r}; it has {IMPLEMENTATIONS}")
    if requested != "auto":
        kernel = requested.removesuffix("_interpret")
        reason = None if kernel == "xla" else reasons.get(kernel, "this op has no such kernel")
        if reason is not None:
            raise NotImplementedError(f"{op} can't run as {requested!r}: {reason}")
        return (Choice(op, requested, "any", requested),)
    picked = []
    for platform, kernel in KERNEL_OF.items():
        reason = reasons.get(kernel, "this op has no such kernel")
        ran = kernel if reason is None else "xla"
        picked.append(Choice(op, requested, platform, ran, reason))
    return (*picked, Choice(op, requested, "others", "xla"))


def dispatch(
    op: str,
    requested: str,
    reasons: Mapping[str, str | None],
    implementations: Mapping[str, Callable[..., Any]],
    *operands: Any,
) -> Any:
    """Run an op by the implementation asked for, and note which one that is.

    "auto" is settled when the program is lowered, so a program compiled for a platform that this
    machine lacks gets that platform's kernel.

    Args:
        op: name of the op.
        requested: one of `IMPLEMENTATIONS`.
        reasons: as `decide`.
        implementations: name -> function of the operands. All return the same shapes.
        *operands: pytrees of arrays.

    Raises:
        ValueError: as `decide`.
        NotImplementedError: as `decide`.
    """
    decided = decide(op, requested, reasons)
    _choices.update(dict.fromkeys(decided))
    by_platform = {choice.platform: implementations[choice.ran] for choice in decided}
    default = by_platform.pop("any", None) or by_platform.pop("others")
    by_platform = {key: value for key, value in by_platform.items() if value is not default}
    if not by_platform:
        return default(*operands)
    return jax.lax.platform_dependent(*operands, default=default, **by_platform)
