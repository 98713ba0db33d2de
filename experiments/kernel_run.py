"""Checks and timings of the kernels on an accelerator: `python -m experiments.kernel_run`.

The launcher's `--experiment=kernels` does the same. This module asks for JAX and NumPy alone, for
machines that have an accelerator and little else.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments import kernel_checks, kernel_loop, kernel_plan, kernel_report, kernel_speed, runs
from experiments.environment import devices
from experiments.kernel_budget import Compiler, Deadline, said
from experiments.kernel_cases import Attention, Rejection
from experiments.kernel_plan import Plan
from experiments.status import Status
from jspec.errors import InputError
from pallas_kernels import dispatch

NAME = "kernels"
TABLE = "table.txt"
PICTURE = "times.png"
_KERNEL_OF = {"gpu": "gpu", "tpu": "tpu"}
_CPU = (
    "There is no accelerator here: the kernels' code was run by Pallas's interpreters on a few "
    "small shapes\nand compared with the reference. Nothing was timed, and nothing is claimed of "
    "any accelerator."
)
_REHEARSAL = "A rehearsal at sizes that mean nothing: its times say nothing of any machine."


def measure(output: str, flags: dict[str, Any], rehearsal: bool = False) -> int:
    """Check and, on an accelerator, time the kernels; returns the exit status.

    Args:
        output: folder of the runs.
        flags: for config.json.
        rehearsal: try every part at tiny sizes instead, interpreted.

    Raises:
        InputError: the folder cannot be written.
    """
    device = jax.devices()[0]
    kernel = _KERNEL_OF.get(device.platform)
    if rehearsal:
        plan, note = kernel_plan.rehearsal(), _REHEARSAL
    elif kernel is None:
        plan, note = kernel_plan.interpreted(), _CPU
    else:
        plan, note = kernel_plan.full(kernel, _memory(device)), ""
    status = Status()
    status.say(f"Device: {devices()}; JAX {jax.__version__}")
    dispatch.forget()
    seed = secrets.randbits(20)
    with runs.create(NAME, flags, output, seed=seed) as run:
        begun = time.monotonic()
        summary, text = _parts(plan, seed, run, status)
        summary["label"] = "rehearsal" if rehearsal else "measured" if plan.timed else "checked"
        summary["device"] = devices()
        summary["seconds"] = time.monotonic() - begun
        summary["implementations"] = [str(choice) for choice in dispatch.choices()]
        picture = None
        if plan.timed:
            picture = kernel_report.picture(
                summary["loop"], summary["speed"], _of_record(summary["bandwidth"])
            )
        if picture is not None:
            run.write_bytes(PICTURE, picture)
        text = "\n\n".join(part for part in (note, text) if part)
        run.write_text(TABLE, f"{text}\n")
        run.write_json(runs.SUMMARY, summary)
    status.clear()
    print(text)
    failed = sum(row["passed"] is False for row in summary["checks"])
    if failed:
        print(f"\n{failed} of {len(summary['checks'])} comparisons FAILED")
    print(f"\nResults: {run.folder} (figures in {run.folder / runs.SUMMARY})")
    return 1 if failed else 0


def _parts(plan: Plan, seed: int, run: runs.Run, status: Status) -> tuple[dict[str, Any], str]:
    """Return the summary and the tables."""
    compiler = Compiler()
    total = Deadline.after(sum(plan.seconds))

    def progress(text: str) -> None:
        status.busy(f"[{total.left():3.0f} s left] {text}")

    found: dict[str, Any] = {"checks": [], "speed": [], "loop": []}

    def keep(part: str, row: dict[str, Any]) -> None:
        found[part].append(row)
        run.append(runs.METRICS, {"part": part, **row})

    deadline = Deadline.after(plan.seconds[0])
    for row in kernel_checks.run(
        plan.checked, plan.implementations, compiler, seed, deadline, progress
    ):
        keep("checks", row)
    compiler.settle()
    parts = [kernel_report.checks(found["checks"])]
    if plan.timed:
        progress("measuring the bandwidth")
        found["bandwidth"] = kernel_speed.bandwidth(plan.speed)
        deadline = Deadline.after(plan.seconds[1])
        for case, row in zip(
            plan.timed,
            kernel_speed.run(
                plan.timed,
                plan.implementations[-1],
                compiler,
                plan.speed,
                seed + 500,
                deadline,
                progress,
            ),
            strict=True,
        ):
            keep("speed", row | _aims(case))
        of_record = _of_record(found["bandwidth"])
        bandwidths = ", ".join(f"{n} {b / 1e9:.0f}" for n, b in found["bandwidth"].items())
        parts.append(
            f"Bandwidth measured here, GB/s: {bandwidths}. The floors go by the larger of copy and "
            f"triad."
        )
        parts.append(kernel_report.speed(found["speed"], of_record))
        parts.append(kernel_report.GOALS)
        found["goals"] = _goals(found["speed"], of_record)
    if plan.loop is not None:
        deadline = Deadline.after(plan.seconds[2])
        try:
            for row in kernel_loop.run(
                plan.implementations[-1], compiler, plan.loop, deadline, progress
            ):
                keep("loop", row)
            text = kernel_report.loop(found["loop"])
        except Exception as error:  # what was found so far stays
            text = f"The loop could not be timed: {said(error)}"
            found["loop_error"] = said(error)
        name = plan.loop.config.name
        parts.append(
            f"A round of the whole loop, {name}, random {jax.numpy.dtype(plan.loop.dtype).name} "
            f"weights, rows of about {plan.loop.slots - plan.loop.room} of {plan.loop.slots} slots:"
            f"{_flags(plan.loop)}\n{text}"
        )
    compiler.close()
    return found, "\n\n".join(parts)


def _memory(device: jax.Device) -> int | None:
    try:
        return int((device.memory_stats() or {})["bytes_limit"])
    except (KeyError, jax.errors.JaxRuntimeError):
        return None


def _of_record(bandwidth: dict[str, float]) -> float:
    return max(bandwidth["copy"], bandwidth["triad"])


def _flags(scale: kernel_loop.Scale) -> str:
    if not scale.flags:
        return ""
    return f" (XLA: {', '.join(f'{name}={value}' for name, value in scale.flags.items())})"


def _aims(case: Any) -> dict[str, float]:
    """Return the goals of a case as numbers: see `kernel_report.GOALS`."""
    if isinstance(case, Attention) and case.case.slots >= 8192:
        if case.case.batch >= 8:
            return {"least_share": 0.8}
        return {"least_share": 0.6} if case.case.batch == 1 else {}
    if isinstance(case, Rejection) and case.edits != "all":
        return {"most_floors": 1.3 if case.edits == "none" else 3.0}
    return {}


def _goals(rows: Sequence[dict[str, Any]], bandwidth: float) -> list[dict[str, Any]]:
    return [
        {"op": row["op"], "case": row["case"], "goal": goal, "met": met}
        for row in rows
        for goal, met in kernel_report.goals(row, bandwidth).items()
    ]


def main(argv: Sequence[str]) -> int:
    """Run by a command line of its own; returns the exit status."""
    parser = argparse.ArgumentParser(prog="experiments.kernel_run", description=__doc__)
    parser.add_argument("--output", default="results", help="where the run's own folder is made")
    parser.add_argument("--rehearsal", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        return measure(arguments.output, vars(arguments), arguments.rehearsal)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
