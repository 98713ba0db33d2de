"""The bench's figures as JSON, text, picture and page."""

from __future__ import annotations

import base64
import html as html_escape
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import tables
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
        "plain_decode": _decode_seconds(result, plain=True),
        "plain_total": result.plain.timing.end,
        "speculative_decode": _decode_seconds(result, plain=False),
        "speculative_total": result.speculative.timing.end,
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
    results: Sequence[PromptResult], steps: dict[str, Any], peer: str | None
) -> dict[str, Any]:
    """Return the content of summary.json."""
    categories = list(dict.fromkeys(r.workload.category for r in results))
    return {
        "label": "measured; entries named predicted are computed from measured step times",
        "steps": steps,
        "peer": peer,
        "categories": {
            name: _group([r for r in results if r.workload.category == name]) for name in categories
        },
        "total": _group(results),
    }


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("plain\ntokens/s", "plain_tokens_per_second", tables.rate),
    ("speculative\ntokens/s", "speculative_tokens_per_second", tables.rate),
    ("speedup", "speedup", tables.ratio),
    ("speedup\npredicted", "speedup_predicted", tables.ratio),
    ("block\nefficiency", "block_efficiency", tables.number),
    ("drafts\naccepted", "acceptance_rate", tables.percent),
)
_PEER_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("plain over\ntransformers", "plain_over_peer", tables.ratio),
    ("with\nprefill", "plain_over_peer_with_prefill", tables.ratio),
    ("lookup over\ntransformers'", "lookup_over_peer", tables.ratio),
    ("with\nprefill", "lookup_over_peer_with_prefill", tables.ratio),
)


def _cells(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = _COLUMNS + (_PEER_COLUMNS if summary["peer"] else ())
    header = ["category", *(title for title, _, _ in columns), "same\noutput"]
    groups = [*summary["categories"].items(), ("all", summary["total"])]
    body = [
        [
            name,
            *(show(group.get(key)) for _, key, show in columns),
            f"{group['identical']}/{group['prompts']}",
        ]
        for name, group in groups
    ]
    return header, body


def _facts(summary: dict[str, Any]) -> list[str]:
    steps = summary["steps"]
    gamma = steps["gamma"]
    wide = steps["step_ratios"][f"1 {gamma + 1}"]
    facts = [
        summary["setting"],
        f"Weights {steps['weight_bytes'] / 1e6:.0f} MB read at {steps['read_bandwidth'] / 1e9:.1f} "
        f"GB/s; a one-token step reaches {steps['bandwidth_share']:.2f} of that.",
        f"A forward pass over {gamma + 1} tokens costs {wide:.2f} one-token passes.",
        f"Everything but the forward pass: {100 * steps['overhead_plain']:+.1f} % of a plain "
        f"round, {100 * steps['overhead_wide']:+.1f} % of a round of {gamma} drafts. A negative "
        "share is noise, and says how large that is.",
        "Speculative walltime: rounds and the step times around each prompt predict "
        f"{summary['total']['predicted_over_measured_walltime']:.2f} of what was measured. (The "
        "predicted speedup also predicts the plain run, from the one-token step.)",
    ]
    if summary["peer"]:
        facts.append(
            f"Peer: {summary['peer']}, same weights, prompts and process; "
            "its prefill is a call for one token."
        )
    return facts


def text(summary: dict[str, Any]) -> str:
    """Return the tables for a terminal."""
    steps = summary["steps"]
    header, body = _cells(summary)
    step_rows = [
        [*name.split(), tables.milliseconds(seconds), tables.ratio(steps["step_ratios"][name])]
        for name, seconds in steps["step_seconds"].items()
    ]
    return "\n".join(
        [
            tables.render(
                ["rows B", "tokens\na row", "forward\npass", "over one\ntoken"], step_rows
            ),
            "",
            tables.render(header, body, total=True),
            "",
            *_facts(summary),
        ]
    )


def plot(summary: dict[str, Any], path: Path) -> None:
    """Draw step costs and speedups by category into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = summary["steps"]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(2, 3), layout="constrained"
    )
    ratios = {tuple(map(int, k.split())): v for k, v in steps["step_ratios"].items()}
    for batch in sorted({b for b, _ in ratios}):
        points = sorted((n, v) for (b, n), v in ratios.items() if b == batch)
        left.plot(
            *zip(*points, strict=True), marker="o", label=f"{batch} rows" if batch > 1 else None
        )
    left.axline((1, 1), slope=1, color="0.7", linestyle="--", linewidth=1)
    left.set(
        xlabel="tokens verified in one pass",
        ylabel="cost over a one-token pass",
        title="What verifying costs",
        ylim=(0, 1.15 * max(ratios.values())),
    )
    left.text(
        0.98, 0.04, "dashed: one pass a token", transform=left.transAxes, ha="right", color="0.4"
    )
    if len({b for b, _ in ratios}) > 1:
        left.legend()

    names = list(summary["categories"])
    measured = [summary["categories"][n]["speedup"] for n in names]
    predicted = [summary["categories"][n]["speedup_predicted"] for n in names]
    places = range(len(names))
    right.bar(places, measured, width=0.6, color="#4878a8", label="measured")
    right.scatter(places, predicted, color="black", marker="_", s=300, label="predicted", zorder=3)
    right.axhline(1, color="0.4", linewidth=1)
    right.set_xticks(places, [n.replace("_", " ") for n in names], rotation=25, ha="right")
    right.set(ylabel="speedup over plain decoding", title=f"Speculation, gamma = {steps['gamma']}")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def html(summary: dict[str, Any], picture: Path) -> str:
    """Return one self-contained page."""
    header, body = _cells(summary)

    def row(cells: Sequence[str], tag: str) -> str:
        inner = "".join(
            f"<{tag}>{html_escape.escape(cell).replace(chr(10), '<br>')}</{tag}>" for cell in cells
        )
        return f"<tr>{inner}</tr>"

    image = base64.b64encode(picture.read_bytes()).decode("ascii")
    facts = "".join(f"<li>{html_escape.escape(fact)}</li>" for fact in _facts(summary))
    table = row(header, "th") + "".join(row(cells, "td") for cells in body)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>jspec bench</title><style>'
        "body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}th,td{padding:.25rem .5rem;text-align:right;"
        "border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}"
        "tr:last-child{font-weight:600}img{max-width:100%}</style>"
        f"<h1>Plain against speculative decoding</h1><ul>{facts}</ul>"
        f'<img alt="cost of verifying and speedup by category" src="data:image/png;base64,{image}">'
        f'<div style="overflow-x:auto"><table>{table}</table></div>'
        "<p>Ratios of totals, measured in one interleaved run; "
        "the predicted speedup is computed from measured rounds and step times.</p></html>\n"
    )
