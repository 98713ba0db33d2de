"""Pictures of token trees, and of what trees give beside chains."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments import tree_text
from experiments.bench_plot import FAINT, LOSS, PLAIN, SPECULATIVE, STYLE
from jspec import tree_shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A chain and a tree of one size have the light and the dark shade of one colour.
_COLORS = ("#9CC9E6", SPECULATIVE, "#F2B48A", LOSS, "#BBBBBB", PLAIN)
_LONGEST = 14  # characters of a label
_LABELLED = 40  # leaves beyond which nodes have no room for a label


def files(figure: Figure, stem: str) -> dict[str, bytes]:
    """Return a figure as PNG and SVG files, by name."""
    from matplotlib import rc_context

    found = {}
    # The same picture gives the same file.
    with rc_context({"svg.hashsalt": "jspec"}):
        for kind in ("png", "svg"):
            file = io.BytesIO()
            more: dict[str, Any] = {"dpi": 140} if kind == "png" else {"metadata": {"Date": None}}
            figure.savefig(file, format=kind, **more)
            found[f"{stem}.{kind}"] = file.getvalue()
    return found


def drawn(draw: Callable[[Figure], None], width: float, height: float) -> Figure:
    """Return what `draw` puts on a figure of so many inches, in our style."""
    # It takes long to import, and few experiments draw.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
    return figure


def trees(
    shown: Sequence[tuple[str, Sequence[int]]],
    rates: Sequence[float] | None = None,
    labels: Sequence[str] | None = None,
) -> Figure:
    """Return a picture of trees one beside the other, roots on top.

    Args:
        shown: title and parents of each.
        rates: p_b; nodes are coloured by their chance to be reached. None colours all alike.
        labels: of the nodes of a tree; their numbers where not given.
    """
    leaves = [len(tree_text.paths(parents)) for _, parents in shown]
    depth = max(max(tree_shapes.depths(parents)) for _, parents in shown)
    apart = 0.42 if labels is None else 1.1  # inches
    widths = [max(3.2, apart * count) for count in leaves]

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(shown), squeeze=False, sharey=True, width_ratios=widths)[0]
        for axis, (title, parents) in zip(axes, shown, strict=True):
            _tree(axis, parents, rates, labels)
            axis.set_title(title)
            axis.set_ylim(-depth - 0.6, 0.6)
        if rates is not None:
            _scale(figure, axes)

    return drawn(draw, min(sum(widths) + 1.2, 24), max(2.6, 0.75 * depth + 1.6))


def _places(parents: Sequence[int]) -> list[float]:
    """Return where nodes stand from left to right: leaves side by side, parents above the middle.

    Children stand in their order; a node's subtree overlaps no other.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children[node])
    places = [0.0] * len(parents)
    leaves = [node for node in order if not children[node]]
    for place, leaf in enumerate(leaves):
        places[leaf] = float(place)
    for node in reversed(order):  # children first
        if children[node]:
            places[node] = (places[children[node][0]] + places[children[node][-1]]) / 2
    return places


def _tree(
    axis: Axes,
    parents: Sequence[int],
    rates: Sequence[float] | None,
    labels: Sequence[str] | None,
) -> None:
    places, depths = _places(parents), tree_shapes.depths(parents)
    chances = [0.5] * len(parents) if rates is None else tree_shapes.chances(parents, rates)
    for node, parent in enumerate(parents[1:], start=1):
        ends = ([places[parent], places[node]], [-depths[parent], -depths[node]])
        axis.plot(*ends, color=FAINT, linewidth=1, zorder=1)
    if labels is None:
        axis.scatter(
            places,
            [-depth for depth in depths],
            c=chances,
            cmap="Blues",
            vmin=0,
            vmax=1,
            s=420,
            edgecolors="0.3",
            zorder=2,
        )
    if labels is not None or len(tree_text.paths(parents)) <= _LABELLED:
        box = None if labels is None else {"boxstyle": "round", "fc": "white", "ec": "0.3"}
        texts = [str(node) for node in range(len(parents))] if labels is None else labels
        for place, depth, text, chance in zip(places, depths, texts, chances, strict=True):
            axis.annotate(
                text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...",
                (place, -depth),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if rates is not None and chance > 0.6 else "black",
                bbox=box,
                zorder=3,
            )
    axis.set_xlim(min(places) - 0.7, max(places) + 0.7)
    axis.set_axis_off()


def _scale(figure: Figure, axes: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colors = ScalarMappable(Normalize(0, 1), "Blues")
    bar = figure.colorbar(colors, ax=list(axes), fraction=0.03, pad=0.02)
    bar.set_label("chance to be on the accepted path")


def comparison(summary: dict[str, Any]) -> Figure:
    """Return a picture of tokens a round and speed by category, methods side by side.

    Args:
        summary: section "comparison" of summary.json.
    """
    temperatures = list(summary)
    methods = [name for part in summary.values() for name in part["total"] if name != "plain"]
    methods = list(dict.fromkeys(methods))
    categories = [*next(iter(summary.values()))["categories"], "all"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(temperatures), 2, squeeze=False)
        for (left, right), temperature in zip(axes, temperatures, strict=True):
            groups = {**summary[temperature]["categories"], "all": summary[temperature]["total"]}
            for axis, key in ((left, "block_efficiency"), (right, "speedup")):
                _bars(axis, groups, methods, key)
            left.set(ylabel="tokens a round", title=f"Tokens a round, temperature {temperature}")
            right.set(
                ylabel="speed over plain decoding",
                title=f"Speed over plain, temperature {temperature}",
            )
            right.axhline(1, color="0.2", linewidth=1)
        named: dict[str, Any] = {}
        for axis in axes[:, 0]:
            handles, names = axis.get_legend_handles_labels()
            named |= zip(names, handles, strict=True)
        figure.legend(
            named.values(),
            named.keys(),
            loc="outside lower center",
            ncols=len(named),
            frameon=False,
        )

    width = max(6.0, 0.22 * len(categories) * (len(methods) + 1) + 1.0)
    return drawn(draw, 2 * width, 3.8 * len(temperatures) + 0.5)


def _bars(axis: Axes, groups: dict[str, Any], methods: Sequence[str], key: str) -> None:
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        if method not in groups["all"]:
            continue
        heights = [group[method][key] or 0 for group in groups.values()]
        left = [place + (index - (len(methods) - 1) / 2) * width for place in range(len(groups))]
        axis.bar(left, heights, width, label=method, color=_COLORS[index % len(_COLORS)])
    names = [name.replace("_", " ") for name in groups]
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor")
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(bottom=0)
