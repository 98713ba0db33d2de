"""Plain against speculative decoding by category and batch, step times and peers, as ratios."""

from __future__ import annotations

import dataclasses
import datetime
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags as absl_flags

import jspec
from experiments import (
    bench_page,
    bench_plot,
    bench_report,
    differences,
    drafters,
    environment,
    flags,
    models,
    runs,
    throughput,
    timing,
    workloads,
)
from experiments.constant_drafter import ConstantDrafter
from experiments.differences import Difference
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.peers import PeerRun, TransformersPeer
from experiments.status import Status
from jspec.drafting.draft_model import DraftModelDrafter
from jspec.drafting.draft_tree import DraftTreeDrafter
from jspec.drafting.dynamic_tree import DynamicTreeDrafter
from jspec.errors import InputError, require
from jspec.requests import Completion, Request

_PEERS = absl_flags.DEFINE_boolean(
    "peers", False, "Decode the same prompts with transformers too; needs the extra `peers`."
)
_REPEATS = absl_flags.DEFINE_integer("repeats", 15, "Interleaved turns of the step timings.")
_ROWS = absl_flags.DEFINE_list(
    "rows", ["1", "2", "4", "8", "16"], "Tokens a row and forward pass in the step timings."
)
_BATCHES = absl_flags.DEFINE_list("batches", ["1"], "Rows decoded together in the step timings.")

_THROUGHPUT_BATCHES = absl_flags.DEFINE_list(
    "throughput_batches", ["1", "2", "4", "8"], "Throughput: rows decoded together."
)
_THROUGHPUT_TOKENS = absl_flags.DEFINE_integer(
    "throughput_tokens", 24, "Throughput: tokens of every row, past the end of its text if need be."
)
_THROUGHPUT_PROMPTS = absl_flags.DEFINE_integer(
    "throughput_prompts",
    8,
    "Throughput: prompts, of the categories in turn; every batch decodes all.",
)
_THROUGHPUT_PROMPT_TOKENS = absl_flags.DEFINE_integer(
    "throughput_prompt_tokens",
    96,
    "Throughput: tokens of the longest prompt taken; a batch is prefilled to its longest one.",
)
_THROUGHPUT_REPEATS = absl_flags.DEFINE_integer(
    "throughput_repeats", 3, "Throughput: interleaved turns; medians are over them."
)

TABLE = "table.txt"
_CONTEXT = 200  # committed tokens of each row in the step timings
_CAPACITY = 384
_STEPS = 8


