"""Training text that shares words with an evaluation file, which would flatter what is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jspec.errors import InputError

RUN = 8  # words in a row that are no chance
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case and without marks."""
    return _WORD.findall(text.casefold())


def runs(text: str) -> set[tuple[str, ...]]:
    """Return every run of `RUN` words of a text; a shorter text has none."""
    found = words(text)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


def read(path: Path) -> frozenset[tuple[str, ...]]:
    """Return the runs of words of all texts in a file.

    Args:
        path: JSON lines, every string of which counts wherever it stands, or a text.

    Raises:
        InputError: the file cannot be read, or holds no run of words.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "exclude", str(path), f"cannot be read ({error})", "give a JSON-lines or text file"
        ) from None
    found: set[tuple[str, ...]] = set()
    for text in _texts(path, content):
        found |= runs(text)
    if not found:
        raise InputError(
            "exclude",
            str(path),
            f"has no run of {RUN} words",
            "give the file that the drafter will be judged by",
        )
    return frozenset(found)


def shares(text: str, excluded: frozenset[tuple[str, ...]]) -> bool:
    """Tell whether a text has a run of words in common with those that are excluded."""
    return not excluded.isdisjoint(runs(text))


def _texts(path: Path, content: str) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield from _strings(json.loads(line))
        except (ValueError, RecursionError):
            raise InputError(
                "exclude", f"{path}:{number}", "is not JSON", "give JSON lines, or a .txt file"
            ) from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
