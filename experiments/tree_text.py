"""A token tree as text: drawn with lines, its nodes in a table, its paths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments import tables
from jspec import tree_shapes, trees
from jspec.trees import Topology


def drawing(parents: Sequence[int], labels: Sequence[str]) -> str:
    """Return a node a line, children below their parent and to the right of it.

    Args:
        parents: of the nodes, -1 for the root.
        labels: what stands at each node, on one line.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    lines = [labels[0]]
    # Nodes to come with what stands before them: no recursion, a chain is 127 deep.
    waiting = [(node, "", node == children[0][-1]) for node in reversed(children[0])]
    while waiting:
        node, before, last = waiting.pop()
        lines.append(f"{before}{'└─ ' if last else '├─ '}{labels[node]}")
        below = f"{before}{'   ' if last else '│  '}"
        waiting += [
            (child, below, child == children[node][-1]) for child in reversed(children[node])
        ]
    return "\n".join(lines)


def paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ways from the root to every leaf, in the order of the leaves."""
    inner = set(parents)
    found = []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path, node = [leaf], parents[leaf]
            while node >= 0:
                path.append(node)
                node = parents[node]
            found.append(tuple(reversed(path)))
    return found


def ancestor_bits(topology: Topology) -> list[str]:
    """Return each node's packed ancestor-or-self bits in hexadecimal, bit i for node i."""
    digits = -(-topology.size // 4)
    words = np.asarray(topology.ancestors, np.uint32)
    values = [sum(int(word) << 32 * place for place, word in enumerate(row)) for row in words]
    return [f"{value:0{digits}x}" for value in values]


def describe(parents: Sequence[int], rates: Sequence[float] | None = None) -> str:
    """Return everything about a tree as text.

    Args:
        parents: of the nodes.
        rates: p_b, for every node's chance to be reached; None leaves that out.
    """
    topology = trees.from_parents(tuple(parents))
    chances = None if rates is None else tree_shapes.chances(parents, rates)
    ways = paths(parents)
    title = (
        f"{len(parents) - 1} drafts and the pending token (node 0), depth "
        f"{int(topology.depths.max())}, {len(ways)} paths"
    )
    labels = [str(node) for node in range(len(parents))]
    header = ["node", "parent", "depth", "ancestors\n(hex)"]
    columns = [
        labels,
        ["-" if parent < 0 else str(parent) for parent in parents],
        [str(depth) for depth in topology.depths],
        ancestor_bits(topology),
    ]
    if chances is not None:
        labels = [
            f"{node} ({tables.percent(chance)})"
            for node, chance in zip(labels, chances, strict=True)
        ]
        header.append("reached")
        columns.append([tables.percent(chance) for chance in chances])
    table = tables.render(header, [list(row) for row in zip(*columns, strict=True)])
    shown = "\n".join("  ".join(map(str, path)) for path in ways)
    bits = "Ancestors: bit i of the number is set where node i is the node itself or above it."
    return "\n\n".join([title, drawing(parents, labels), f"{table}\n{bits}", f"Paths\n{shown}"])