@dataclasses.dataclass(frozen=True)
class PromptResult:
    """One prompt decoded every way.

    Attributes:
        workload: the prompt.
        plain: with gamma = 0.
        speculative: with the drafter.
        predicted: seconds that the speculative run's rounds should take by the step times measured
            around it.
        plain_step: seconds of a one-token forward pass, measured around the runs.
        peer_plain: transformers' greedy run, if asked for.
        peer_lookup: transformers' prompt lookup, if asked for.
        difference: where plain and speculative output part, None if they are identical.
    """

    workload: workloads.Workload
    plain: Completion
    speculative: Completion
    predicted: float
    plain_step: float
    peer_plain: PeerRun | None
    peer_lookup: PeerRun | None
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Plain and speculative tokens are the same."""
        return self.difference is None


def _run() -> int:
    path = workloads.FILE.value
    if path is None:
        raise InputError("workloads", path, "is not given", "give a JSON-lines file of prompts")
    rows, batches = _counts("rows", _ROWS.value), _counts("batches", _BATCHES.value)
    together = sorted(set(_counts("throughput_batches", _THROUGHPUT_BATCHES.value)))
    for flag in (
        _REPEATS,
        _THROUGHPUT_TOKENS,
        _THROUGHPUT_PROMPTS,
        _THROUGHPUT_PROMPT_TOKENS,
        _THROUGHPUT_REPEATS,
    ):
        require(flag.value >= 1, flag.name, flag.value, "is below 1", "give a count >= 1")
    prompts = workloads.read(path, workloads.PER_CATEGORY.value)
    sampling = flags.sampling_params()
    speculation = drafters.speculation(rounds_per_chunk=64)
    drafters.require_lossless(speculation)
    require(
        speculation.gamma > 0,
        "drafter",
        flags.DRAFTER.value,
        "leaves nothing to compare plain decoding with",
        "choose a drafter and gamma >= 1",
    )
    status = Status()
    with runs.create("bench", ours(EXPERIMENT), flags.OUTPUT.value) as run:
        status.busy(f"Loading {flags.MODEL.value} ...")
        target = models.load_target()
        drafter = drafters.load(target)
        assert drafter is not None  # gamma > 0
        peer = TransformersPeer(target, os.cpu_count() or 1) if _PEERS.value else None
        plain = jspec.Decoder(target, None, dataclasses.replace(speculation, gamma=0), batch_size=1)
        speculative = jspec.Decoder(target, drafter, speculation, batch_size=1)

        steps = measure_steps(target, rows, batches, speculation, _REPEATS.value, status)
        results = []
        for index, workload in enumerate(prompts):
            status.busy(f"Prompt {index + 1} of {len(prompts)} ({workload.category}) ...")
            ids = jspec.to_token_ids(target, _turns(workload.prompt))
            request = Request(ids, flags.of_prompt(sampling, index))
            result = decode_every_way(workload, request, plain, speculative, peer)
            results.append(result)
            run.append(runs.METRICS, bench_report.line(result))
        by_batch = measure_throughput(
            target, drafter, speculation, workloads.read(path, 0), sampling, together, run, status
        )
        status.busy("Writing the report ...")
        peer_versions = peer.versions if peer else None
        summary = bench_report.summarise(
            results, steps, by_batch, _setting(speculative), peer_versions
        )
        text = bench_report.text(summary)
        run.write_text(TABLE, f"{text}\n")
        run.write_bytes("bench.png", bench_plot.sheet(summary))
        run.write_text("report.html", bench_page.page(summary, bench_plot.pictures(summary)))
        run.summarize(summary)
        status.clear()
        print(f"{text}\n\nResults: {run.folder}")
    return 0


def _setting(decoder: jspec.Decoder) -> str:
    """Return what was measured where and when, in a sentence."""
    name = decoder.drafter.name if decoder.drafter else "none"
    return (
        f"{flags.MODEL.value}, {flags.DTYPE.value}, drafter {name}, gamma "
        f"{decoder.speculation.gamma}, at most {flags.MAX_NEW_TOKENS.value} tokens a prompt; "
        f"{environment.cores()} cores of {environment.cpu_model()}, {environment.devices()}, "
        f"jax {jax.__version__}; {datetime.date.today().isoformat()}."
    )


def _counts(name: str, items: Sequence[str]) -> list[int]:
    values = flags.listed(name, items, int)
    require(
        bool(values) and min(values) >= 1, name, ",".join(items), "is below 1", "give counts >= 1"
    )
    return values


def measure_steps(
    target: jspec.Model,
    rows: Sequence[int],
    batches: Sequence[int],
    speculation: jspec.SpeculationConfig,
    repeats: int,
    status: Status,
) -> dict[str, Any]:
    """Measure T(B, rows), bandwidth, and a round's share that is not the forward pass.

    The share is that of rounds whose drafter costs nothing and whose every row drafts.

    Args:
        target: the model.
        rows: tokens a row and forward pass.
        batches: rows decoded together.
        speculation: its gamma is the width of the speculative round.
        repeats: interleaved turns.
        status: where progress is shown.
    """
    gamma = speculation.gamma
    timers: dict[str, Callable[[], float]] = {"read": timing.read_timer(target.params)}
    for batch in dict.fromkeys([*batches, 1]):  # the report's own figures are for one row
        for nodes in sorted({*rows, 1, gamma + 1}):
            timers[f"step {batch} {nodes}"] = timing.step_timer(
                target, batch, nodes, _CAPACITY, _CONTEXT, _STEPS
            )
    request = Request(
        tuple(range(_CONTEXT)),
        jspec.SamplingParams(max_new_tokens=_CAPACITY - _CONTEXT, ignore_eos=True),
    )
    plain = jspec.Decoder(target, None, dataclasses.replace(speculation, gamma=0))
    constant = jspec.BoundDrafter("constant", ConstantDrafter())
    wide = jspec.Decoder(target, constant, speculation)
    timers["round plain"] = timing.round_timer(plain, request, 1, _STEPS)
    timers["round wide"] = timing.round_timer(wide, request, 1, _STEPS)
    status.busy(f"Timing {len(timers)} programs, {repeats} turns ...")
    samples = timing.interleave(timers, repeats)
    first = batches[0]
    weight_bytes = timing.weight_bytes(target.params)
    return {
        "gamma": gamma,
        "capacity": _CAPACITY,
        "context": _CONTEXT,
        "weight_bytes": weight_bytes,
        "read_bandwidth": weight_bytes / statistics.median(samples["read"]),
        "bandwidth_share": timing.ratio(samples, "read", f"step {first} 1"),
        "step_seconds": {
            name.removeprefix("step "): statistics.median(values)
            for name, values in samples.items()
            if name.startswith("step ")
        },
        "step_ratios": {
            name.removeprefix("step "): timing.ratio(samples, name, f"step {name.split()[1]} 1")
            for name in samples
            if name.startswith("step ")
        },
        "overhead_plain": 1 - timing.ratio(samples, "step 1 1", "round plain"),
        "overhead_wide": 1 - timing.ratio(samples, f"step 1 {gamma + 1}", "round wide"),
    }


def measure_throughput(
    target: jspec.Model,
    drafter: jspec.BoundDrafter,
    speculation: jspec.SpeculationConfig,
    found: Sequence[workloads.Workload],
    sampling: jspec.SamplingParams,
    batches: Sequence[int],
    run: runs.Run,
    status: Status,
) -> dict[str, Any]:
    """Measure tokens a second by batch, as the flags say; what was measured goes into the run.

    Args:
        target: the model.
        drafter: proposes tokens.
        speculation: of the speculative decoding.
        found: prompts to choose from.
        sampling: parameters, but for the budget and the stops.
        batches: rows decoded together.
        run: gets throughput.jsonl.
        status: where progress is shown.
    """
    tokens = _THROUGHPUT_TOKENS.value
    chosen = throughput.choose(
        lambda prompt: jspec.to_token_ids(target, _turns(prompt)),
        found,
        _THROUGHPUT_PROMPTS.value,
        _THROUGHPUT_PROMPT_TOKENS.value,
    )
    sampling = dataclasses.replace(
        sampling,
        n=1,
        max_new_tokens=tokens,
        min_new_tokens=0,
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
    )
    requests = [
        Request(ids, flags.of_prompt(sampling, index)) for index, (_, ids) in enumerate(chosen)
    ]

    def decoders(batch: int) -> tuple[jspec.Decoder, jspec.Decoder]:
        plain = dataclasses.replace(speculation, gamma=0)
        return (
            jspec.Decoder(target, None, plain, batch_size=batch),
            jspec.Decoder(target, drafter, speculation, batch_size=batch),
        )

    turns = throughput.measure(decoders, requests, batches, _THROUGHPUT_REPEATS.value, status)
    for line in throughput.lines(turns):
        run.append("throughput.jsonl", line)
    return throughput.summarise(turns, chosen, tokens)


def _turns(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def decode_every_way(
    workload: workloads.Workload,
    request: Request,
    plain: jspec.Decoder,
    speculative: jspec.Decoder,
    peer: TransformersPeer | None,
) -> PromptResult:
    """Decode one prompt plainly, speculatively and by the peer, with step times around it."""
    target = plain.target
    capacity, context = plain.capacity([request]), len(request.token_ids)
    gamma = speculative.speculation.gamma
    timers = {
        nodes: timing.step_timer(target, 1, nodes, capacity, context, _STEPS)
        for nodes in (1, gamma + 1)
    }
    drafting = _drafting_timers(speculative, capacity, context)
    for warm in (*timers.values(), *(timer for timer, _ in drafting)):
        warm()
    timing.warm_up((plain, speculative), request)

    before = {nodes: timer() for nodes, timer in timers.items()}
    plain_run = plain.generate([request])[0]
    speculative_run = speculative.generate([request])[0]
    budget = request.sampling.max_new_tokens
    peer_plain = peer.generate(request.token_ids, budget) if peer else None
    peer_lookup = peer.generate(request.token_ids, budget, gamma) if peer else None
    after = {nodes: timer() for nodes, timer in timers.items()}
    step = {nodes: (before[nodes] + after[nodes]) / 2 for nodes in timers}
    draft = sum(timer() * times for timer, times in drafting)

    counts = speculative_run.counts
    drafted = counts.rounds - counts.rounds_without_draft
    predicted = counts.rounds_without_draft * step[1] + drafted * step[gamma + 1]
    predicted += counts.rounds * draft
    parting = differences.between(plain, request, speculative_run.token_ids, plain_run.token_ids)
    return PromptResult(
        workload, plain_run, speculative_run, predicted, step[1], peer_plain, peer_lookup, parting
    )


def _drafting_timers(
    decoder: jspec.Decoder, capacity: int, context: int
) -> list[tuple[Callable[[], float], int]]:
    """Return timers of the drafter's forward passes, with how often each runs in a round."""
    drafter = decoder.drafter
    if drafter is None:
        return []
    inner = drafter.drafter
    gamma = decoder.speculation.gamma
    if isinstance(inner, DraftModelDrafter):
        params, passes = drafter.params.model, {2: 1, 1: gamma - 1}
    elif isinstance(inner, DraftTreeDrafter):
        topology = drafter.params.topology
        params, passes = drafter.params.model, {gamma + 1: int(topology.depths.max())}
    elif isinstance(inner, DynamicTreeDrafter):
        params, passes = drafter.params.model, {1: 1, inner.width: inner.depth - 1}
    else:
        return []  # a lookup costs next to nothing
    model = jspec.Model(drafter.name, inner.model.config, params, None, ())
    return [
        (timing.step_timer(model, 1, nodes, capacity, context, _STEPS), times)
        for nodes, times in passes.items()
    ]


EXPERIMENT = Experiment(
    name="bench",
    summary="plain against speculative decoding by category and batch, and peers, in one run",
    run=_run,
    defaults={"max_new_tokens": 64},
    refused={
        "batch_size": "is 1 here: prompts are decoded one by one",
        "profile": "would slow what is measured",
    },
    flag_modules=(workloads.__name__,),
)
