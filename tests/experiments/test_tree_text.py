from __future__ import annotations

import re

import hypothesis
import numpy as np
from hypothesis import strategies as st

from experiments import tree_text
from jspec import trees

SMALL = (-1, 0, 0, 1, 1, 3)


def test_a_small_tree_exactly() -> None:
    assert tree_text.describe(SMALL, [0.6, 0.2]) == (
        "5 drafts and the pending token (node 0), depth 3, 3 paths\n"
        "\n"
        "0 (100 %)\n"
        "├─ 1 (60 %)\n"
        "│  ├─ 3 (36 %)\n"
        "│  │  └─ 5 (22 %)\n"
        "│  └─ 4 (12 %)\n"
        "└─ 2 (20 %)\n"
        "\n"
        "                     ancestors\n"
        "node  parent  depth      (hex)  reached\n"
        "----  ------  -----  ---------  -------\n"
        "0          -      0         01    100 %\n"
        "1          0      1         03     60 %\n"
        "2          0      1         05     20 %\n"
        "3          1      2         0b     36 %\n"
        "4          1      2         13     12 %\n"
        "5          3      3         2b     22 %\n"
        "Ancestors: bit i of the number is set where node i is the node itself or above it.\n"
        "\n"
        "Paths\n"
        "0  2\n"
        "0  1  4\n"
        "0  1  3  5"
    )
    assert "reached" not in tree_text.describe(SMALL)


def test_a_chain_exactly() -> None:
    assert tree_text.drawing((-1, 0, 1), ["a", "b", "c"]) == "a\n└─ b\n   └─ c"
    assert tree_text.drawing((-1,), ["a"]) == "a"
    assert tree_text.paths((-1, 0, 1)) == [(0, 1, 2)]


@st.composite
def parents(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(1, 128))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))


@hypothesis.given(parents())
def test_the_tree_can_be_read_back_from_its_drawing(tree: tuple[int, ...]) -> None:
    labels = [str(node) for node in range(len(tree))]
    found: dict[int, int] = {}
    last_at: dict[int, int] = {}
    for line in tree_text.drawing(tree, labels).splitlines():
        indent, number = re.fullmatch(r"([│├└─ ]*)(\d+)", line).groups()  # type: ignore[union-attr]
        depth, node = len(indent) // 3, int(number)
        found[node] = last_at[depth - 1] if depth else -1
        last_at[depth] = node
    assert tuple(found[node] for node in range(len(tree))) == tree
    # The bits hold the same tree: a node's are its parent's and its own.
    bits = [int(text, 16) for text in tree_text.ancestor_bits(trees.from_parents(tree))]
    for node, parent in enumerate(tree):
        assert bits[node] == (bits[parent] if parent >= 0 else 0) | 1 << node
    ways = tree_text.paths(tree)
    assert {node for way in ways for node in way} == set(range(len(tree)))
    for way in ways:
        assert way[0] == 0
        assert [tree[node] for node in way[1:]] == list(way[:-1])
        assert way[-1] not in tree


def test_bits_beyond_a_word() -> None:
    chain = trees.chain(39)
    assert tree_text.ancestor_bits(chain)[-1] == "f" * 10
    assert np.asarray(chain.ancestors).shape == (40, 2)
