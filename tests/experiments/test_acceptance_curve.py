from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import acceptance_curve, tree_plot
from experiments.acceptance_curve import Curve
from jspec.errors import InputError


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_training_and_its_repeated_lines(tmp_path: Path) -> None:
    write(
        tmp_path / "progress.jsonl",
        {"step": 1, "tokens": 100, "loss": 3.0},
        {"step": 1, "tokens": 100, "held_out": {"block_efficiency": 1.2}},
        {"step": 2, "tokens": 200, "held_out": {"cross_entropy": [1.0]}},
        {"step": 4, "tokens": 400, "block_efficiency": 1.5},
        {"step": 2, "tokens": 200, "block_efficiency": 1.3},
        {"step": 2, "tokens": 200, "block_efficiency": 1.4},
    )
    expected = Curve(tmp_path.name, (100, 200, 400), (1.2, 1.4, 1.5))
    assert acceptance_curve.read(str(tmp_path)) == expected
    named = acceptance_curve.read(f"eagle3={tmp_path / 'progress.jsonl'}")
    assert (named.name, named.tokens) == ("eagle3", expected.tokens)


def test_a_doubling_is_the_slope_of_the_later_half() -> None:
    # A steep start, then 0.1 a doubling.
    curve = Curve("eagle3", (1, 2, 100, 200, 400, 800), (0.1, 1.0, 1.5, 1.6, 1.7, 1.8))
    found = acceptance_curve.summary(curve)
    assert found["gain_a_doubling"] == pytest.approx(0.1)
    assert found["extrapolated"] == [
        [1600, pytest.approx(1.9)],
        [3200, pytest.approx(2.0)],
    ]
    (row,) = acceptance_curve.section([curve]).rows
    assert row == ["eagle3", "6", "800", "1.80", "+0.100", "1.90", "2.00"]
    short = acceptance_curve.section([Curve("new", (1, 2), (1.0, 1.1))])
    assert short.rows[0][4:] == ["-", "-", "-"]


@pytest.mark.parametrize("first", [0, 100])
def test_the_picture(first: int) -> None:
    curves = [
        Curve("eagle3", (first, 200, 400, 800), (1.0, 1.6, 1.7, 1.8)),
        Curve("medusa", (150, 300), (1.1, 1.2)),
    ]
    drawn = tree_plot.files(acceptance_curve.figure(curves), "curve")["curve.svg"].decode()
    for words in ("eagle3", "medusa", "+0.10 a doubling", "dotted: extrapolated"):
        assert f"<!-- {words} -->" in drawn


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no point"),
        ([{"tokens": 1}], "has no point"),
        ([{"block_efficiency": 1.0}], "is no point"),
        ([{"block_efficiency": "x", "tokens": 1}], "is no point"),
        ([{"block_efficiency": 1.0, "tokens": -1}], "is no point"),
        ([[1]], "is no point"),
    ],
)
def test_what_is_no_curve(lines: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        acceptance_curve.read(str(write(tmp_path / "a.jsonl", *lines)))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        acceptance_curve.read(str(tmp_path / "nothing.jsonl"))
