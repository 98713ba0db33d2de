"""Token trees: one as text and picture, the best one for a drafter, trees against chains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

import jspec
from experiments import (
    drafters,
    environment,
    flags,
    generate,
    models,
    prompts,
    runs,
    temperatures,
    tree_compare,
    tree_flags,
    tree_plot,
    tree_proposal,
    tree_rates,
    tree_report,
    tree_text,
    workloads,
)
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.prompts import Source
from experiments.runs import Run
from experiments.status import Status
from experiments.tree_flags import Choice
from experiments.tree_rates import Costs, Rates
from experiments.tree_report import Plan
from experiments.workloads import Workload
from jspec import tree_shapes
from jspec.errors import InputError, require
from jspec.requests import Request
from jspec.sampling_params import SamplingParams

_RATES = absl_flags.DEFINE_list(
    "rates",
    [],
    "Chance that a node's first, second, .. child is accepted, where it is not to be measured.",
)
_SIZES = absl_flags.DEFINE_list(
    "sizes", ["7", "15"], "Drafts of the trees and chains compared where --tree gives no number."
)

TABLE = "table.txt"
_PROMPTS = "--prompt=TEXT, --input=FILE or --workloads=FILE"
_DEEPEST_SHOWN = 24  # the picture of a longer chain would be mostly empty


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is measured.

    Attributes:
        target: the model.
        model: what drafts; None looks drafts up.
        requests: the prompts, at temperature 0.
        run: of the results.
        status: where progress is shown.
    """

    target: jspec.Model
    model: jspec.Model | None
    requests: list[tuple[Workload, Request]]
    run: Run
    status: Status

    def decoder(self, drafts: int, tree: Choice | None) -> jspec.Decoder:
        """Return a decoder of one row: with a tree, with a chain, or (0 drafts) plain."""
        speculation = drafters.speculation_of(tree, rounds_per_chunk=64)
        speculation = dataclasses.replace(speculation, gamma=drafts)
        bound = drafters.of(self.target, self.model, tree) if drafts else None
        return jspec.Decoder(self.target, bound, speculation, batch_size=1)


def run() -> int:
    """Run the experiment; returns the exit status."""
    sampling = flags.sampling_params()
    rates = tuple(flags.listed(_RATES.name, _RATES.value, float))
    require(
        all(0 <= rate <= 1 for rate in rates) and sum(rates) <= 1 + 1e-6,
        "rates",
        ",".join(_RATES.value),
        "are no chances of a sum of at most 1",
        "give the chance of the first child, of the second, ..; they exclude each other",
    )
    given = bool(generate.PROMPT.value or prompts.INPUT.value)
    require(
        not given or workloads.FILE.value is None,
        "workloads",
        workloads.FILE.value,
        "cannot go with --prompt or --input",
        "give either",
    )
    if not given and workloads.FILE.value is None:
        return _show(rates)
    return _measure(Rates(rates, 0) if rates else None, sampling)


def _show(rates: tuple[float, ...]) -> int:
    """Show a tree that is known without a model."""
    for flag in (
        flags.DRAFTER,
        flags.TRAINED,
        flags.LOOKUP,
        flags.DRAFTER_WEIGHTS,
        flags.MIN_CONFIDENCE,
        flags.DRAFT_MODEL,
        flags.EXIT_LAYERS,
        flags.DRAWS,
        flags.KERNELS,
        flags.BATCH_SIZE,
        flags.MAX_NEW_TOKENS,
        flags.SEED,
        flags.TOP_K,
        flags.TOP_P,
        flags.MIN_P,
        workloads.PER_CATEGORY,
        _SIZES,
        temperatures.FLAG,
    ):
        require(
            not flag.present,
            flag.name,
            flag.value,
            "has no effect without a prompt",
            f"leave it out, or give {_PROMPTS}",
        )
    choice = tree_flags.choice("any")
    if choice is None:
        raise InputError("tree", None, "is not given", "give one, as --tree=3,2,1")
    require(
        choice.kind == "static" or (choice.kind == "optimal" and len(rates) > 0),
        "tree",
        flags.TREE.value,
        "cannot be known without a drafter and a prompt",
        f"give --drafter and {_PROMPTS}" + ("" if choice.kind == "dynamic" else ", or --rates"),
    )
    with runs.create("tree", ours(EXPERIMENT), flags.OUTPUT.value) as run:
        if rates:
            _check_rates(choice, rates)
            plan = _plan(choice, Rates(rates, 0), None)
            text, summary = tree_report.text(plan), tree_report.summary(plan)
            _picture(run, "tree", plan)
        else:
            text = tree_text.describe(choice.parents)
            summary = {"parents": choice.parents}
            _write(run, "tree", tree_plot.trees([("", choice.parents)]))
        run.write_text(TABLE, f"{text}\n")
        run.summarize(summary)
    print(f"{text}\n\nResults: {run.folder}")
    return 0


