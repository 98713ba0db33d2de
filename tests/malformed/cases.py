"""A malformed input: what it does, and how the sentence about it must begin and end."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import jspec
from jspec.errors import InputError


@dataclasses.dataclass
class World:
    """What a case may use.

    Attributes:
        folder: the current directory, with the files that the command lines name.
        checkpoint: a whole Hugging Face checkpoint, not to be changed.
        model: that checkpoint, loaded; it reads and writes bytes.
        bare: a model without a tokenizer, of 61 tokens and a context of 64.
        command: runs a command line and returns its last line on standard error.
        row_errors: the error of every row of the batch job, in order.
    """

    folder: Path
    checkpoint: Path
    model: jspec.Model
    bare: jspec.Model
    command: Callable[[list[str]], str]
    row_errors: Sequence[str | None]

    def copied(self) -> Path:
        """Return a copy of the checkpoint that may be changed."""
        path = self.folder / "copied"
        shutil.copytree(self.checkpoint, path)
        return path


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        id: for pytest.
        sentence: does it, and returns the sentence.
        begins: field and value, with which the sentence begins.
        remedy: words after the semicolon.
    """

    id: str
    sentence: Callable[[World], str]
    begins: str
    remedy: str


def raised(run: Callable[[World], object]) -> Callable[[World], str]:
    """Return what runs `run` and returns the message of its `InputError`."""

    def sentence(world: World) -> str:
        with pytest.raises(InputError) as caught:
            run(world)
        return str(caught.value)

    return sentence


def given(field: str, value: object) -> str:
    """Return how a sentence about a value begins; a long one is shown by its beginning."""
    return f"{field}={repr(value)[:150]}"


def write_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Change entries of a JSON object; those that are `...` are taken out."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def begins(field: str, value: Any) -> str:
    """Return how a sentence begins; `...` stands for a value that is not short."""
    return f"{field}=" if value is ... else given(field, value)


def shown(changes: dict[str, Any]) -> str:
    """Return changes as part of a name."""
    return " ".join(f"{key} {value!r}"[:130] for key, value in changes.items())
