"""The one error for bad input: which field, which value, what is wrong, what to do."""

from __future__ import annotations

import math
import numbers
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
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        super().__init__(f"{field}={shown} {problem}; {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy


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
    """Refuse what is no finite real number: a text, True, NaN."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(
        real and math.isfinite(cast(float, value)),
        field,
        value,
        "is not a finite number",
        remedy,
    )
