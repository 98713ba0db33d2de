"""Trainings small enough for a test: a deep, narrow model of bytes, and text to learn by heart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.experiments.conftest import write_model

Train = Callable[..., int]


def model(directory: Path) -> Path:
    """A model of two tiny layers that is sure of what it says: there is something to learn."""
    write_model(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] * 40}, path)
    return directory


def progress(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of steps and of measurements."""
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "held_out" not in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return steps, [line for line in lines if "held_out" in line]


def chats(path: Path, count: int = 40) -> Path:
    """A file of short chats that end with an answer, which are trained on as they stand."""
    words = ["cat", "dog", "hen", "fox", "cow"]
    rows = [
        [
            {"role": "user", "content": f"Where is the {words[i % 5]}?"},
            {"role": "assistant", "content": f"the {words[i % 5]} sat on the mat " * 3},
        ]
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path
