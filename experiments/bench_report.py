"""The bench's figures as JSON and as sections of text and tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments import latency, report, tables, throughput
from experiments.report import Section
from experiments.results import TERMS
from jspec import metrics

if TYPE_CHECKING:
    from experiments.bench import PromptResult


def _decode_seconds(result: PromptResult, plain: bool) -> float:
    done = result.plain if plain else result.speculative
    return done.timing.end - done.timing.prefill


def line(result: PromptResult) -> dict[str, Any]:
    """Return one prompt's line of metrics.jsonl; times in seconds."""
    return {
        "question_id": result.workload.question_id,
        "category": result.workload.category,
        "tokens": len(result.speculative.token_ids),
        "identical": result.identical,
        "difference": result.difference and dataclasses.asdict(result.difference),
        "plain_decode": _decode_seconds(result, plain=True),
        "plain_total": result.plain.timing.end,
        "plain_ttft": result.plain.timing.first,
        "plain_tpot": metrics.tpot(result.plain.timing, len(result.plain.token_ids)),
        "speculative_decode": _decode_seconds(result, plain=False),
        "speculative_total": result.speculative.timing.end,
        "speculative_ttft": result.speculative.timing.first,
        "speculative_tpot": metrics.tpot(
            result.speculative.timing, len(result.speculative.token_ids)
        ),
        "speculative_decode_predicted": result.predicted,
        "plain_step": result.plain_step,
        "peer_plain_total": result.peer_plain.seconds if result.peer_plain else None,
        "peer_plain_prefill": result.peer_plain.prefill if result.peer_plain else None,
        "peer_lookup_total": result.peer_lookup.seconds if result.peer_lookup else None,
        "peer_lookup_prefill": result.peer_lookup.prefill if result.peer_lookup else None,
        "peer_identical": (
            result.peer_plain.token_ids == result.plain.token_ids if result.peer_plain else None
        ),
        **metrics.summary(result.speculative.counts),
    }


def _group(results: Sequence[PromptResult]) -> dict[str, Any]:
    """Return totals and ratios of totals over some prompts; times in seconds."""

    def total(value: Callable[[PromptResult], float]) -> float:
        return math.fsum(value(result) for result in results)

    plain = total(lambda r: _decode_seconds(r, plain=True))
    speculative = total(lambda r: _decode_seconds(r, plain=False))
    predicted = total(lambda r: r.predicted)
    tokens = sum(len(r.speculative.token_ids) for r in results)
    counts = metrics.total([r.speculative.counts for r in results])
    group = {
        "prompts": len(results),
        "tokens": tokens,
        "identical": sum(r.identical for r in results),
        "widest_gap": max((r.difference.gap for r in results if r.difference), default=None),
        "plain_tokens_per_second": sum(len(r.plain.token_ids) for r in results) / plain,
        "speculative_tokens_per_second": tokens / speculative,
        "speedup": plain / speculative,
        "speedup_predicted": total(lambda r: r.plain_step * len(r.plain.token_ids)) / predicted,
        "predicted_over_measured_walltime": predicted / speculative,
        **metrics.summary(counts),
    }
    peers = [(r, r.peer_plain, r.peer_lookup) for r in results]
    known = [(r, p, q) for r, p, q in peers if p is not None and q is not None]
    if known:
        own = {
            "plain": [r.plain.timing for r, _, _ in known],
            "lookup": [r.speculative.timing for r, _, _ in known],
        }
        theirs = {"plain": [p for _, p, _ in known], "lookup": [q for _, _, q in known]}
        for kind, peer_runs in theirs.items():
            whole = math.fsum(run.seconds for run in peer_runs)
            decode = math.fsum(run.seconds - run.prefill for run in peer_runs)
            own_whole = math.fsum(timing.end for timing in own[kind])
            own_decode = math.fsum(timing.end - timing.prefill for timing in own[kind])
            tokens = sum(len(run.token_ids) for run in peer_runs)
            group |= {
                f"peer_{kind}_tokens_per_second": tokens / decode,
                f"{kind}_over_peer": decode / own_decode,
                f"{kind}_over_peer_with_prefill": whole / own_whole,
            }
    return group


