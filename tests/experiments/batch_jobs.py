"""Batch jobs for the tests: their rows, their results, and a death in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import journal

BUDGET = 8

ROWS: list[dict[str, Any]] = [
    {"prompt": "zero", "id": "first"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    {"token_ids": [70, 71, 72], "max_new_tokens": 3},
    {"turns": ["one", "two"], "question_id": 81, "category": "math", "temperature": 1.0},
    {"prompt": "sampled", "temperature": 1.5, "top_p": 0.9},
    {"prompt": "last", "seed": 9, "temperature": 1.5},
]

Command = Callable[..., int]


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def results(folder: Path) -> list[dict[str, Any]]:
    """The lines in the order of the input."""
    data = (folder / "results.jsonl").read_bytes()
    assert data.endswith(b"\n")
    lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    assert len({line["index"] for line in lines}) == len(lines)
    return sorted(lines, key=lambda line: int(line["index"]))


def untimed(folder: Path) -> list[dict[str, Any]]:
    def strip(value: dict[str, Any]) -> dict[str, Any]:
        kept = {name: item for name, item in value.items() if name != "timing"}
        if "turns" in kept:
            kept["turns"] = [strip(turn) for turn in kept["turns"]]
        return kept

    return [strip(line) for line in results(folder)]


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


class Killed(BaseException):
    """What no handler in the job takes for anything else."""


def kill_after(monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    """End the process, as far as a test can, before it writes another line."""
    write_line = journal.Results.write
    written: list[int] = []

    def write(self: journal.Results, index: int, line: dict[str, Any]) -> None:
        if not self.has(index):
            if len(written) == lines:
                raise Killed
            written.append(index)
        write_line(self, index, line)

    monkeypatch.setattr(journal.Results, "write", write)
