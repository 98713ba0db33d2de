"""What drafts are worth, by drafter, category and temperature; memory, walltime, curve."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags as absl_flags

import jspec
from experiments import (
    acceptance_curve,
    acceptance_drafters,
    acceptance_measure,
    acceptance_plot,
    acceptance_report,
    acceptance_speed,
    environment,
    flags,
    memory,
    models,
    report,
    runs,
    temperatures,
    tree_plot,
    workloads,
)
from experiments.acceptance_drafters import Spec
from experiments.acceptance_measure import Progress
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.runs import Run
from experiments.status import Status
from experiments.tree_compare import PLAIN
from experiments.workloads import Workload
from jspec.config import SpeculationConfig
from jspec.errors import InputError, require
from jspec.requests import Request

_DRAFTERS = absl_flags.DEFINE_list(
    "acceptance_drafters",
    [acceptance_drafters.NGRAM],
    "What drafts: NAME[+int8][+sure:P][+lookup][@SHAPE], several separated by commas. NAME: ngram, "
    "early-exit:LAYERS, draft-model:MODEL, or a trained drafter's name or directory. SHAPE: "
    "chain:DRAFTS (else --gamma), 3,2,1 or parents:-1,0,0 (a tree), dynamic:DRAFTS/DEPTH/WIDTH.",
)
_TIMED = absl_flags.DEFINE_boolean(
    "timed", False, "Measure walltime over plain decoding too, at batch 1; wants a quiet machine."
)
_TIMED_DRAFTERS = absl_flags.DEFINE_list(
    "timed_drafters", [], "Those of --acceptance_drafters that are timed; all where not given."
)
_TIMED_REPEATS = absl_flags.DEFINE_integer(
    "timed_repeats", 3, "Turns in which every prompt is timed; medians are over them."
)
_CURVE = absl_flags.DEFINE_list(
    "curve",
    [],
    "Plot block efficiency against training tokens: [NAME=]FILE of JSON lines that have both, as "
    "training writes them; several separated by commas. Needs no prompts.",
)

TABLE, PAGE = "table.txt", "report.html"
_CAPACITY = 1024  # tokens a row for which caches are compared


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is measured.

    Attributes:
        target: the model.
        drafters: with what was asked for, by name.
        prompts: at the temperature of the first.
        run: of the results.
        status: where progress is shown.
    """

    target: jspec.Model
    drafters: dict[str, tuple[Spec, jspec.BoundDrafter]]
    prompts: list[tuple[Workload, Request]]
    run: Run
    status: Status

    def speculation(self, name: str) -> SpeculationConfig:
        """Return how much a drafter speculates."""
        spec, bound = self.drafters[name]
        if bound.drafts is not None:
            return _speculation(bound.drafts)
        if spec.gamma is not None:
            return _speculation(spec.gamma)
        most = flags.GAMMA.value if bound.most_drafts is None else bound.most_drafts
        return _speculation(min(flags.GAMMA.value, most))

    def plain(self, batch_size: int) -> jspec.Decoder:
        """Return plain decoding."""
        return jspec.Decoder(self.target, None, _speculation(0), batch_size=batch_size)


def _speculation(gamma: int) -> SpeculationConfig:
    return SpeculationConfig(gamma, rounds_per_chunk=flags.ROUNDS_PER_CHUNK.value or 64)


def _run() -> int:
    path = workloads.FILE.value
    curves = [acceptance_curve.read(text) for text in _CURVE.value]
    if path is None and not curves:
        raise InputError("workloads", path, "is not given", "give a JSON-lines file of prompts")
    if path is None:
        return _show(curves)
    specs = acceptance_drafters.parse(_DRAFTERS.value)
    timed = _timed([spec.text for spec in specs])
    degrees = temperatures.listed()
    sampling = dataclasses.replace(flags.sampling_params(), temperature=degrees[0])
    samplings = [dataclasses.replace(sampling, temperature=value) for value in degrees]
    require(
        1 <= flags.GAMMA.value <= 127,
        flags.GAMMA.name,
        flags.GAMMA.value,
        "drafts nothing",
        "give 1 to 127 drafts a round",
    )
    found = workloads.read(path, workloads.PER_CATEGORY.value)
    status = Status()
    with runs.create("acceptance", ours(EXPERIMENT), flags.OUTPUT.value, seed=sampling.seed) as run:
        status.busy(f"Loading {flags.MODEL.value} ...")
        target = models.load_target()
        bound = {spec.text: (spec, acceptance_drafters.bind(target, spec)) for spec in specs}
        job = _Job(target, bound, [], run, status)
        plain = job.plain(flags.BATCH_SIZE.value)
        for index, workload in enumerate(found):
            turns = [{"role": "user", "content": workload.prompt}]
            ids = jspec.to_token_ids(target, turns)
            request = Request(ids, flags.of_prompt(samplings[0], index))
            plain.check(request, f"workloads {workload.question_id}")
            job.prompts.append((workload, request))
        summary = _summary(job, degrees, timed)
        if curves:
            summary["curves"] = [acceptance_curve.summary(curve) for curve in curves]
        _write(job.run, summary, curves)
        status.clear()
        print(f"{(run.folder / TABLE).read_text(encoding='utf-8')}\nResults: {run.folder}")
    return 0