def _check_rates(choice: Choice, rates: tuple[float, ...]) -> None:
    """Raise `InputError` unless the rates fall and there is one for every child."""
    shown = ",".join(_RATES.value)
    require(
        list(rates) == sorted(rates, reverse=True),
        "rates",
        shown,
        "rise",
        "give the most probable child first",
    )
    most = max(tree_shapes.ranks(choice.parents)) + 1 if choice.parents else 0
    require(
        most <= len(rates),
        "rates",
        shown,
        f"say nothing of a node's child {len(rates) + 1}, and the tree has one",
        f"give {most} rates",
    )


def _plan(choice: Choice, rates: Rates, costs: Costs | None) -> Plan:
    depth = choice.depth if choice.kind == "optimal" else min(choice.nodes, 32)
    return tree_report.make(rates, choice.parents, choice.nodes, depth, costs)


def _picture(run: Run, stem: str, plan: Plan) -> None:
    shown: dict[tuple[int, ...], str] = {}
    for name, parents in plan.named:
        if max(tree_shapes.depths(parents)) <= _DEEPEST_SHOWN and len(parents) > 1:
            tokens = tree_shapes.expected_tokens(parents, plan.rates.values)
            shown.setdefault(tuple(parents), f"{name}: {tokens:.2f} tokens a round")
    titled = [(title, parents) for parents, title in shown.items()]
    if titled:  # no tree pays, or all are too deep for a picture
        _write(run, stem, tree_plot.trees(titled, plan.rates.values))


def _write(run: Run, stem: str, figure: Any) -> None:
    for name, content in tree_plot.files(figure, stem).items():
        run.write_bytes(name, content)


def _measure(rates: Rates | None, sampling: SamplingParams) -> int:
    """Measure rates and costs for a draft model, show a proposal, compare on workloads."""
    drafter = flags.DRAFTER.value
    require(
        drafter != "none",
        "drafter",
        drafter,
        "drafts no trees",
        "give --drafter=ngram, trained, draft-model or early-exit",
    )
    drafters.check_drafter()
    choice = tree_flags.choice()
    require(
        drafter != "trained" or choice is None or choice.kind != "optimal",
        "tree",
        flags.TREE.value,
        "cannot be found for --drafter=trained, whose passes are not measured",
        "give a shape as --tree=3,2,1, or --tree=dynamic",
    )
    drafters.require_lossless(drafters.speculation_of(choice, rounds_per_chunk=64))
    require(
        drafter == "ngram" or choice is not None,
        "tree",
        None,
        "is not given",
        "give --tree=optimal, --tree=dynamic or a shape as --tree=3,2,1",
    )
    require(
        rates is None or (choice is not None and choice.kind != "dynamic"),
        "rates",
        ",".join(_RATES.value),
        "say nothing about a tree that is found anew in every round",
        "leave them out",
    )
    require(
        rates is None or drafter != "trained",
        "rates",
        ",".join(_RATES.value),
        "have no effect with --drafter=trained",
        "leave them out",
    )
    require(
        drafter != "ngram" or choice is None or choice.kind == "dynamic",
        "tree",
        flags.TREE.value,
        "cannot be honoured by --drafter=ngram, whose trees take the shape of what it finds",
        "give --tree=dynamic, or another --drafter",
    )
    degrees = temperatures.listed()
    samplings = [dataclasses.replace(sampling, temperature=value) for value in degrees]
    compared = workloads.FILE.value is not None
    sizes = _sizes(choice)
    require(
        compared or not _SIZES.present,
        "sizes",
        ",".join(_SIZES.value),
        "has no effect without --workloads",
        "leave it out; --tree_nodes says how many drafts a tree has",
    )
    found = _found()
    status = Status()
    with runs.create("tree", ours(EXPERIMENT), flags.OUTPUT.value, seed=sampling.seed) as run:
        status.busy(f"Loading {flags.MODEL.value} ...")
        target = models.load_target()
        job = _Job(target, drafters.draft_model(target), [], run, status)
        plain = job.decoder(0, None)
        for index, (workload, source) in enumerate(found):
            ids = source.token_ids(target, prompts.RAW.value)
            request = Request(ids, flags.of_prompt(samplings[0], index))
            plain.check(request, source.field)
            job.requests.append((workload, request))
        text, summary = _all(job, choice, rates, degrees, sizes, compared)
        status.clear()
        run.write_text(TABLE, f"{text}\n")
        run.summarize(summary | {"label": "measured", "setting": _setting()})
    print(f"{text}\n\nResults: {run.folder}")
    return 0


def _sizes(choice: Choice | None) -> list[int]:
    if choice is not None:
        return [choice.nodes]
    sizes = flags.listed(_SIZES.name, _SIZES.value, float)
    require(
        len(sizes) > 0 and all(size in range(1, 128) for size in sizes),
        "sizes",
        ",".join(_SIZES.value),
        "are no numbers of drafts",
        "give counts from 1 to 127",
    )
    return [int(size) for size in sizes]


