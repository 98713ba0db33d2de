from __future__ import annotations

import io
import itertools
import xml.etree.ElementTree

import pytest
from matplotlib import image

from experiments import tree_plot
from jspec import tree_shapes
from tests.experiments import tree_cases

TREES = [("tree", tree_shapes.k_ary([3, 2, 1])), ("chain", tuple(range(-1, 15)))]


def check(figure: object) -> str:
    """Both files are pictures; returns the text of the SVG."""
    files = tree_plot.files(figure, "a")  # type: ignore[arg-type]
    assert list(files) == ["a.png", "a.svg"]
    picture = image.imread(io.BytesIO(files["a.png"]), "png")
    assert picture.min() < picture.max()
    root = xml.etree.ElementTree.fromstring(files["a.svg"])
    assert root.tag.endswith("svg")
    return files["a.svg"].decode()


@pytest.mark.parametrize("rates", [None, [0.5, 0.2]])
def test_pictures_of_trees(rates: list[float] | None) -> None:
    drawn = check(tree_plot.trees(TREES, rates))
    assert "<!-- tree -->" in drawn
    assert "<!-- 15 -->" in drawn
    assert ("<!-- chance to be on the accepted path -->" in drawn) == (rates is not None)
    check(tree_plot.trees([("alone", (-1,))], rates))


def test_a_tree_of_words() -> None:
    drawn = check(tree_plot.trees([("", (-1, 0, 0))], labels=["'$a$'", "'b'", "'a long word'"]))
    assert "<!-- '$a$' -->" in drawn
    assert "<!-- 'a long word' -->" in drawn


def test_a_large_tree_has_no_labels() -> None:
    assert "<!-- 100 -->" not in check(tree_plot.trees([("", tree_shapes.k_ary([100]))]))


def test_nodes_stand_apart_and_below_their_parents() -> None:
    parents = (-1, 0, 0, 0, 1, 3, 1)
    #        0
    #    1   2  3
    #   4 6     5
    assert tree_plot._places(parents) == [1.75, 0.5, 2.0, 3.0, 0.0, 3.0, 1.0]
    spread = tree_plot._places(tree_shapes.k_ary([3, 3, 2]))
    leaves = spread[-18:]
    assert all(right - left == 1 for left, right in itertools.pairwise(leaves))


def test_pictures_of_comparisons() -> None:
    section = tree_cases.comparison()
    drawn = check(tree_plot.comparison({"0": section, "1": section}))
    for word in ("open chat", "all", "chain 3", "tree 3", "Tokens a round, temperature 1"):
        assert f"<!-- {word} -->" in drawn
