"""Generate text for prompts of one's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from experiments import drafters, flags, low_acceptance, models, prompts, results, runs, tables
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.prompts import Source
from experiments.results import Measured
from experiments.runs import Run
from experiments.status import Status
from jspec import metrics
from jspec.generation import Decoder
from jspec.requests import Delta, Request

PROMPT = absl_flags.DEFINE_multi_string("prompt", [], "A prompt; give it again for more.")

COMPLETIONS = "completions.jsonl"
TABLE = "table.txt"


def run() -> int:
    """Run the experiment; returns the exit status: 1 if a request ended in an error."""
    sampling = flags.sampling_params()
    sources = prompts.collect(PROMPT.value, prompts.INPUT.value, prompts.RAW.value)
    speculation = drafters.speculation(rounds_per_chunk=2 if len(sources) == 1 else 64)
    status = Status()
    started = time.perf_counter()
    with runs.create("generate", ours(EXPERIMENT), flags.OUTPUT.value, seed=sampling.seed) as run:
        status.busy(f"Loading {flags.MODEL.value} ...")
        target = models.load_target()
        drafter = drafters.load(target)
        decoder = Decoder(target, drafter, speculation, batch_size=flags.BATCH_SIZE.value)
        requests = []
        for index, source in enumerate(sources):
            ids = source.token_ids(target, prompts.RAW.value)
            request = Request(ids, flags.of_prompt(sampling, index))
            decoder.check(request, source.field)
            requests.append(request)
        with run.profile(flags.PROFILE.value):
            measured = _decode(decoder, sources, requests, run, status)
        name = decoder.drafter.name if decoder.drafter else None
        warning = _finish(run, measured, name, decoder.batch_size, started)
    failed = [m for m in measured if m.completion.error]
    for m in failed:
        status.say(f"error: {sources[m.index].field}: {m.completion.error}")
    status.say(f"\n{(run.folder / TABLE).read_text(encoding='utf-8')}")
    if warning:
        status.say(warning)
    status.say(f"Results: {run.folder}")
    return 1 if failed else 0


def _decode(
    decoder: Decoder,
    sources: Sequence[Source],
    requests: Sequence[Request],
    run: Run,
    status: Status,
) -> list[Measured]:
    """Decode, print and record; returns the requests in order."""
    samples = sum(request.sampling.n for request in requests)
    single = samples == 1
    what = "prompt" if single else "prompts"
    status.busy(f"Reading the {what}; the first time it compiles, which takes a while ...")
    first: dict[tuple[int, int], int] = {}
    tokens = 0
    measured = []
    begun = 0.0
    for delta in decoder.stream(requests):
        if not first:
            begun = time.perf_counter()
            status.clear()
        first.setdefault((delta.index, delta.sample), len(delta.token_ids))
        tokens += len(delta.token_ids)
        if single:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        done = _record(delta, sources, requests, first, run)
        if done is not None:
            measured.append(done)
            status.clear()
            print() if single else _print_whole(f"{len(measured)}/{samples}", sources, done)
        if not single:
            elapsed = time.perf_counter() - begun
            status.progress(len(measured), samples, tokens, elapsed)
    status.clear()
    return sorted(measured, key=lambda m: (m.index, m.completion.sample))


def _record(
    delta: Delta,
    sources: Sequence[Source],
    requests: Sequence[Request],
    first: dict[tuple[int, int], int],
    run: Run,
) -> Measured | None:
    completion, index = delta.completion, delta.index
    if completion is None:
        return None
    request = requests[index]
    first_tokens = first[index, delta.sample]
    done = Measured(index, len(request.token_ids), first_tokens, completion)
    run.append(runs.METRICS, done.line(seed=request.sampling.seed))
    run.append(
        COMPLETIONS,
        {
            "index": index,
            "sample": completion.sample,
            "prompt": sources[index].prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "lossless": completion.lossless,
            **completion.known_logprobs(),
        },
    )
    return done


def _print_whole(count: str, sources: Sequence[Source], done: Measured) -> None:
    source = sources[done.index]
    print(f"--- {count}, {source.field}: {source.title}")
    print(f"{done.completion.text}\n", flush=True)


def _finish(
    run: Run, measured: Sequence[Measured], drafter: str | None, batch_size: int, started: float
) -> str | None:
    """Write table and summary; returns the warning, if any."""
    rate = results.tokens_per_second(measured, batch_size)
    counts = metrics.total([m.completion.counts for m in measured])
    warning = low_acceptance.warning(counts, drafter)
    sums = results.summary(measured)
    wall = time.perf_counter() - started
    header = ["prompts", "tokens", "tokens/s", "TPOT p50", "block efficiency", "acceptance", "wall"]
    row = [
        str(len(measured)),
        str(sums["generated_tokens"]),
        tables.rate(rate),
        tables.milliseconds(sums["tpot_p50"]),
        tables.number(sums["block_efficiency"]),
        tables.percent(sums["acceptance_rate"]),
        tables.seconds(wall),
    ]
    note = (
        "tokens/s and TPOT (time a token) leave out prefill and compilation; wall has everything."
    )
    if not sums["lossless"]:
        note = f"{results.LOSSY}\n{note}"
    run.write_text(TABLE, f"{tables.render(header, [row])}\n{note}\n")
    extra: dict[str, Any] = {"drafter": drafter, "tokens_per_second": rate, "wall": wall}
    run.summarize(sums | extra | {"warnings": [warning] if warning else []})
    return warning


EXPERIMENT = Experiment(
    name="generate",
    summary="decode prompts of your own",
    run=run,
    flag_modules=(prompts.__name__,),
)
