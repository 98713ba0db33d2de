"""The bench's pictures: by batch, by category, and what verifying costs beside what it gives."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette keeps apart for all kinds of colour vision; shapes and labels repeat it.
PLAIN, SPECULATIVE, LOSS, FAINT = "#555555", "#0072B2", "#D55E00", "0.45"
_BATCH = "batch (rows decoded together)"
_NOTE: dict[str, Any] = {"ha": "right", "va": "bottom", "color": FAINT, "fontsize": 11}
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    # A category may be named with a dollar.
    "text.parse_math": False,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def pictures(summary: dict[str, Any]) -> dict[str, bytes]:
    """Return each picture as a PNG file, by what it shows."""
    return {shown: _png(summary, [draw]) for shown, draw in _PANELS.items()}


def sheet(summary: dict[str, Any]) -> bytes:
    """Return all pictures on one sheet, as a PNG file."""
    return _png(summary, list(_PANELS.values()))


def _png(summary: dict[str, Any], panels: list[Callable[[Axes, dict[str, Any]], None]]) -> bytes:
    # It takes long to import, and only the bench draws.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(5.8 * columns, 4.2 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, draw in zip(axes.flat, panels, strict=True):
            draw(axis, summary)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=140)
    return file.getvalue()


def _doubling_axis(axis: Axes, counts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)


def _throughput(axis: Axes, summary: dict[str, Any]) -> None:
    found = {int(batch): values for batch, values in summary["throughput"]["batches"].items()}
    for mode, color, marker in (("plain", PLAIN, "o"), ("speculative", SPECULATIVE, "s")):
        rates = [values[f"{mode}_tokens_per_second"] for values in found.values()]
        low, high = zip(*(values[f"{mode}_range"] for values in found.values()), strict=True)
        axis.fill_between(list(found), low, high, color=color, alpha=0.15, linewidth=0)
        axis.plot(list(found), rates, color=color, marker=marker, label=mode)
    _doubling_axis(axis, list(found))
    axis.set(ylabel="tokens/s, all rows together", title="Throughput, decoding alone")
    axis.set_xlabel(_BATCH)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def _by_batch(axis: Axes, summary: dict[str, Any]) -> None:
    section = summary["throughput"]
    found = {int(batch): values for batch, values in section["batches"].items()}
    speedups = {batch: values["speedup"] for batch, values in found.items()}
    low, high = zip(*(values["speedup_range"] for values in found.values()), strict=True)
    axis.fill_between(list(found), low, high, color=FAINT, alpha=0.15, linewidth=0)
    axis.plot(list(speedups), list(speedups.values()), color=FAINT, zorder=2)
    for batch, speedup in speedups.items():
        gains = speedup >= 1
        axis.plot(batch, speedup, "s" if gains else "v", color=_color(speedup), markersize=8)
        axis.annotate(
            f"{speedup:.2f}x",
            (batch, speedup),
            xytext=(0, 10 if gains else -20),
            textcoords="offset points",
            ha="center",
            color=_color(speedup),
        )
    axis.axhline(1, color="0.2", linewidth=1)
    axis.text(0.99, 1, "as fast as plain", transform=axis.get_yaxis_transform(), **_NOTE)
    shaded = "shaded: slowest to fastest turn"
    axis.text(0.02, 0.02, shaded, transform=axis.transAxes, **_NOTE | {"ha": "left"})
    for crossing in section["crossings"]:
        axis.plot(crossing["batch"], 1, "o", markerfacecolor="white", color="0.2", zorder=4)
    _doubling_axis(axis, list(found))
    axis.set_ylim(0, 1.25 * max(*high, 1))
    axis.set(ylabel="speedup over plain decoding", title=_by_batch_title(section))
    axis.set_xlabel(_BATCH)


def _by_batch_title(section: dict[str, Any]) -> str:
    pays = [int(batch) for batch, values in section["batches"].items() if values["speedup"] >= 1]
    if len(pays) == len(section["batches"]):
        return "Speculation pays at every batch here"
    if not pays:
        return "Speculation pays at no batch here"
    if len(section["crossings"]) == 1 and pays[0] == min(map(int, section["batches"])):
        first_loss = section["crossings"][0]["before"]
        return f"Speculation pays up to batch {pays[-1]}, not at {first_loss}"
    return f"Speculation pays at batch {', '.join(map(str, pays))}"


def _by_category(axis: Axes, summary: dict[str, Any]) -> None:
    groups = sorted(summary["categories"].items(), key=lambda item: item[1]["speedup"])
    groups = [("all", summary["total"]), *groups]
    names = [name.replace("_", " ") for name, _ in groups]
    measured = [group["speedup"] for _, group in groups]
    predicted = [group["speedup_predicted"] for _, group in groups]
    places = range(len(groups))
    axis.barh(
        places, [s - 1 for s in measured], left=1, height=0.6, color=[_color(s) for s in measured]
    )
    axis.scatter(predicted, places, color="black", marker="|", s=150, zorder=3)
    ends = [*measured, *predicted, 1.0]
    span = max(ends) - min(ends)
    for place, speedup, other in zip(places, measured, predicted, strict=True):
        right = speedup >= 1
        outermost = max(speedup, other) if right else min(speedup, other)
        axis.annotate(
            f"{speedup:.2f}x",
            (outermost, place),
            xytext=(6 if right else -6, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
        )
    axis.axvline(1, color="0.2", linewidth=1)
    axis.set_yticks(places, names)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set_xlim(min(ends) - 0.22 * span, max(ends) + 0.2 * span)
    axis.set(
        xlabel="speedup over plain decoding (black: predicted)",
        title=f"Speedup by category, batch 1, {summary['steps']['gamma']} drafts",
    )


def _cost(axis: Axes, summary: dict[str, Any]) -> None:
    """Draw what a pass over several tokens costs beside the tokens that it gives."""
    steps = summary["steps"]
    ratios = {tuple(map(int, name.split())): v for name, v in steps["step_ratios"].items()}
    for batch in sorted({batch for batch, _ in ratios}):
        cost = {n: value for (b, n), value in sorted(ratios.items()) if b == batch}
        axis.plot(
            list(cost),
            list(cost.values()),
            color=LOSS,
            marker="o",
            alpha=1 if batch == 1 else 0.5,
            linestyle="-" if batch == 1 else "--",
            label="costs: one-token passes" + (f", batch {batch}" if batch > 1 else ""),
        )
    given = tokens_given(summary["total"])
    axis.plot(
        range(1, len(given) + 1),
        given,
        color=SPECULATIVE,
        marker="s",
        label="gives: tokens, where drafts were found",
    )
    _doubling_axis(axis, sorted({tokens for _, tokens in ratios}))
    gamma = steps["gamma"]
    cost_of_round = steps["step_ratios"][f"1 {gamma + 1}"]
    axis.set(
        xlabel="tokens verified in one pass (drafts + 1)",
        ylabel="passes or tokens",
        title=f"{gamma} drafts cost {cost_of_round:.2f} passes, give {given[-1]:.2f} tokens",
        ylim=(0, 1.3 * max(*ratios.values(), *given)),
    )
    axis.legend(frameon=False, loc="upper left")


def tokens_given(group: dict[str, Any]) -> list[float]:
    """Return the tokens a round with drafts gives, were it cut to its first 0, 1, .. G drafts.

    Args:
        group: its `accepted` rounds by position, `rounds` and `rounds_without_draft`.
    """
    drafted = group["rounds"] - group["rounds_without_draft"]
    given = [1.0]
    for accepted in group["accepted"]:
        given.append(given[-1] + (accepted / drafted if drafted else 0.0))
    return given


def _color(speedup: float) -> str:
    return SPECULATIVE if speedup >= 1 else LOSS


_PANELS: dict[str, Callable[[Axes, dict[str, Any]], None]] = {
    "speedup of speculation by batch": _by_batch,
    "tokens a second by batch, plain and speculative": _throughput,
    "speedup of speculation by category": _by_category,
    "cost of verifying several tokens beside what it gives": _cost,
}
