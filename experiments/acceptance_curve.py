"""Block efficiency against training tokens, and what a doubling of the data gives."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import tables
from experiments.acceptance_plot import COLORS, MARKERS
from experiments.bench_plot import FAINT
from experiments.report import Section
from experiments.tree_plot import drawn
from jspec.errors import InputError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIELD = "curve"
_REMEDY = "give JSON lines with tokens and block_efficiency"
_PROGRESS = "progress.jsonl"  # as training calls it
_FITTED = 3  # fewest points that a line is put through
_DOUBLINGS = 2  # beyond the last point
_TICKS = 8  # most on the axis


@dataclasses.dataclass(frozen=True)
class Curve:
    """How a drafter got better as it was trained.

    Attributes:
        name: of the drafter.
        tokens: trained on, rising.
        efficiency: block efficiency on held-out prompts after so many.
    """

    name: str
    tokens: tuple[float, ...]
    efficiency: tuple[float, ...]


def read(text: str) -> Curve:
    """Return the curve of a file, or of the folder of a training, as [NAME=]FILE.

    Lines without `block_efficiency`, there or in their `held_out`, are passed over: training
    writes its loss more often. Of lines of the same number of tokens the last one counts.

    Raises:
        InputError: the file cannot be read, or holds no curve.
    """
    name, equals, file = text.partition("=")
    path = Path(file if equals else text).expanduser()
    if path.is_dir():
        path /= _PROGRESS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(_FIELD, str(path), f"cannot be read ({error})", _REMEDY) from None
    points: dict[float, float] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else {}
            found = record.get("held_out", record).get("block_efficiency")
            if found is None:
                continue
            tokens, efficiency = float(record["tokens"]), float(found)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = f"is no point of a curve ({type(error).__name__}: {error})"
            raise InputError(f"{_FIELD} {path}:{number}", line[:80], problem, _REMEDY) from None
        require(
            math.isfinite(tokens) and math.isfinite(efficiency) and tokens >= 0,
            f"{_FIELD} {path}:{number}",
            line[:80],
            "is no point of a curve",
            _REMEDY,
        )
        points[tokens] = efficiency
    require(bool(points), _FIELD, str(path), "has no point", _REMEDY)
    known = sorted(points.items())
    own = name if equals else path.resolve().parent.name
    return Curve(own, tuple(t for t, _ in known), tuple(e for _, e in known))


def fit(curve: Curve) -> tuple[float, float] | None:
    """Return (a, b) of efficiency = a + b log2(tokens) over the later half, by least squares.

    None where there are too few points.
    """
    points = [(t, e) for t, e in zip(curve.tokens, curve.efficiency, strict=True) if t > 0]
    # The first points are about learning anything at all, the later ones about data.
    late = points[-max(_FITTED, len(points) - len(points) // 2) :]
    if len(late) < _FITTED:
        return None
    tokens, efficiency = np.array(late).T
    slope, start = np.polyfit(np.log2(tokens), efficiency, 1)
    return float(start), float(slope)


def summary(curve: Curve) -> dict[str, Any]:
    """Return the curve for summary.json."""
    line = fit(curve)
    return {
        "name": curve.name,
        "tokens": list(curve.tokens),
        "block_efficiency": list(curve.efficiency),
        "gain_a_doubling": line and line[1],
        "extrapolated": line and [list(point) for point in _beyond(curve, line)],
    }


def _beyond(curve: Curve, line: tuple[float, float]) -> list[tuple[float, float]]:
    """Return points past the last one, a doubling each: what the line says, not measured."""
    start, slope = line
    ahead = [curve.tokens[-1] * 2**step for step in range(1, _DOUBLINGS + 1)]
    return [(tokens, start + slope * math.log2(tokens)) for tokens in ahead]


def section(curves: Sequence[Curve]) -> Section:
    """Return the last points and what a doubling gives as a table."""
    rows = []
    for curve in curves:
        line = fit(curve)
        ahead = [tables.MISSING] * _DOUBLINGS
        if line is not None:
            ahead = [tables.number(value) for _, value in _beyond(curve, line)]
        rows.append(
            [
                curve.name,
                str(len(curve.tokens)),
                f"{curve.tokens[-1]:,.0f}",
                tables.number(curve.efficiency[-1]),
                tables.MISSING if line is None else f"{line[1]:+.3f}",
                *ahead,
            ]
        )
    return Section(
        "Block efficiency by training tokens",
        [
            "drafter",
            "points",
            "training\ntokens",
            "block\nefficiency",
            "a doubling\ngives",
            *(f"{2**step}x the data\n(extrapolated)" for step in range(1, _DOUBLINGS + 1)),
        ],
        rows,
        (
            "A doubling gives the slope of block efficiency against log2(tokens) over the later "
            "half of the points; what it says beyond the last point is extrapolated, not measured.",
        ),
    )


def figure(curves: Sequence[Curve]) -> Figure:
    """Return a picture of the curves, with the fitted lines drawn on beyond their ends."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for index, curve in enumerate(curves):
            color = COLORS[index % len(COLORS)]
            axis.plot(
                curve.tokens,
                curve.efficiency,
                color=color,
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
                label=curve.name,
            )
            line = fit(curve)
            if line is not None:
                ahead = [(curve.tokens[-1], curve.efficiency[-1]), *_beyond(curve, line)]
                axis.plot(*zip(*ahead, strict=True), color=color, linestyle=":", linewidth=1.5)
                axis.annotate(
                    f"{line[1]:+.2f} a doubling",
                    ahead[-1],
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    color=color,
                    fontsize=10,
                )
        _tokens_axis(axis, curves)
        axis.set(
            xlabel="training tokens",
            ylabel="block efficiency, held-out prompts",
            title="Block efficiency against training tokens",
        )
        axis.text(
            0.98, 0.03, "dotted: extrapolated", transform=axis.transAxes, ha="right", color=FAINT
        )
        axis.legend(frameon=False, loc="upper left")

    return drawn(draw, 7.5, 4.6)


def _tokens_axis(axis: Axes, curves: Sequence[Curve]) -> None:
    """Let doublings be alike wide, with a place for 0 where a curve starts untrained."""
    known = [tokens for curve in curves for tokens in curve.tokens if tokens > 0]
    if not known:
        return
    first, last = min(known), max(known) * 2**_DOUBLINGS
    untrained = any(curve.tokens[0] == 0 for curve in curves)
    if untrained:
        axis.set_xscale("symlog", base=2, linthresh=first, linscale=1)
    else:
        axis.set_xscale("log", base=2)
    apart = max(1, math.ceil(math.log2(last / first) / _TICKS))
    steps = range(0, math.floor(math.log2(last / first)) + 1, apart)
    ticks = [*([0.0] if untrained else []), *(first * 2**step for step in steps)]
    axis.set_xticks(ticks, [_shown(tick) for tick in ticks])
    axis.minorticks_off()
    # Room for the words after the last points.
    axis.set_xlim(-0.05 * first if untrained else first / 1.3, last * (last / first) ** 0.25)


def _shown(tokens: float) -> str:
    """Return a count of tokens as 250k or 1.5M."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    return f"{tokens / 1e3:.3g}k" if tokens < 999_500 else f"{tokens / 1e6:.3g}M"