def _timed(names: Sequence[str]) -> list[str]:
    """Return the drafters that are to be timed."""
    for flag in (_TIMED_DRAFTERS, _TIMED_REPEATS):
        require(
            not flag.present or _TIMED.value,
            flag.name,
            flag.value,
            "has no effect without --timed",
            "leave it out, or give --timed",
        )
    repeats = _TIMED_REPEATS.value
    require(repeats >= 1, _TIMED_REPEATS.name, repeats, "is below 1", "give a count >= 1")
    if not _TIMED.value:
        return []
    if not _TIMED_DRAFTERS.value:
        return list(names)
    wanted = [spec.text for spec in acceptance_drafters.parse(_TIMED_DRAFTERS.value)]
    for name in wanted:
        require(
            name in names,
            _TIMED_DRAFTERS.name,
            name,
            "is none of --acceptance_drafters",
            f"give some of {', '.join(names)}",
        )
    return wanted


def _summary(job: _Job, degrees: Sequence[float], timed: Sequence[str]) -> dict[str, Any]:
    """Measure everything; returns the content of summary.json."""
    capacity = min(_CAPACITY, job.target.config.max_context)
    found: dict[str, Any] = {
        "label": "measured",
        "setting": _setting(),
        "drafters": {
            name: {
                "drafts": job.speculation(name).gamma,
                "shape": "chain" if bound.drafts is None else "tree",
                "memory": memory.measure(job.target, bound, capacity).as_dict(),
            }
            for name, (_, bound) in job.drafters.items()
        },
        "acceptance": {},
        "speed": {},
    }
    # Plain decoding once, then decoding and forcing for every drafter.
    runs_of_a_prompt = len(degrees) * (1 + 2 * len(job.drafters))
    progress = Progress(job.status, runs_of_a_prompt * len(job.prompts))
    plain = job.plain(flags.BATCH_SIZE.value)
    for temperature in degrees:
        prompts = temperatures.at(temperature, job.prompts)
        texts = acceptance_measure.decode(plain, [request for _, request in prompts], progress)
        section = found["acceptance"].setdefault(f"{temperature:g}", {})
        for name, (_, bound) in job.drafters.items():
            measured = acceptance_measure.measure(
                plain, bound, job.speculation(name), prompts, texts, progress
            )
            for one in measured:
                job.run.append(runs.METRICS, one.line())
            section[name] = acceptance_report.summarise(measured)
    if timed:
        decoders = {PLAIN: job.plain(1)} | {
            name: jspec.Decoder(
                job.target, job.drafters[name][1], job.speculation(name), batch_size=1
            )
            for name in timed
        }
        for temperature in degrees:
            found["speed"][f"{temperature:g}"] = acceptance_speed.measure(
                decoders,
                temperatures.at(temperature, job.prompts),
                _TIMED_REPEATS.value,
                job.run,
                job.status,
            )
    return found


def _setting() -> str:
    """Return what was measured where and when, in a sentence."""
    return (
        f"{flags.MODEL.value}, {flags.DTYPE.value}, at most {flags.MAX_NEW_TOKENS.value} tokens a "
        f"prompt, chains of {flags.GAMMA.value} where not said otherwise; {environment.cores()} "
        f"cores of {environment.cpu_model()}, {environment.devices()}, jax {jax.__version__}; "
        f"{datetime.date.today().isoformat()}."
    )


def _write(run: Run, summary: dict[str, Any], curves: Sequence[acceptance_curve.Curve]) -> None:
    figures = acceptance_plot.pictures(summary)
    sections, headline = acceptance_report.sections(summary), acceptance_report.headline(summary)
    if curves:
        figures["curve"] = ("block efficiency by training tokens", acceptance_curve.figure(curves))
        sections.append(acceptance_curve.section(curves))
    shown = {}
    for stem, (words, figure) in figures.items():
        files = tree_plot.files(figure, stem)
        shown[words] = files[f"{stem}.png"]
        for name, content in files.items():
            run.write_bytes(name, content)
    run.write_text(TABLE, f"{report.text([*headline, summary['setting']], sections)}\n")
    page = report.page(
        "jspec acceptance",
        "What drafts are worth",
        headline,
        summary["setting"],
        shown,
        sections,
        wide=True,
    )
    run.write_text(PAGE, page)
    run.summarize(summary)


def _show(curves: Sequence[acceptance_curve.Curve]) -> int:
    """Plot curves alone."""
    with runs.create("acceptance", ours(EXPERIMENT), flags.OUTPUT.value) as run:
        files = tree_plot.files(acceptance_curve.figure(curves), "curve")
        for name, content in files.items():
            run.write_bytes(name, content)
        text = report.text([], [acceptance_curve.section(curves)]).strip()
        run.write_text(TABLE, f"{text}\n")
        run.summarize({"curves": [acceptance_curve.summary(curve) for curve in curves]})
    print(f"{text}\n\nResults: {run.folder}")
    return 0


EXPERIMENT = Experiment(
    name="acceptance",
    summary="what drafts are worth, by drafter, category and temperature; memory and walltime",
    run=_run,
    defaults={"gamma": 4, "max_new_tokens": 64, "temperatures": "0,0.7,1"},
    refused={
        "drafter": "is what --acceptance_drafters names here",
        "draft_model": "is what --acceptance_drafters names here",
        "exit_layers": "is what --acceptance_drafters names here",
        "tree": "is what --acceptance_drafters names here",
        "tree_nodes": "is what --acceptance_drafters names here",
        "tree_depth": "is what --acceptance_drafters names here",
        "tree_width": "is what --acceptance_drafters names here",
        "verification": "is by token here, as sum min(p, q) is",
        "n": "would measure every prompt several times",
        "temperature": "is one of --temperatures here",
        "profile": "would slow what is measured",
    },
    flag_modules=(temperatures.__name__, workloads.__name__),
)
