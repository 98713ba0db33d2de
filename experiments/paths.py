"""Paths as people write them in flags."""

from __future__ import annotations

from pathlib import Path

from jspec.errors import InputError


def expanded(flag: str, path: str) -> Path:
    """Return `path` with ~ and ~user expanded.

    Raises:
        InputError: there is no such user; `flag` is the field.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(
            flag, path, "names a home directory that is not known", "check the path"
        ) from None
