"""A batch job: files of prompts in, a line of results each out, and a kill at any time loses none.

The folder given as --output is the job's own. Running the same command again goes on where the last
process ended, however it ended. A row's result depends on settings and input alone, not on when it
is decoded: its seed follows from its place in the input, and it shares its batch with the same rows
every time, finished ones included. So the same batch size on the same machine gives the same bits;
another one may turn near-ties, as it rounds other sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from experiments import (
    batch_results,
    drafters,
    environment,
    flags,
    input_files,
    journal,
    low_acceptance,
    models,
    paths,
    prompts,
    results,
    rows,
    runs,
)
from experiments.batch_decoding import Session
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.input_files import InputFile, Line
from experiments.interrupts import Interrupted, Interrupts, until_interrupted
from experiments.journal import Results
from experiments.status import Status
from jspec.config import SpeculationConfig
from jspec.errors import require
from jspec.generation import Decoder
from jspec.sampling_params import SamplingParams

_RETRY_FAILED = absl_flags.DEFINE_boolean(
    "retry_failed", False, "Do the rows again that ended in an error."
)

_FORMAT = 2
# Batches of rows that are read, tokenised and sorted by length together.
_WINDOW = 32
# Flags that a later process may change. batch_size moves no more than rounding, and a job that did
# not fit the memory must be able to go on with a smaller one. seed and input are compared by
# themselves.
_FREE = (
    "experiment",
    "input",
    "seed",
    "output",
    "batch_size",
    "rounds_per_chunk",
    "profile",
    "compilation_cache",
    "retry_failed",
)
_SAME = "give what it was begun with, or another --output"


@dataclasses.dataclass
class _Job:
    """A job that this process holds."""

    folder: Path
    files: Sequence[InputFile]
    sampling: SamplingParams
    speculation: SpeculationConfig
    results: Results
    totals: batch_results.Totals
    status: Status
    interrupts: Interrupts

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


def run() -> int:
    """Run the experiment; returns the exit status: 1 if a row ended in an error."""
    return until_interrupted(_run)


def _run(interrupts: Interrupts) -> int:
    sampling = flags.sampling_params()
    speculation = drafters.speculation(SpeculationConfig.rounds_per_chunk)
    size = flags.BATCH_SIZE.value
    require(size >= 1, "batch_size", size, "is below 1", "decode at least one row")
    require(
        flags.OUTPUT.present,
        "output",
        None,
        "is not given",
        "give --output=FOLDER for the job alone; the same folder again goes on with it",
    )
    files = input_files.scan(prompts.INPUT.value)
    folder = paths.expanded("output", flags.OUTPUT.value)
    with journal.locked(folder):
        seed = _settle(folder, files, sampling.seed)
        if _RETRY_FAILED.value:
            journal.remove(folder / runs.SUMMARY)
        totals = batch_results.Totals()

        def keep(line: dict[str, Any]) -> bool:
            if _RETRY_FAILED.value and line["error"] is not None:
                return False
            totals.add(line)
            return True

        count = sum(file.rows for file in files)
        with contextlib.closing(Results(folder, count, batch_results.is_whole, keep)) as results:
            job = _Job(
                folder,
                files,
                dataclasses.replace(sampling, seed=seed),
                speculation,
                results,
                totals,
                Status(),
                interrupts,
            )
            return _finish(job)


_BEFORE_SETTINGS = (journal.LOCK, f"{journal.SETTINGS}.")


def _settle(folder: Path, files: Sequence[InputFile], seed: int | None) -> int:
    """Compare the settings with those that the job was begun with; returns its seed.

    Settings bind from the first result on: a job that could not even load its model has none.

    Raises:
        InputError: they differ or are damaged, or the folder is something else's.
    """
    wanted = {
        "format": _FORMAT,
        "flags": {name: value for name, value in ours(EXPERIMENT).items() if name not in _FREE},
        # A list, as the rows' indices and so their seeds follow from the order.
        "input": [[file.name, file.rows, file.sha256] for file in files],
    }
    wanted = json.loads(runs.to_json(wanted))
    path = folder / journal.SETTINGS
    bound = journal.has_results(folder)
    # A job of its own may have been cut before its settings were written: a lock and no more.
    others = [name for name in sorted(os.listdir(folder)) if not name.startswith(_BEFORE_SETTINGS)]
    require(
        path.exists() or not others,
        "output",
        str(folder),
        f"holds {', '.join(others[:3])} without a {journal.SETTINGS}: it is not of a job like this",
        "give another --output",
    )
    stored = journal.read_json(path) or {}
    if bound:
        _require_whole(stored, folder)
        _require_same(stored, wanted)
        return int(stored["seed"])
    same = _is_whole(stored) and all(stored[name] == wanted[name] for name in wanted)
    if not same:
        rows.check_ids(files)
    if not same or flags.SEED.value is not None:
        stored = wanted | {"seed": seed}
    journal.write_json(path, stored)
    return int(stored["seed"])


def _require_whole(stored: dict[str, Any], folder: Path) -> None:
    begun = stored.get("format")
    require(
        type(begun) is not int or begun == _FORMAT,
        "output",
        str(folder),
        f"was begun with another version of jspec (format {begun}, and this one has {_FORMAT})",
        "go on with that version, or give another --output",
    )
    require(
        _is_whole(stored),
        "output",
        str(folder),
        f"holds results and a damaged {journal.SETTINGS}: what they were begun with is not known",
        "put that file back as it was, or give another --output",
    )


def _is_whole(stored: dict[str, Any]) -> bool:
    files = stored.get("input")
    return (
        stored.get("format") == _FORMAT
        and isinstance(stored.get("flags"), dict)
        and isinstance(files, list)
        and all(isinstance(file, list) for file in files)
        and all([type(item) for item in file] == [str, int, str] for file in files)
        and type(stored.get("seed")) is int
    )


def _require_same(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    journal.require_same(stored["flags"], wanted["flags"], _SAME)
    begun, given = stored["input"], wanted["input"]
    require(
        begun == given or sorted(begun) != sorted(given),
        "input",
        ", ".join(prompts.INPUT.value),
        f"has the files in another order than this job was begun with: it has {_names(given)} "
        f"and was begun with {_names(begun)}",
        f"give them in the order {_names(begun)}, or another --output",
    )
    require(
        begun == given,
        "input",
        ", ".join(prompts.INPUT.value),
        f"is not what this job was begun with: it has {_in_words(given)} "
        f"and was begun with {_in_words(begun)}",
        _SAME,
    )
    if flags.SEED.value is not None:
        journal.require_same(stored, {"seed": flags.SEED.value}, _SAME)


def _names(files: list[list[Any]]) -> str:
    return ", ".join(name for name, _, _ in files)


def _in_words(files: list[list[Any]]) -> str:
    return ", ".join(f"{name} ({rows} rows, sha256 {digest[:12]})" for name, rows, digest in files)


def _finish(job: _Job) -> int:
    """Do what is left of the job; returns the exit status."""
    if job.results.damaged:
        job.status.say(
            f"{job.results.damaged} lines of {job.results.path} were cut short or damaged; "
            "their rows are done again"
        )
    left = job.rows - job.results.finished
    process = None  # who only writes the summary of others has decoded nothing
    if left:
        if job.results.finished:
            job.status.say(f"Going on with {left} of {job.rows} rows")
        try:
            process = _decode(job)
        except Interrupted as interrupted:
            done = f"{job.results.finished} of {job.rows} rows are finished"
            job.status.say(f"interrupted: {done}; run the same command again to go on")
            return interrupted.status
    finished = job.results.finished
    require(
        finished == job.rows,
        "output",
        str(job.folder),
        f"has results of {finished} of {job.rows} rows though all were read: a fault of jspec",
        "report it with the input's first and last lines; what is finished is kept",
    )
    summary = job.folder / runs.SUMMARY
    if left or journal.read_json(summary) is None:
        job.results.sync()
        journal.write_json(summary, job.totals.summary() | {"last_process": process})
    failed = job.totals.failed
    outcome = f"{failed} of {job.rows} rows failed" if failed else f"{job.rows} rows"
    job.status.say(f"{'Finished' if left else 'Everything is finished'}: {outcome}")
    if failed:
        job.status.say(
            "To do the failed rows again, add --retry_failed; corrected rows are a job of their own"
        )
    if not job.totals.lossless:
        job.status.say(results.LOSSY)
    job.status.say(f"Results: {job.results.path}")
    return 1 if failed else 0


def _decode(job: _Job) -> dict[str, Any]:
    """Decode the rows that are missing; returns what the summary says of this process."""
    config = job.folder / runs.CONFIG
    # Until there is a result, an earlier process has only tried, perhaps with other settings.
    if job.results.finished == 0 or journal.read_json(config) is None:
        now = datetime.datetime.now().astimezone()
        seed = job.sampling.seed
        journal.write_json(config, runs.config("batch", ours(EXPERIMENT), now, seed=seed))
    job.status.busy(f"Loading {flags.MODEL.value} ...")
    target = models.load_target()
    drafter = drafters.load(target)
    decoder = Decoder(target, drafter, job.speculation, batch_size=flags.BATCH_SIZE.value)
    session = Session(
        decoder, prompts.RAW.value, job.results, job.totals, job.status, job.interrupts
    )
    job.status.busy("Reading the rows; the first time it compiles, which takes a while ...")
    with runs.Run(job.folder).profile(flags.PROFILE.value):
        for window in _windows(input_files.lines(job.files), _WINDOW * decoder.batch_size):
            if all(job.results.has(line.index) for line in window):
                continue
            session.decode([rows.parse(line, job.sampling, prompts.RAW.value) for line in window])
    job.status.clear()
    name = decoder.drafter.name if decoder.drafter else None
    warning = low_acceptance.warning(session.counts, name) if session.counts else None
    if warning:
        job.status.say(warning)
    more = {"drafter": name, "kernels": environment.kernels()}
    return session.summary() | more | {"warnings": [warning] if warning else []}


def _windows(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    while window := list(itertools.islice(lines, size)):
        yield window


EXPERIMENT = Experiment(
    name="batch",
    summary="decode files of prompts as a job that goes on where it was killed",
    run=run,
    flag_modules=(prompts.__name__,),
)
