"""The one error for bad input: which field, which value, what is wrong, what to do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from typing import cast


class InputError(ValueError):
    """Input that jspec refuses before any compute.

    Args:
        field: name of the parameter, flag, file or tensor at fault.
        value: the offending value, shown by `repr` and shortened to 200 characters.
        problem: what is wrong with it, as the rest of a sentence that begins with the field.
        remedy: what the user can do about it, as an imperative sentence.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        message = f"{field}={_shown(value)} {problem}; {remedy}"
        # On one line, whatever an array's repr or a library's message brought along.
        super().__init__(" ".join(part.strip() for part in message.splitlines()))
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except Exception:  # an integer of 5000 digits, an object that cannot show itself
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= 200 else shown[:197] + "..."


def require(condition: bool, field: str, value: object, problem: str, remedy: str) -> None:
    """Raise `InputError` unless `condition` holds."""
    if not condition:
        raise InputError(field, value, problem, remedy)


def require_integer(field: str, value: object) -> None:
    """Refuse 0.5 and True where a count is wanted: arrays of integers would cut them silently."""
    require(
        isinstance(value, numbers.Integral) and not isinstance(value, bool),
        field,
        value,
        "is not an integer",
        "give an integer",
    )


def require_number(field: str, value: object, remedy: str = "give a number") -> None:
    """Refuse what is no finite real number, or none that a float holds: a text, True, NaN."""
    require(
        is_finite(value),
        field,
        value,
        "is not a finite number",
        remedy,
    )


def is_finite(value: object) -> bool:
    """True for a finite real number that a float can hold; a boolean is none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(cast(float, value))
    except OverflowError:  # an integer above 1.8e308
        return False


def is_list(value: object) -> bool:
    """True for what has a length and members in their own right: no text, mapping or scalar."""
    scalar = isinstance(value, str | bytes | bytearray | Mapping) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Collection) and not scalar