def _found() -> list[tuple[Workload, Source]]:
    path = workloads.FILE.value
    if path is None:
        sources = prompts.collect(generate.PROMPT.value, prompts.INPUT.value, prompts.RAW.value)
        return [(Workload(s.field, "prompts", s.title), s) for s in sources]
    read = workloads.read(path, workloads.PER_CATEGORY.value)
    return [(w, Source(f"workloads {w.question_id}", w.prompt)) for w in read]


def _setting() -> str:
    return (
        f"{flags.MODEL.value}, {flags.DTYPE.value}, drafter {flags.DRAFTER.value}; "
        f"{environment.cores()} cores of {environment.cpu_model()}, {environment.devices()}"
    )


def _all(
    job: _Job,
    choice: Choice | None,
    rates: Rates | None,
    degrees: Sequence[float],
    sizes: Sequence[int],
    compared: bool,
) -> tuple[str, dict[str, Any]]:
    """Do everything; returns the text and the summary."""
    parts: list[str] = []
    plans: dict[str, Any] = {}
    comparison: dict[str, Any] = {}
    costs = None
    warm: set[tuple[object, ...]] = set()
    for temperature in degrees:
        requests = temperatures.at(temperature, job.requests)
        trees = [Choice("dynamic", (), n, tree_flags.DEPTH, tree_flags.MATCHES) for n in sizes]
        if choice is not None and (choice.kind == "dynamic" or flags.DRAFTER.value == "trained"):
            trees = [choice]
        elif choice is not None and job.model is not None:
            if costs is None:
                measured = sorted({*tree_rates.SIZES, choice.nodes + 1})
                costs = tree_rates.measure_costs(job.target, job.model, measured, job.status)
            plan = _plan(choice, rates or _rates(job, choice, requests), costs)
            trees = [_static(plan.tree)] if len(plan.tree) > 1 else []
            parts.append(f"Temperature {temperature:g}\n\n{tree_report.text(plan)}")
            plans[f"{temperature:g}"] = tree_report.summary(plan)
            _picture(job.run, f"tree-{temperature:g}", plan)
        if not compared:
            parts += _proposal(job, trees[-1:], requests[0][1], f"proposal-{temperature:g}")
            continue
        decoders = {tree_compare.PLAIN: job.decoder(0, None)}
        for tree in trees:
            chain = drafters.longest_chain(tree.nodes)
            decoders[f"{tree_compare.CHAIN}{chain}"] = job.decoder(chain, None)
            decoders[f"{tree_compare.TREE}{tree.nodes}"] = job.decoder(tree.nodes, tree)
        results = tree_compare.measure(decoders, requests, job.run, job.status, warm)
        comparison[f"{temperature:g}"] = tree_compare.summarise(results)
    if comparison:
        parts.append(tree_compare.text(comparison))
        _write(job.run, "comparison", tree_plot.comparison(comparison))
    return "\n\n\n".join(parts), {"plans": plans, "comparison": comparison}


def _static(parents: tuple[int, ...]) -> Choice:
    return Choice("static", parents, len(parents) - 1, 0, 0)


def _rates(job: _Job, choice: Choice, requests: Sequence[tuple[Workload, Request]]) -> Rates:
    job.status.busy(f"Measuring acceptance on {len(requests)} prompts ...")
    places = max(tree_shapes.ranks(choice.parents)) + 1 if choice.parents else choice.width
    width = max(places, tree_flags.WIDTH)
    star = _static(tree_shapes.k_ary([width]))
    return tree_rates.measure_rates(
        job.target,
        drafters.of(job.target, job.model, star),
        star.parents,
        [request for _, request in requests],
        flags.BATCH_SIZE.value,
    )


def _proposal(job: _Job, trees: Sequence[Choice], request: Request, stem: str) -> list[str]:
    """Show what the drafter makes of the first prompt."""
    parts = []
    for tree in trees:
        job.status.busy("Drafting for the first prompt ...")
        proposed = tree_proposal.first(job.decoder(tree.nodes, tree), request)
        if proposed is None:
            parts.append("Nothing is drafted for the first prompt and its continuation.")
        else:
            parts.append(f"First prompt: {tree_proposal.text(job.target, proposed)}")
            # What a font may lack is escaped.
            labels = [
                text.encode("ascii", "backslashreplace").decode()
                for text in tree_proposal.labels(job.target, proposed)
            ]
            title = f"Drafted for the first prompt, temperature {request.sampling.temperature:g}"
            _write(job.run, stem, tree_plot.trees([(title, proposed.parents)], labels=labels))
    return parts


EXPERIMENT = Experiment(
    name="tree",
    summary="show a token tree, find the best one for a drafter, compare trees with chains",
    run=run,
    defaults={"max_new_tokens": 64},
    refused={
        "gamma": "is what --tree or --sizes say here",
        "n": "would measure every prompt several times",
        "temperature": "is one of --temperatures here",
        "profile": "would slow what is measured",
    },
    flag_modules=(
        generate.__name__,
        prompts.__name__,
        temperatures.__name__,
        workloads.__name__,
    ),
)
