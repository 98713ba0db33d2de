"""Runs batch jobs in forked processes and kills them, for test_batch_kill.

It is a process of its own: forking is safe only while JAX has no backend and no threads. Every
child starts one, so that each trial is a whole process at the price of a fork.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import batch, drafters, environment, launch, models
from jspec.metrics import Counts, Timing
from jspec.requests import Completion, Delta, Request

RESULTS = "results.jsonl"


class StandIn:
    """A decoder whose tokens are a hash of the request, a few at a time."""

    def __init__(self, target: Any, drafter: Any, speculation: Any, *, batch_size: int) -> None:
        self.target = target
        self.drafter = drafter
        self.batch_size = batch_size

    def check(self, request: Request) -> None:
        pass

    def stream(self, requests: list[Request]) -> Iterator[Delta]:
        for index, request in enumerate(requests):
            time.sleep(0.001)
            digest = hashlib.sha256(repr((request.token_ids, request.sampling.seed)).encode())
            tokens = tuple(digest.digest()[: 1 + len(request.token_ids) % 7])
            yield Delta(index, tokens, "", None)
            counts = Counts(np.ones((1, 1), np.int64), np.zeros(0), len(tokens), 0)
            text = "\u00e9\U0001f600" * len(tokens)
            timing = Timing(0.1, 0.2, 0.3)
            completion = Completion(tokens, text, "length", None, counts, timing)
            yield Delta(index, (), "", completion)


def stand_in() -> None:
    """Leave everything in the child as it is but the model."""
    setattr(batch, "Decoder", StandIn)  # noqa: B010
    setattr(models, "load_target", types.SimpleNamespace)  # noqa: B010
    setattr(drafters, "load", lambda target: None)  # noqa: B010
    setattr(environment, "describe", dict)  # noqa: B010


def die_at(call: int) -> None:
    """Kill this process at one of its calls to the system; a write is cut in the middle."""
    left = [call]

    def dying(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def made(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name in ("write", "pwrite"):
                    descriptor, data, *place = arguments
                    real(descriptor, bytes(data)[: len(data) // 2], *place)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return made

    for name in ("open", "write", "pwrite", "fsync", "replace", "ftruncate", "unlink", "mkdir"):
        setattr(os, name, dying(name))


def start(argv: list[str], scripted: bool, call: int | None = None) -> int:
    """Fork a process that runs the command line; returns its number."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if scripted:
            stand_in()
        if call is not None:
            die_at(call)
        status = launch.main(argv)
    finally:
        os._exit(status)


def lines(folder: Path) -> int:
    path = folder / RESULTS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def finish(argv: list[str], scripted: bool) -> None:
    _, status = os.waitpid(start(argv, scripted), 0)
    assert os.waitstatus_to_exitcode(status) == 0, argv


@dataclasses.dataclass
class Spec:
    """What to do: `kills` at random instants, or one at every call where that is 0."""

    argv: list[str]
    folder: str
    rows: int
    scripted: bool
    kills: int
    kills_a_job: int
    seed: int

    @property
    def most(self) -> int:
        """Rows between two kills, so that a job lasts for all of its kills."""
        return 2 * self.rows // self.kills_a_job


def main(spec: Spec) -> list[dict[str, Any]]:
    """Run the reference and then jobs under fire; returns what was at hand at each kill."""
    root = Path(spec.folder)

    def argv(job: str) -> list[str]:
        return [*spec.argv, f"--output={root / job}"]

    finish(argv("warm"), spec.scripted)  # fills the compilation cache
    begun = time.monotonic()
    child = start(argv("whole"), spec.scripted)
    wait_for(child, root / "whole", 1)
    ready = time.monotonic() - begun
    os.waitpid(child, 0)
    return at_random(spec, argv, ready) if spec.kills else at_every_call(spec, argv)


def wait_for(child: int, folder: Path, count: int) -> None:
    """Wait until so many rows are finished, or the child has ended."""
    while lines(folder) < count and not os.waitid(
        os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(0.0005)


def at_random(spec: Spec, argv: Callable[[str], list[str]], ready: float) -> list[dict[str, Any]]:
    """Kill each job's first process before its first row, then a quarter while they start.

    The others are killed anywhere between two rows. The first kills are spread over the time to
    the first row, so that some come before it on a machine that grows twice as fast.
    """
    draw = random.Random(spec.seed)
    jobs = spec.kills // spec.kills_a_job
    kills: list[dict[str, Any]] = []
    job = 0
    while len(kills) < spec.kills:
        name, folder = f"job{job}", Path(spec.folder) / f"job{job}"
        for trial in range(spec.kills_a_job):
            child = start(argv(name), spec.scripted)
            if trial == 0:
                time.sleep(ready * (job % jobs + draw.random()) / jobs)
            elif draw.random() < 0.25:
                time.sleep(draw.uniform(0, ready))
            else:
                before = lines(folder)
                wait_for(child, folder, draw.randint(before, min(before + spec.most, spec.rows)))
                time.sleep(draw.uniform(0, 0.005))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                break
            kills.append({"job": name, "lines": lines(folder)})
            if len(kills) == spec.kills:
                break
        finish(argv(name), spec.scripted)
        job += 1
    return kills


def at_every_call(spec: Spec, argv: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    kills: list[dict[str, Any]] = []
    while True:
        name = f"job{len(kills)}"
        child = start(argv(name), spec.scripted, call=len(kills) + 1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return kills
        kills.append({"job": name, "lines": lines(Path(spec.folder) / name)})
        finish(argv(name), spec.scripted)


if __name__ == "__main__":
    # JAX warns of forks; it has started nothing yet.
    warnings.simplefilter("ignore")
    print(json.dumps(main(Spec(**json.loads(sys.argv[1])))))
