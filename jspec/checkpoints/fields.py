"""Typed fields of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.errors import is_finite, require

CHECK = "use the config.json that was published with the weights"


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer; absent and null are `default`, and refused where that is None."""
    value = config.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int) and not isinstance(value, bool), key, value, "is no integer", CHECK
    )
    return int(value)  # type: ignore[arg-type]


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer of at least 1; see `integer`."""
    value = integer(config, key, default)
    require(1 <= value < 2**31, key, value, "is no size of a model", CHECK)
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number; absent and null are `default`, and refused where that is None."""
    value = config.get(key)
    value = default if value is None else value
    require(is_finite(value), key, value, "is no finite number", CHECK)
    return float(value)  # type: ignore[arg-type]


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return a boolean; absent and null are `default`."""
    value = config.get(key)
    require(value is None or isinstance(value, bool), key, value, "is no boolean", CHECK)
    return default if value is None else bool(value)
