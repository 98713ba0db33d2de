"""Prompts by category from a JSON-lines file in Spec-Bench's format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags as absl_flags

from jspec.errors import InputError, require

FILE = absl_flags.DEFINE_string(
    "workloads", None, "Prompts by category: JSON lines in Spec-Bench's format."
)
PER_CATEGORY = absl_flags.DEFINE_integer(
    "per_category", 2, "Prompts of each category, from the file's start; 0 takes all."
)

_REMEDY = "give question_id, category and turns"


@dataclasses.dataclass(frozen=True)
class Workload:
    """One prompt.

    Attributes:
        question_id: as the file has it.
        category: task the prompt stands for.
        prompt: the first turn of the user.
    """

    question_id: str
    category: str
    prompt: str


def read(path: str | Path, per_category: int) -> list[Workload]:
    """Return the first `per_category` prompts of each category, in the file's order.

    Args:
        path: one JSON object a line, with `question_id`, `category` and `turns`.
        per_category: how many of each; 0 takes all.

    Raises:
        InputError: the file cannot be read, a line is not of this format, or `per_category` is
            negative.
    """
    require(
        per_category >= 0, "per_category", per_category, "is negative", "give 0 for all of them"
    )
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "workloads", str(path), f"cannot be read ({error})", "give a JSON-lines file"
        ) from None
    taken: dict[str, list[Workload]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            first = record["turns"][0]
            workload = Workload(str(record["question_id"]), str(record["category"]), first)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InputError(
                f"workloads line {number}",
                line,
                f"is not a Spec-Bench question ({type(error).__name__}: {error})",
                _REMEDY,
            ) from None
        require(
            isinstance(record["turns"], list) and isinstance(first, str),
            f"workloads line {number}",
            line,
            "has turns that are no list of texts",
            _REMEDY,
        )
        rows = taken.setdefault(workload.category, [])
        if per_category == 0 or len(rows) < per_category:
            rows.append(workload)
    if not taken:
        raise InputError("workloads", str(path), "has no prompts", "give a JSON-lines file")
    return [workload for rows in taken.values() for workload in rows]
