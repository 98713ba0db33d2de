"""Is this checkout slower than another revision? Both decode in turns, in one run.

`python -m experiments.compare_revisions REVISION` puts the revision beside the checkout, starts a
process of each, and lets them decode the same prompts in turns: plainly and by prompt lookup, one
row and eight. Printed are medians of the ratios of neighbouring turns, which a machine's drift
leaves alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
# What a process decodes: drafter or not, and rows.
MODES = (("plain", 1), ("plain", 8), ("lookup", 1), ("lookup", 8))

# Run by both revisions, so it keeps to what every one of them has.
_WORKER = """
import json, sys, time
import jspec

model, modes, tokens = json.loads(sys.argv[1])
target = jspec.load(model)
prompt = (
    "Repeat this list twice, in the same order: apples, pears, plums, cherries, apricots, "
    "peaches, grapes, melons, lemons, oranges."
)
sampling = jspec.SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=1)

def decode(name, rows):
    drafter = jspec.ngram() if name == "lookup" else None
    prompts = [[{"role": "user", "content": f"{i}. {prompt}"}] for i in range(rows)]
    started = time.perf_counter()
    done = jspec.generate(target, prompts, drafter=drafter, sampling=sampling)
    return time.perf_counter() - started, [c.token_ids for c in done]

for name, rows in modes:
    decode(name, rows)
print("ready", flush=True)
for line in sys.stdin:
    seconds, tokens = decode(*json.loads(line))
    print(json.dumps([seconds, tokens]), flush=True)
"""


class _Side:
    """A process of one revision."""

    def __init__(self, root: Path, model: str, tokens: int) -> None:
        given = json.dumps([model, MODES, tokens])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, given],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a revision's process ended with status {self._process.wait()}")
        return line

    def decode(self, mode: tuple[str, int]) -> tuple[float, Any]:
        assert self._process.stdin is not None
        print(json.dumps(mode), file=self._process.stdin, flush=True)
        seconds, tokens = json.loads(self.answer())
        return seconds, tokens

    def end(self) -> None:
        self._process.communicate()


def compare(revision: str, model: str, tokens: int, turns: int) -> list[dict[str, Any]]:
    """Return for each mode the median time of this checkout over that of the revision."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        git = ["git", "-C", str(_ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(other), revision], check=True)
        try:
            sides = [_Side(other, model, tokens), _Side(_ROOT, model, tokens)]
            for side in sides:
                side.answer()
            for mode in MODES:
                times: list[tuple[float, float]] = []
                for turn in range(turns):
                    order = (0, 1) if turn % 2 == 0 else (1, 0)
                    found = {place: sides[place].decode(mode) for place in order}
                    times.append((found[0][0], found[1][0]))
                    print(f"{mode[0]} {mode[1]}: turn {turn + 1} of {turns}", file=sys.stderr)
                ratios = sorted(mine / theirs for theirs, mine in times)
                rows.append(
                    {
                        "mode": f"{mode[0]}, {mode[1]} rows",
                        "this over that": statistics.median(ratios),
                        "lowest": ratios[0],
                        "highest": ratios[-1],
                        "same tokens": found[0][1] == found[1][1],
                    }
                )
            for side in sides:
                side.end()
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    return rows


def main(argv: Sequence[str]) -> int:
    """Run by a command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="as git names it")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=48, help="a row and turn")
    parser.add_argument("--turns", type=int, default=11)
    given = parser.parse_args(argv)
    for row in compare(given.revision, given.model, given.tokens, given.turns):
        cells = [f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
        print("; ".join(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