def summarise(
    results: Sequence[PromptResult],
    steps: dict[str, Any],
    by_batch: dict[str, Any],
    setting: str,
    peer: str | None,
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        results: of the prompts.
        steps: the step timings.
        by_batch: what `throughput.summarise` returns.
        setting: what was measured where and when.
        peer: its versions, None without.
    """
    categories = list(dict.fromkeys(r.workload.category for r in results))
    return {
        "label": "measured; entries named predicted are computed from measured step times",
        "setting": setting,
        "steps": steps,
        "peer": peer,
        "categories": {
            name: _group([r for r in results if r.workload.category == name]) for name in categories
        },
        "total": _group(results),
        "latency": {
            "plain": latency.summarise([r.plain for r in results]),
            "speculative": latency.summarise([r.speculative for r in results]),
        },
        "throughput": by_batch,
    }


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("plain\ntokens/s", "plain_tokens_per_second", tables.rate),
    ("speculative\ntokens/s", "speculative_tokens_per_second", tables.rate),
    ("speedup", "speedup", tables.ratio),
    ("speedup\npredicted", "speedup_predicted", tables.ratio),
    ("block\nefficiency", "block_efficiency", tables.number),
    ("acceptance", "acceptance_rate", tables.percent),
)
_PEER_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("plain over\ntransformers", "plain_over_peer", tables.ratio),
    ("with\nprefill", "plain_over_peer_with_prefill", tables.ratio),
    ("lookup over\ntransformers'", "lookup_over_peer", tables.ratio),
    ("with\nprefill", "lookup_over_peer_with_prefill", tables.ratio),
)


_BATCH_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("plain\ntokens/s", "plain_tokens_per_second", tables.rate),
    ("speculative\ntokens/s", "speculative_tokens_per_second", tables.rate),
    ("\nspeedup", "speedup", tables.ratio),
    ("lowest to\nhighest", "speedup_range", lambda ends: " - ".join(map(tables.number, ends))),
    ("with prefill:\nplain", "plain_tokens_per_second_with_prefill", tables.rate),
    ("\nspec.", "speculative_tokens_per_second_with_prefill", tables.rate),
    ("\nspeedup", "speedup_with_prefill", tables.ratio),
    ("block\nefficiency", "block_efficiency", tables.number),
    ("acceptance", "acceptance_rate", tables.percent),
)


def headline(summary: dict[str, Any]) -> list[str]:
    """Return the result in a few sentences."""
    total = summary["total"]
    return [
        f"One prompt at a time, speculation decodes {tables.ratio(total['speedup'])} as fast as "
        f"plain decoding over all {total['prompts']} prompts; {total['identical']} of "
        f"{total['prompts']} outputs are identical{_parting(total['widest_gap'])}.",
        throughput.verdict(summary["throughput"]),
    ]


def _parting(gap: float | None) -> str:
    if gap is None:
        return ""
    return f"; the others part where the target's two best logits are at most {gap:.2g} apart"


def sections(summary: dict[str, Any]) -> list[Section]:
    """Return everything in tables."""
    return [_categories(summary), _latency(summary), *_batches(summary), _steps(summary)]


def _categories(summary: dict[str, Any]) -> Section:
    columns = _COLUMNS + (_PEER_COLUMNS if summary["peer"] else ())
    groups = [*summary["categories"].items(), ("all", summary["total"])]
    rows = [
        [
            name,
            *(show(group.get(key)) for _, key, show in columns),
            f"{group['identical']}/{group['prompts']}",
        ]
        for name, group in groups
    ]
    notes = [
        "Ratios of totals, decoding alone: prefill and compilation are left out.",
        TERMS.replace("\n", " "),
        "Predicted: from measured rounds and the step times around each prompt. They predict "
        f"{summary['total']['predicted_over_measured_walltime']:.2f} of the speculative walltime "
        "that was measured; the predicted speedup also predicts the plain run, from the one-token "
        "step.",
    ]
    if summary["peer"]:
        notes.append(
            f"Peer: {summary['peer']}, same weights, prompts and process; "
            "its prefill is a call for one token."
        )
    header = ["category", *(title for title, _, _ in columns), "same\noutput"]
    return Section("Batch 1, by category", header, rows, tuple(notes), total=True)


def _latency(summary: dict[str, Any]) -> Section:
    header, rows = latency.cells([("1", summary["latency"])], "batch")
    return Section("Latency at batch 1, the same prompts", header, rows, (latency.NOTE,))


def _batches(summary: dict[str, Any]) -> list[Section]:
    found = summary["throughput"]
    rows = [
        [
            batch,
            *(show(figures[key]) for _, key, show in _BATCH_COLUMNS),
            f"{figures['identical']}/{figures['rows']}",
        ]
        for batch, figures in found["batches"].items()
    ]
    header = ["batch", *(title for title, _, _ in _BATCH_COLUMNS), "same\noutput"]
    categories = ", ".join(found["categories"])
    notes = (
        throughput.verdict(found),
        f"Every batch decodes the same {len(found['prompts'])} prompts ({categories}; at most "
        f"{max(found['prompt_tokens'])} tokens long); where they do not fill it, the first come "
        f"again. Medians over {found['repeats']} interleaved turns.",
        f"Every row generates {found['tokens_a_row']} tokens, past the end of its text where that "
        "comes sooner: rows run equally long, and text that repeats itself there favours prompt "
        "lookup.",
        "Compilation is left out, and so is prefill but in the three columns that say so. A batch "
        "lasts until its slowest row has finished.",
    )
    groups = [(batch, figures["latency"]) for batch, figures in found["batches"].items()]
    return [
        Section("Throughput against batch", header, rows, notes),
        Section(
            "Latency against batch, the same runs",
            *latency.cells(groups, "batch"),
            (
                "Samples are rows, of all turns. A batch is prefilled as a whole, so a short "
                "prompt waits for a long one.",
            ),
        ),
    ]


def _steps(summary: dict[str, Any]) -> Section:
    steps = summary["steps"]
    gamma = steps["gamma"]
    rows = [
        [*name.split(), tables.milliseconds(seconds), tables.ratio(steps["step_ratios"][name])]
        for name, seconds in steps["step_seconds"].items()
    ]
    notes = (
        f"Weights {steps['weight_bytes'] / 1e6:.0f} MB read at {steps['read_bandwidth'] / 1e9:.1f} "
        f"GB/s; a one-token step reaches {steps['bandwidth_share']:.2f} of that.",
        f"Everything but the forward pass: {100 * steps['overhead_plain']:+.1f} % of a plain "
        f"round, {100 * steps['overhead_wide']:+.1f} % of a round of {gamma} drafts. A negative "
        "share is noise, and says how large that is.",
    )
    header = ["batch", "tokens\na row", "forward\npass", "over one\ntoken"]
    return Section("What a forward pass costs", header, rows, notes)


def text(summary: dict[str, Any]) -> str:
    """Return all of it for a terminal."""
    return report.text([*headline(summary), summary["setting"]], sections(summary))
