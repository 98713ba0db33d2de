"""What drafts are worth, as JSON and as sections of tables and sentences."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import tables
from experiments.acceptance_measure import Measured
from experiments.report import Section
from jspec import metrics

_SHOWN = 3  # prompts whose output differs; summary.json has them all


def summarise(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the figures of one drafter at one temperature, by category and over all."""
    names = list(dict.fromkeys(one.workload.category for one in measured))
    categories = {
        name: _group([one for one in measured if one.workload.category == name]) for name in names
    }
    efficiency = {name: group["block_efficiency"] for name, group in categories.items()}
    known = {name: value for name, value in efficiency.items() if value is not None}
    worst = min(known, key=lambda name: known[name]) if known else None
    return {
        "categories": categories,
        "total": _group(measured),
        "mean": {
            key: _mean([group[key] for group in categories.values()])
            for key in ("block_efficiency", "mean_overlap", "forced_overlap")
        },
        "worst": worst and {"category": worst, "block_efficiency": known[worst]},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _group(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return ratios of totals over some prompts."""
    counts = metrics.total([one.done.counts for one in measured])
    overlap = np.concatenate([one.forced.overlap for one in measured]).astype(np.float64)
    drafted = np.concatenate([one.forced.drafted for one in measured])
    rates = metrics.conditional_rates(counts)
    while rates and rates[-1] is None:  # a tree has fewer levels than drafts
        rates.pop()
    depth = len(rates)
    differences = [
        {"question_id": one.workload.question_id, **dataclasses.asdict(one.difference)}
        for one in measured
        if one.difference is not None
    ]
    return {
        "prompts": len(measured),
        "tokens": counts.emitted,
        "rounds": counts.rounds,
        "rounds_without_draft": counts.rounds_without_draft,
        "block_efficiency": metrics.block_efficiency(counts),
        "mean_overlap": metrics.mean_overlap(counts),
        "forced_overlap": float(overlap.mean()) if overlap.size else None,
        "forced_overlap_where_drafted": float(overlap[drafted].mean()) if drafted.any() else None,
        "forced_positions": int(overlap.size),
        "drafted_share": float(drafted.mean()) if drafted.size else None,
        "conditional_rates": rates,
        "accepted": counts.accepted[:depth].tolist(),
        "examined": counts.examined[:depth].tolist(),
        "identical": len(measured) - len(differences),
        "differences": differences,
    }


def headline(summary: dict[str, Any]) -> list[str]:
    """Return the result in a few sentences."""
    sentences = []
    for temperature, found in summary["acceptance"].items():
        drafted = {name: section for name, section in found.items() if section["worst"]}
        if not drafted:
            continue
        best = max(drafted, key=lambda name: drafted[name]["mean"]["block_efficiency"])
        section = drafted[best]
        worst = section["worst"]
        sentences.append(
            f"Temperature {temperature}: {best} commits most, "
            f"{tables.number(section['mean']['block_efficiency'])} tokens a round averaged over "
            f"categories, {tables.number(worst['block_efficiency'])} on the worst "
            f"({worst['category']})."
        )
    for temperature, found in summary["speed"].items():
        best = max(found, key=lambda name: found[name]["mean"])
        section = found[best]
        worst = section["worst"]
        sentences.append(
            f"Temperature {temperature}, one prompt at a time: {best} is fastest, "
            f"{tables.ratio(section['mean'])} plain decoding's speed averaged over categories, "
            f"{tables.ratio(worst['speedup'])} on the worst ({worst['category']})."
        )
    greedy = summary["acceptance"].get("0")
    if greedy:
        prompts = sum(section["total"]["prompts"] for section in greedy.values())
        same = sum(section["total"]["identical"] for section in greedy.values())
        sentences.append(
            f"Greedy output is token by token plain decoding's in {same} of {prompts} cases"
            f"{_parting(greedy)}."
        )
    return sentences


def _parting(greedy: dict[str, Any]) -> str:
    found = [d for section in greedy.values() for d in section["total"]["differences"]]
    if not found:
        return ""
    widest = max(difference["gap"] for difference in found)
    return f"; the others part where the target's two best logits are at most {widest:.2g} apart"


def sections(summary: dict[str, Any]) -> list[Section]:
    """Return everything in tables."""
    parts: list[Section] = []
    for temperature, found in summary["acceptance"].items():
        parts += [
            _efficiency(temperature, found),
            _forced(temperature, found),
            _examined(temperature, found),
            _rates(temperature, found),
        ]
        if temperature == "0":
            parts.append(_identity(found))
    parts += [_speed(temperature, found) for temperature, found in summary["speed"].items()]
    return [*parts, _memory(summary)]


def _titles(found: dict[str, Any]) -> list[str]:
    categories = next(iter(found.values()))["categories"]
    return [name.replace("_", "\n") for name in categories]


def _by_category(section: dict[str, Any], key: str, show: Callable[[Any], str]) -> list[str]:
    return [show(group[key]) for group in section["categories"].values()]


def _efficiency(temperature: str, found: dict[str, Any]) -> Section:
    rows = [
        [
            name,
            tables.number(section["mean"]["block_efficiency"]),
            tables.number(section["worst"] and section["worst"]["block_efficiency"]),
            *_by_category(section, "block_efficiency", tables.number),
        ]
        for name, section in found.items()
    ]
    return Section(
        f"Temperature {temperature}: tokens a round (block efficiency)",
        ["drafter", "mean over\ncategories", "worst\ncategory", *_titles(found)],
        rows,
        (
            "Committed on average, the correction or bonus token included, rounds without a draft "
            "too; plain decoding has 1.",
        ),
    )


def _forced(temperature: str, found: dict[str, Any]) -> Section:
    rows = [
        [
            name,
            tables.number(section["mean"]["forced_overlap"]),
            tables.percent(section["total"]["drafted_share"]),
            tables.number(section["total"]["forced_overlap_where_drafted"]),
            *_by_category(section, "forced_overlap", tables.number),
        ]
        for name, section in found.items()
    ]
    return Section(
        f"Temperature {temperature}: sum min(p, q), teacher-forced",
        [
            "drafter",
            "mean over\ncategories",
            "drafts at\npositions",
            "where it\ndrafts",
            *_titles(found),
        ],
        rows,
        (
            "At every token of plain decoding's text, after the true prefix: the chance that a "
            "first draft is accepted there, 0 where none is made. It does not depend on gamma. Of "
            "a tree it is the chance of any of the root's children.",
        ),
    )


def _examined(temperature: str, found: dict[str, Any]) -> Section:
    rows = [
        [
            name,
            tables.number(section["mean"]["mean_overlap"]),
            *_by_category(section, "mean_overlap", tables.number),
        ]
        for name, section in found.items()
    ]
    return Section(
        f"Temperature {temperature}: sum min(p, q) at examined positions",
        ["drafter", "mean over\ncategories", *_titles(found)],
        rows,
        (
            "While decoding, up to each round's first rejection; only rounds with a draft count. "
            "Later positions are examined in rounds that survived the earlier ones.",
        ),
    )


def _rates(temperature: str, found: dict[str, Any]) -> Section:
    rows, deepest = [], 0
    for name, section in found.items():
        for label, group in [("all", section["total"]), *section["categories"].items()]:
            rates = group["conditional_rates"]
            deepest = max(deepest, len(rates))
            rows.append([name if label == "all" else "", label, *map(tables.percent, rates)])
    rows = [[*row, *[tables.MISSING] * (deepest + 2 - len(row))] for row in rows]
    return Section(
        f"Temperature {temperature}: accepted once all before it are, by position",
        ["drafter", "category", *map(str, range(1, deepest + 1))],
        rows,
        (
            "Of the rounds that examined a position (of a tree: a depth), the share that accepted "
            "a draft there: a_i / a_(i-1).",
        ),
    )


def _identity(found: dict[str, Any]) -> Section:
    rows = []
    for name, section in found.items():
        total = section["total"]
        found_at = [f"{d['question_id']}:{d['place']}" for d in total["differences"]]
        more = f", {len(found_at) - _SHOWN} more" if len(found_at) > _SHOWN else ""
        widest = max((d["gap"] for d in total["differences"]), default=None)
        rows.append(
            [
                name,
                f"{total['identical']}/{total['prompts']}",
                tables.MISSING if widest is None else f"{widest:.2g}",
                ", ".join(found_at[:_SHOWN]) + more or tables.MISSING,
            ]
        )
    return Section(
        "Temperature 0: output the same as plain decoding's, token by token",
        ["drafter", "same\nprompts", "widest\ngap", "others part at\nprompt:token"],
        rows,
        (
            "Gap: how far apart the target's two best logits are there. Verifying several tokens "
            "at once adds in another order than one at a time, so a tie within rounding may fall "
            "the other way; a wide gap would be a fault.",
        ),
    )


def _speed(temperature: str, found: dict[str, Any]) -> Section:
    rows = [
        [
            name,
            tables.ratio(section["mean"]),
            tables.ratio(section["worst"]["speedup"]),
            tables.ratio(section["total"]["speedup"]),
            *_by_category(section, "speedup", tables.ratio),
        ]
        for name, section in found.items()
    ]
    section = next(iter(found.values()))
    return Section(
        f"Temperature {temperature}: speed over plain decoding, one prompt at a time",
        [
            "drafter",
            "mean over\ncategories",
            "worst\ncategory",
            "median of\nprompts",
            *_titles(found),
        ],
        rows,
        (
            "Tokens a second over plain decoding's, prefill and compilation left out. Every prompt "
            f"is decoded by every method in turn, {section['repeats']} times; medians over its "
            "turns, then over the prompts of a category.",
        ),
    )


def _memory(summary: dict[str, Any]) -> Section:
    rows, capacity = [], 0
    for name, drafter in summary["drafters"].items():
        memory = drafter["memory"]
        capacity = memory["capacity"]
        rows.append(
            [
                name,
                _megabytes(memory["own"]),
                tables.percent(memory["own_share"]),
                _megabytes(memory["lent"]),
                tables.percent(memory["lent_share"]),
                _megabytes(memory["state"]),
                tables.percent(memory["state_share"]),
            ]
        )
    return Section(
        "Memory beside the target's",
        [
            "drafter",
            "own\nweights",
            "of the\ntarget's",
            "lent\nweights",
            "of the\ntarget's",
            "cache\na row",
            "of the\ntarget's",
        ],
        rows,
        (
            "Lent: weights that are the target's own arrays and take no memory again. Cache: all "
            f"that the drafter keeps for a row of {capacity} tokens. Megabytes of 10^6.",
        ),
    )


def _megabytes(count: int) -> str:
    return f"{tables.figure(count, 1e-6)} MB"
