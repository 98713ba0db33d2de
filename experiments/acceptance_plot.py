"""Pictures of what drafts are worth: by drafter, category, temperature and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.tree_plot import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette; hatches tell drafters beyond it apart.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#555555", "#F0E442")
_HATCHES = ("", "///", "...")
MARKERS = "osv^Dph*"
_MEAN = "mean"
_COLUMNS = 3
_FIGURE_HEIGHT = 0.24  # of a figure over a bar, in units of the overlap's axis


def pictures(summary: dict[str, Any]) -> dict[str, tuple[str, Figure]]:
    """Return figures and what they show, by the stem of their file's name."""
    drafters = list(summary["drafters"])
    acceptance = summary["acceptance"]
    found = {
        "block_efficiency": ("tokens a round by category", _efficiency(acceptance, drafters)),
        "overlap": ("sum min(p, q) by category", _overlap(acceptance, drafters)),
    }
    for temperature, section in summary["acceptance"].items():
        found[f"rates-{temperature}"] = (
            f"acceptance by position and category at temperature {temperature}",
            _rates(temperature, section, drafters),
        )
    if summary["speed"]:
        found["speed"] = (
            "speed over plain decoding by category",
            _speed(summary["speed"], drafters),
        )
    return found


def _panels(
    found: dict[str, Any],
    drafters: Sequence[str],
    draw: Callable[[Axes, str, dict[str, Any]], None],
) -> Figure:
    """Draw a panel a temperature, one below the other, drafters as bars side by side."""
    shown = len(next(iter(found.values())))
    groups = 1 + max(len(next(iter(section.values()))["categories"]) for section in found.values())

    def figure(figure: Figure) -> None:
        axes = figure.subplots(len(found), 1, squeeze=False, sharey=True)[:, 0]
        for axis, (temperature, section) in zip(axes, found.items(), strict=True):
            draw(axis, temperature, section)
        _legend(figure, axes[0])

    width = max(7.5, 0.19 * groups * (shown + 1.6) + 1.2)
    return drawn(figure, width, 3.3 * len(found) + 0.5 + 0.3 * shown / 4)


def _legend(figure: Figure, axis: Axes) -> None:
    handles, names = axis.get_legend_handles_labels()
    columns = 4 if max(map(len, names)) < 20 else 3
    figure.legend(
        handles, names, loc="outside lower center", ncols=min(columns, len(names)), frameon=False
    )


def _bars(
    axis: Axes,
    section: dict[str, Any],
    drafters: Sequence[str],
    value: Callable[[dict[str, Any]], float | None],
    mean: Callable[[dict[str, Any]], float | None],
    above: Callable[[dict[str, Any]], float] = lambda section: 0.0,
) -> None:
    """Draw drafters' bars for the mean and every category, and the mean's figure over its bar.

    Args:
        axis: where to.
        section: of a temperature.
        drafters: all of the run, by whose order colours go.
        value: of a category's figures.
        mean: of a drafter's figures.
        above: height of what else is drawn over the mean's bar.
    """
    categories = list(next(iter(section.values()))["categories"])
    width = 0.84 / len(section)
    for place, name in enumerate(section):
        index, groups = drafters.index(name), section[name]["categories"]
        heights = [mean(section[name]), *(value(groups[category]) for category in categories)]
        axis.bar(
            _places(len(heights), place, len(section)),
            [height or 0 for height in heights],
            width,
            label=name,
            color=_color(index),
            hatch=_HATCHES[index // len(COLORS) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0,
        )
        middle = _places(1, place, len(section))[0]
        top = max(heights[0] or 0, above(section[name]))
        _label(axis, middle, heights[0], top, upright=len(section) > 4)
    axis.axvline(0.5, color="0.7", linewidth=1, linestyle=":")
    names = [_MEAN, *(category.replace("_", "\n") for category in categories)]
    axis.set_xticks(range(len(names)), names)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.5, len(names) - 0.5)


def _label(axis: Axes, place: float, value: float | None, height: float, *, upright: bool) -> None:
    axis.annotate(
        "-" if value is None else f"{value:.2f}",
        (place, height),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        rotation=90 if upright else 0,
        fontsize=9,
    )


