"""The pictures of a training: its loss, and what of the drafts is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.bench_plot import FAINT, LOSS, PLAIN, SPECULATIVE, STYLE
from experiments.training.progress import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEM = "training"
_WINDOWS = 200  # points of the smoothed loss
_MARKS = "osv^DP*X"


def figure(history: History, title: str) -> Figure:
    """Return loss and acceptance by tokens trained on.

    Args:
        history: with at least one measurement.
        title: what was trained.
    """
    # It takes long to import, and few experiments draw.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        drawn = Figure(figsize=(12.4, 4.4), layout="constrained")
        left, right = drawn.subplots(1, 2)
        _loss(left, history)
        _acceptance(right, history)
        drawn.suptitle(title)
    return drawn


def _loss(axis: Axes, history: History) -> None:
    size = max(1, len(history.steps) // _WINDOWS)
    tokens, values = [], []
    for begin in range(0, len(history.steps), size):
        part = history.steps[begin : begin + size]
        tokens.append(part[-1]["tokens"] / 1e6)
        values.append(sum(line["cross_entropy"][0] for line in part) / len(part))
    axis.plot(tokens, values, color=FAINT, linewidth=1, label="training")
    measured = [(_millions(m), m["held_out"]["cross_entropy"][0]) for m in history.measured]
    axis.plot(*zip(*measured, strict=True), color=LOSS, marker="o", label="held out")
    axis.set_title("Cross-entropy of the first draft")
    axis.set_ylabel("nats a token")
    axis.set_xlabel("million tokens trained on")
    axis.legend(frameon=False)


def _acceptance(axis: Axes, history: History) -> None:
    places = [_millions(line) for line in history.measured]
    steps = len(history.measured[-1]["held_out"]["agree"])
    for step in range(steps):
        shares = [line["held_out"]["agree"][step] for line in history.measured]
        axis.plot(
            places,
            shares,
            color=SPECULATIVE,
            alpha=1 - 0.75 * step / max(steps, 2),
            marker=_MARKS[step % len(_MARKS)],
            markersize=4,
            label=f"draft {step + 1}",
        )
    axis.set_ylim(0, 1)
    axis.set_ylabel("agreement with the target's choice")
    axis.set_title("Held-out drafts")
    axis.set_xlabel("million tokens trained on")
    axis.legend(frameon=False, loc="upper left", ncols=2)
    decoded = [
        (_millions(line), line["held_out"]["block_efficiency"])
        for line in history.measured
        if line["held_out"].get("block_efficiency") is not None
    ]
    if decoded:
        other = axis.twinx()
        other.spines["right"].set_visible(True)
        other.plot(
            *zip(*decoded, strict=True), color=PLAIN, linestyle="--", marker="x", label="decoded"
        )
        other.set_ylim(bottom=1)
        other.set_ylabel("block efficiency (dashed)")


def _millions(line: dict[str, Any]) -> float:
    return float(line["tokens"]) / 1e6
