"""The demo: the same prompts decoded plainly and with speculation, through the same loop."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence

import jspec
from experiments import (
    demo_report,
    differences,
    drafters,
    environment,
    flags,
    models,
    runs,
    tables,
)
from experiments.demo_prompts import PROMPTS
from experiments.demo_report import Pair
from experiments.experiment import Experiment
from experiments.help import ours
from experiments.prompts import Source
from experiments.results import Measured
from experiments.runs import Run
from experiments.status import Status
from jspec.config import SpeculationConfig
from jspec.errors import require
from jspec.generation import Decoder
from jspec.requests import Delta, Request
from jspec.tokenizers import Tokenizer

TABLE = "table.txt"
# Every prompt is longer than half of it, so that one prefill program serves them all.
_PREFILL_WIDTH = 64
_GREEN, _RESET = "\x1b[32m", "\x1b[0m"
_ONE_AT_A_TIME = "cannot be honoured: the demo decodes one prompt at a time"
_GREEDY = "cannot be honoured: the demo compares token for token, so it decodes greedily"


def run() -> int:
    """Run the experiment; returns the exit status: 1 if a request ended in an error."""
    sampling = flags.sampling_params()
    # One round a chunk shows which tokens were drafts: all but the last of each round.
    speculation = drafters.speculation(rounds_per_chunk=1)
    drafters.require_lossless(speculation)
    empty = flags.DRAFTER if flags.DRAFTER.value == "none" else flags.GAMMA
    require(
        speculation.gamma > 0,
        empty.name,
        empty.value,
        "leaves the demo nothing to compare",
        "choose a drafter and a gamma of at least 1",
    )
    status = Status()
    with runs.create("demo", ours(EXPERIMENT), flags.OUTPUT.value) as run:
        status.busy(f"Loading {flags.MODEL.value} ...")
        started = time.perf_counter()
        target = models.load_target()
        drafter = drafters.load(target)
        plain = _decoder(target, None, dataclasses.replace(speculation, gamma=0))
        speculative = _decoder(target, drafter, speculation)
        requests = [
            Request(Source(name, text).token_ids(target, raw=False), sampling)
            for name, text in PROMPTS
        ]
        for decoder in (plain, speculative):
            for (name, _), request in zip(PROMPTS, requests, strict=True):
                decoder.check(request, name)
        status.clear()
        _introduce(speculative, time.perf_counter() - started)
        _warm_up((plain, speculative), requests, status)
        pairs = _compare(plain, speculative, requests, run, status)
        text, sums = demo_report.make(pairs, speculative)
        run.write_text(TABLE, f"{text}\n")
        run.summarize(sums)
    print(f"\n{text}\n\nResults: {run.folder}")
    return 1 if any(m.completion.error for pair in pairs for m in pair.both) else 0


def _decoder(
    target: jspec.Model, drafter: jspec.BoundDrafter | None, speculation: SpeculationConfig
) -> Decoder:
    return Decoder(target, drafter, speculation, batch_size=1, prefill_width=_PREFILL_WIDTH)


def _introduce(decoder: Decoder, loading: float) -> None:
    machine = f"{environment.cpu_model()}, {environment.cores()} cores"
    drafter = decoder.drafter.name if decoder.drafter else "none"
    print(
        f"Target: {decoder.target.name} in {flags.DTYPE.value}, loaded in "
        f"{tables.seconds(loading)}. Drafter: {drafter}, {decoder.speculation.gamma} drafts a "
        f"round.\nMachine: {environment.devices()} ({machine}).\n"
        f"{len(PROMPTS)} prompts, at most {flags.MAX_NEW_TOKENS.value} tokens each, decoded "
        "greedily: once plain, once with speculation.",
        flush=True,
    )


def _warm_up(decoders: Sequence[Decoder], requests: Sequence[Request], status: Status) -> None:
    """Compile every program that will be timed, and run it once."""
    status.busy("Compiling and warming up; the first time this takes about a minute ...")
    started = time.perf_counter()
    for decoder in decoders:
        for request in requests:
            deltas = decoder.stream([request])
            next(deltas)  # the prefill and a chunk of one round
            del deltas
    status.clear()
    taken = tables.seconds(time.perf_counter() - started)
    print(f"Compiled and warmed up in {taken}, which no figure below includes.", flush=True)


def _compare(
    plain: Decoder,
    speculative: Decoder,
    requests: Sequence[Request],
    run: Run,
    status: Status,
) -> list[Pair]:
    """Decode prompt by prompt, so that the machine's moods hit both; who begins takes turns."""
    show = _Show(speculative.target.tokenizer)
    if show.marks:
        print(f"{_GREEN}Green{_RESET}: accepted drafts, tokens that took no step of their own.")
    pairs = []
    for index, ((name, text), request) in enumerate(zip(PROMPTS, requests, strict=True)):
        quoted = textwrap.indent(text, "  > ", predicate=lambda line: True)
        print(f"\n[{index + 1}/{len(PROMPTS)}] {name}\n{quoted}\n", flush=True)
        measured: dict[str, Measured] = {}
        for mode in ("plain", "speculative") if index % 2 == 0 else ("speculative", "plain"):
            if mode == "plain":
                status.busy("decoding plainly ...", terminal_only=True)
                measured[mode] = _measure(index, request, plain.stream([request]))
                status.clear()
            else:
                deltas = show.stream(speculative.stream([request]))
                measured[mode] = _measure(index, request, deltas)
                print("\n")
            run.append(runs.METRICS, measured[mode].line(prompt=name, mode=mode))
        outputs = [measured[mode].completion.token_ids for mode in ("speculative", "plain")]
        parting = differences.between(plain, request, *outputs)
        pairs.append(Pair(name, measured["plain"], measured["speculative"], parting))
        print(demo_report.line(pairs[-1]), flush=True)
    return pairs


def _measure(index: int, request: Request, deltas: Iterator[Delta]) -> Measured:
    first = 0
    for delta in deltas:
        first = first or len(delta.token_ids)
        if delta.completion is not None:
            return Measured(index, len(request.token_ids), first, delta.completion)
    raise AssertionError("a stream ends with its completion")


class _Show:
    """Prints text as it comes, with accepted drafts marked on a terminal."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self.marks = sys.stdout.isatty() and not plain
        self._tokenizer = tokenizer

    def stream(self, deltas: Iterator[Delta]) -> Iterator[Delta]:
        """Pass on one request's deltas of one round each, printing them."""
        text = self._tokenizer.stream() if self._tokenizer is not None else None
        for delta in deltas:
            if self.marks and text is not None:
                drafts, own = delta.token_ids[:-1], delta.token_ids[-1:]
                marked = text.push(drafts)
                rest = text.push(own) + (text.finish() if delta.completion else "")
                sys.stdout.write(f"{_GREEN}{marked}{_RESET}{rest}" if marked else rest)
            else:
                sys.stdout.write(delta.text)
            if delta.completion is not None and delta.completion.finish_reason == "length":
                sys.stdout.write(f" …[cut at {len(delta.completion.token_ids)} tokens]")
            sys.stdout.flush()
            yield delta


EXPERIMENT = Experiment(
    name="demo",
    summary="decode a few prompts, plain and with speculation, and compare (3 minutes)",
    run=run,
    defaults={"max_new_tokens": 80},
    refused={
        "batch_size": _ONE_AT_A_TIME,
        "rounds_per_chunk": "cannot be honoured: the demo shows every round",
        "profile": "cannot be honoured: a trace would slow what is timed, so profile generate",
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed"), _GREEDY),
    },
)
