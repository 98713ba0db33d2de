from __future__ import annotations

import io

import pytest
from matplotlib import image

from experiments import bench_plot
from tests import bench_summary

CATEGORIES = {"open_chat": 0.9, "costs $5 or $6": 1.5, "sql": 2.0}


@pytest.mark.parametrize(
    "speedups", [{1: 1.5, 2: 1.2, 8: 0.5}, {4: 0.3}, {1: 1.0}, {1: 1.1, 3: 0.9, 64: 30.0}]
)
def test_pictures_are_whole_and_their_sheet_has_them_all(speedups: dict[int, float]) -> None:
    summary = bench_summary.make(speedups, CATEGORIES)
    pictures = bench_plot.pictures(summary)
    assert len(pictures) == 4
    sizes = [image.imread(io.BytesIO(file), "png").shape for file in pictures.values()]
    assert len(set(sizes)) == 1
    height, width, _ = sizes[0]
    assert image.imread(io.BytesIO(bench_plot.sheet(summary)), "png").shape == (
        2 * height,
        2 * width,
        4,
    )


@pytest.mark.parametrize(
    ("speedups", "title"),
    [
        ({1: 1.5, 2: 1.2, 8: 0.5}, "Speculation pays up to batch 2, not at 8"),
        ({1: 1.5, 2: 1.2}, "Speculation pays at every batch here"),
        ({1: 0.5, 2: 0.2}, "Speculation pays at no batch here"),
        ({1: 0.9, 2: 1.2, 4: 0.8, 8: 1.1}, "Speculation pays at batch 2, 8"),
        ({1: 0.9, 2: 1.2, 4: 1.3}, "Speculation pays at batch 2, 4"),
    ],
)
def test_the_title_is_the_finding(speedups: dict[int, float], title: str) -> None:
    section = bench_summary.make(speedups, CATEGORIES)["throughput"]
    assert bench_plot._by_batch_title(section) == title


def test_tokens_given_by_the_first_drafts_of_a_round() -> None:
    # Of 20 rounds with drafts 10 accepted the first one and 5 the second one too.
    group = {"rounds": 100, "rounds_without_draft": 80, "accepted": [10, 5]}
    assert bench_plot.tokens_given(group) == pytest.approx([1, 1.5, 1.75])
    none = {"rounds": 80, "rounds_without_draft": 80, "accepted": [0, 0]}
    assert bench_plot.tokens_given(none) == [1, 1, 1]