def _places(groups: int, index: int, drafters: int) -> list[float]:
    shift = (index - (drafters - 1) / 2) * 0.84 / drafters
    return [group + shift for group in range(groups)]


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _efficiency(found: dict[str, Any], drafters: Sequence[str]) -> Figure:
    def draw(axis: Axes, temperature: str, section: dict[str, Any]) -> None:
        key = "block_efficiency"
        _bars(axis, section, drafters, lambda group: group[key], lambda one: one["mean"][key])
        axis.axhline(1, color="0.2", linewidth=1)
        axis.set(ylabel="tokens a round", title=f"Tokens a round, temperature {temperature}")

    return _panels(found, drafters, draw)


def _overlap(found: dict[str, Any], drafters: Sequence[str]) -> Figure:
    def draw(axis: Axes, temperature: str, section: dict[str, Any]) -> None:
        key = "forced_overlap"
        _bars(
            axis,
            section,
            drafters,
            lambda group: group[key],
            lambda one: one["mean"][key],
            _line_in_the_way,
        )
        for place, one in enumerate(section.values()):
            values = [one["mean"]["mean_overlap"]]
            values += [group["mean_overlap"] for group in one["categories"].values()]
            places = _places(len(values), place, len(section))
            heights = [float("nan") if value is None else value for value in values]
            axis.scatter(places, heights, color="black", marker="_", s=45, zorder=3)
        axis.set(
            ylabel="teacher-forced\n(lines: examined)",
            title=f"Sum min(p, q), temperature {temperature}",
            ylim=(0, 1.3),
            yticks=[0, 0.25, 0.5, 0.75, 1],
        )

    return _panels(found, drafters, draw)


def _line_in_the_way(section: dict[str, Any]) -> float:
    """Return where the line of the examined positions crosses the figure over a bar, else 0."""
    bar, line = section["mean"]["forced_overlap"] or 0.0, section["mean"]["mean_overlap"] or 0.0
    return line if 0 <= line - bar < _FIGURE_HEIGHT else 0.0


def _speed(found: dict[str, Any], drafters: Sequence[str]) -> Figure:
    def draw(axis: Axes, temperature: str, section: dict[str, Any]) -> None:
        _bars(axis, section, drafters, lambda group: group["speedup"], lambda one: one["mean"])
        axis.axhline(1, color="0.2", linewidth=1)
        axis.set(ylabel="over plain", title=f"Speed over plain, batch 1, temperature {temperature}")

    return _panels(found, drafters, draw)


def _rates(temperature: str, section: dict[str, Any], drafters: Sequence[str]) -> Figure:
    categories = list(next(iter(section.values()))["categories"])
    deepest = max(len(one["total"]["conditional_rates"]) for one in section.values())
    panels = ["all", *categories]
    rows = -(-len(panels) // _COLUMNS)

    def draw(figure: Figure) -> None:
        columns = min(_COLUMNS, len(panels))
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, name in zip(axes.flat, panels, strict=False):
            for index, drafter in enumerate(drafters):
                one = section[drafter]
                group = one["total"] if name == "all" else one["categories"][name]
                rates = group["conditional_rates"]
                axis.plot(
                    range(1, len(rates) + 1),
                    [float("nan") if rate is None else rate for rate in rates],
                    color=_color(index),
                    marker=MARKERS[index % len(MARKERS)],
                    markersize=5,
                    linestyle="-" if index < len(COLORS) else "--",
                    label=drafter,
                )
            axis.set_title(name.replace("_", " "))
            axis.set_ylim(-0.04, 1.05)
            step = 1 if deepest <= 8 else 2
            axis.set_xticks(range(1, deepest + 1, step))
        for axis in axes.flat:
            axis.tick_params(axis="x", labelbottom=True)
        for axis in axes[:, 0]:
            axis.set_ylabel("accepted")
        for axis in axes.flat[len(panels) - columns : len(panels)]:  # the lowest of each column
            axis.set_xlabel("position (of a tree: depth)")
        figure.suptitle(
            f"Accepted once all before it are, by position, temperature {temperature}",
            fontweight="bold",
            fontsize=13,
        )
        _legend(figure, axes.flat[0])

    return drawn(draw, 3.4 * min(_COLUMNS, len(panels)) + 0.6, 2.5 * rows + 1.5)
