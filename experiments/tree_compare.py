"""Trees against chains of as many drafts and plain decoding, prompt by prompt, in one run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jspec
from experiments import runs, tables, timing
from experiments.runs import Run
from experiments.status import Status
from experiments.workloads import Workload
from jspec import admission, metrics
from jspec.requests import Completion, Request

PLAIN = "plain"
CHAIN, TREE = "chain ", "tree "  # and then the number of drafts


@dataclasses.dataclass(frozen=True)
class Result:
    """One prompt decoded by every method.

    Attributes:
        workload: the prompt.
        done: by method, plain decoding first.
    """

    workload: Workload
    done: dict[str, Completion]


def measure(
    decoders: Mapping[str, jspec.Decoder],
    requests: Sequence[tuple[Workload, Request]],
    run: Run,
    status: Status,
    warm: set[tuple[object, ...]],
    file: str = runs.METRICS,
) -> list[Result]:
    """Decode every prompt by every method; who begins takes turns.

    Args:
        decoders: by method, `PLAIN` first.
        requests: of one temperature.
        run: gets a line of `file` for each prompt and method.
        status: where progress is shown.
        warm: what has been compiled; grows.
        file: of JSON lines.
    """
    results = []
    names = list(decoders)
    for index, (workload, request) in enumerate(requests):
        temperature = request.sampling.temperature
        status.busy(
            f"Temperature {temperature:g}, prompt {index + 1} of {len(requests)} "
            f"({workload.category}) ..."
        )
        # Requests of the same shapes run the same programs.
        length = admission.power_of_two(len(request.token_ids))
        for name, decoder in decoders.items():
            shapes = (name, length, decoder.capacity([request]))
            if shapes not in warm:
                timing.warm_up([decoder], request)
                warm.add(shapes)
        turn = index % len(names)
        done = {name: decoders[name].generate([request])[0] for name in names[turn:] + names[:turn]}
        results.append(Result(workload, {name: done[name] for name in names}))
        for name in names:
            run.append(file, _line(results[-1], name, temperature))
    return results


def seconds(done: Completion) -> float:
    """Return how long decoding took, without the prefill."""
    return done.timing.end - done.timing.prefill


def _line(result: Result, method: str, temperature: float) -> dict[str, Any]:
    done = result.done[method]
    return {
        "question_id": result.workload.question_id,
        "category": result.workload.category,
        "temperature": temperature,
        "method": method,
        "tokens": len(done.token_ids),
        "decode": seconds(done),
        "total": done.timing.end,
        "identical": done.token_ids == result.done[PLAIN].token_ids,
        **metrics.summary(done.counts),
    }


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """Return figures of each method by category and over all: totals and ratios of totals."""
    categories = list(dict.fromkeys(result.workload.category for result in results))
    return {
        "categories": {
            name: _group([r for r in results if r.workload.category == name]) for name in categories
        },
        "total": _group(results),
    }


def _group(results: Sequence[Result]) -> dict[str, Any]:
    group: dict[str, Any] = {}
    for method in results[0].done:
        done = [result.done[method] for result in results]
        tokens = sum(len(one.token_ids) for one in done)
        rate = tokens / math.fsum(map(seconds, done))
        plain = group[PLAIN]["tokens_per_second"] if group else rate
        counts = metrics.total([one.counts for one in done])
        group[method] = {
            "prompts": len(results),
            "tokens": tokens,
            "tokens_per_second": rate,
            "speedup": rate / plain,
            "block_efficiency": metrics.block_efficiency(counts),
            "identical": sum(r.done[method].token_ids == r.done[PLAIN].token_ids for r in results),
            "rounds": counts.rounds,
            "rounds_without_draft": counts.rounds_without_draft,
        }
    return group


def _disturbed(summary: dict[str, Any]) -> bool:
    """Return whether a method got faster by more than the tokens that its rounds commit."""
    return any(
        group["speedup"] > 1.1 * group["block_efficiency"]
        for section in summary.values()
        for methods in (*section["categories"].values(), section["total"])
        for group in methods.values()
    )


def text(summary: dict[str, Any]) -> str:
    """Return tables, one a temperature.

    Args:
        summary: by temperature, what `summarise` returns.
    """
    parts = []
    for temperature, section in summary.items():
        groups = {**section["categories"], "all": section["total"]}
        header, columns = ["category"], [list(groups)]
        # Of one size, unless a chain of the drafter's cannot be as long.
        chains, grown = (
            [name for name in groups["all"] if name.startswith(kind)] for kind in (CHAIN, TREE)
        )
        pairs = list(zip(chains, grown, strict=True))
        for chain, tree in pairs:
            given = [
                [group[name]["block_efficiency"] for name in (chain, tree)]
                for group in groups.values()
            ]
            header += [f"tokens/round\n{chain}", f"\n{tree}", "tree over\nchain"]
            columns += [
                [tables.number(value) for value in column] for column in zip(*given, strict=True)
            ]
            columns.append([tables.ratio(of_tree / of_chain) for of_chain, of_tree in given])
        for name in itertools.chain(*pairs):
            header.append(f"speed\n{name}")
            columns.append([tables.ratio(group[name]["speedup"]) for group in groups.values()])
        rows = [list(row) for row in zip(*columns, strict=True)]
        parts.append(
            f"Temperature {temperature}: trees against chains of as many drafts\n\n"
            f"{tables.render(header, rows, total=True)}"
        )
        if float(temperature) == 0:
            total = section["total"]
            same = ", ".join(
                f"{name} {group['identical']}/{group['prompts']}"
                for name, group in total.items()
                if name != PLAIN
            )
            parts.append(f"Greedy output the same as plain decoding's: {same} prompts.")
    if _disturbed(summary):
        parts.append(
            "Some speeds are above the tokens a round, which a quiet machine does not give: this "
            "one was probably\nbusy. Run it again when it is quiet; tokens a round stand as they "
            "are."
        )
    parts.append(
        "Tokens a round: committed on average, the correction or bonus token included, rounds "
        "without a draft too.\nSpeed: tokens a second over plain decoding's, batch 1, prefill and "
        "compilation left out; one run, methods in turn."
    )
    return "\n\n".join(parts)
