"""Reading compiled programs: which arrays they write, in all and anew in every round."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.-]+) = (\w+)\[([\d,]*)\](?:\{[^}]*\})? ([\w-]+)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# They name or pass on a buffer without writing one.
_NO_BUFFER = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional"}


class Write(NamedTuple):
    """One instruction that writes a buffer of its own; `op` is a fusion's root."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation, and the entry's name."""
    found: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{", line)
        if start:
            current = start[2]
            found[current] = []
            entry = current if start[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            found[current].append(line.strip())
    return found, entry


def loop_writes(text: str) -> Iterator[Write]:
    """Yield what computations reachable from the entry's while loops write, fusions as a whole."""
    bodies, entry = computations(text)
    reachable: set[str] = set()
    waiting = [
        name for line in bodies[entry] if " while(" in line for name in _CALLED.findall(line)
    ]
    while waiting:
        name = waiting.pop()
        if name in reachable:
            continue
        reachable.add(name)
        for line in bodies[name]:
            if " fusion(" in line:
                continue
            waiting += _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                waiting += [branch.strip().lstrip("%") for branch in branches.split(",")]
    for name in sorted(reachable):
        for line in bodies[name]:
            write = _write(line, bodies)
            if write is not None:
                yield write


def entry_writes(text: str) -> Iterator[Write]:
    """Yield what the entry computation writes, fusions as a whole."""
    bodies, entry = computations(text)
    for line in bodies[entry]:
        write = _write(line, bodies)
        if write is not None:
            yield write


def _write(line: str, bodies: dict[str, list[str]]) -> Write | None:
    match = _INSTRUCTION.match(line)
    if match is None or match[4] in _NO_BUFFER:
        return None
    op = match[4]
    if op == "fusion":
        called = _CALLED.findall(line)[0]
        root = next(inner for inner in bodies[called] if inner.startswith("ROOT "))
        inside = _INSTRUCTION.match(root)
        op = inside[4] if inside else op
    shape = tuple(int(size) for size in match[3].split(",") if size)
    return Write(match[1], match[2], shape, op)
