"""Typed fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.errors import require

CHECK = "use the config.json that was published with the weights"


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer; absent and null are `default`, and refused where that is None."""
    value = config.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int) and not isinstance(value, bool), key, value, "is no integer", CHECK
    )
    return int(value)  # type: ignore[arg-type]


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number; absent and null are `default`, and refused where that is None."""
    value = config.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int | float) and not isinstance(value, bool),
        key,
        value,
        "is no number",
        CHECK,
    )
    return float(value)  # type: ignore[arg-type]


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return a boolean; absent and null are `default`."""
    value = config.get(key)
    require(value is None or isinstance(value, bool), key, value, "is no boolean", CHECK)
    return default if value is None else bool(value)
