"""What a training has come to, step by step, in progress.jsonl of its folder.

    {"step": 12, "loss": 2.3, ...}       a line after every step
    {"step": 100, "held_out": {...}}     and one where held-out conversations were measured

Lines of steps that a checkpoint does not hold are cut off when the job goes on: they come again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments import runs
from jspec.errors import InputError

FILE = "progress.jsonl"


@dataclasses.dataclass(frozen=True)
class History:
    """The lines so far.

    Attributes:
        steps: of every step.
        measured: of held-out conversations.
    """

    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    measured: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        (self.measured if "held_out" in line else self.steps).append(line)

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return int(self.steps[-1]["tokens"]) if self.steps else 0

    @property
    def seconds(self) -> float:
        """Seconds spent on it, by all processes together."""
        return float(self.steps[-1]["seconds"]) if self.steps else 0.0


class Progress:
    """The file, open for more lines.

    Args:
        folder: of the job.
        step: that the job goes on after; what is said of later ones is cut off.

    Attributes:
        history: what it holds.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / FILE
        self.history = History()
        kept = _kept(self._path, step)
        partial = self._path.with_name(f"{FILE}.partial")
        try:
            partial.write_text("".join(f"{runs.to_json(line)}\n" for line in kept), "utf-8")
            partial.replace(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        for line in kept:
            self.history.add(line)

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            InputError: the disk is full.
        """
        try:
            self._file.write(f"{runs.to_json(dict(line))}\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self.history.add(dict(line))

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            "output",
            str(self._path),
            f"cannot be written ({error.strerror})",
            "free some space and run the same command again: what is finished is kept",
        )


def read(folder: Path) -> History:
    """Return the lines of a job's folder."""
    history = History()
    for line in _kept(folder / FILE, None):
        history.add(line)
    return history


def _kept(path: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the whole lines up to a step."""
    if not path.exists():
        return []
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and (step is None or line["step"] <= step):
            kept.append(line)
    return kept
