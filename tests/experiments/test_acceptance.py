from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.experiments import pages


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [("1", "sql", "ab ab ab"), ("2", "math_reasoning", "the cat")]
    path.write_text(
        "".join(
            json.dumps({"question_id": question, "category": category, "turns": [turn]}) + "\n"
            for question, category, turn in rows
        )
    )
    return path


def test_drafters_by_category_and_temperature(
    run_jspec: Callable[..., int],
    tiny_model: Path,
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    curve = tmp_path / "progress.jsonl"
    curve.write_text('{"tokens": 10, "block_efficiency": 1.5}\n')
    status = run_jspec(
        "--experiment=acceptance",
        f"--model={tiny_model}",
        f"--workloads={questions}",
        "--acceptance_drafters=ngram,ngram@dynamic:6",
        "--temperatures=0,1",
        "--max_new_tokens=8",
        "--ignore_eos",
        "--batch_size=1",  # as what is timed, so that its programs are compiled already
        "--seed=1",
        "--timed",
        "--timed_drafters=ngram",
        "--timed_repeats=1",
        f"--curve=eagle3={curve}",
        f"--output={tmp_path / 'runs'}",
    )
    assert status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    places = [(line["temperature"], line["drafter"], line["question_id"]) for line in lines]
    drafters = ("ngram", "ngram@dynamic:6")
    assert places == [(t, d, q) for t in (0, 1) for d in drafters for q in ("1", "2")]
    for line in lines:
        assert line["forced_positions"] == 8
        assert 0 <= line["forced_overlap"] <= line["forced_drafted"] <= 8
        assert line["identical"] is (True if line["temperature"] == 0 else None)
        assert line["emitted"] == 8
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["acceptance"]) == ["0", "1"]
    assert list(summary["speed"]["0"]) == ["ngram"]
    assert summary["drafters"]["ngram@dynamic:6"]["drafts"] == 6
    assert summary["drafters"]["ngram"]["drafts"] == 4  # gamma's own default here
    assert summary["curves"][0]["block_efficiency"] == [1.5]
    assert len((folder / "timing.jsonl").read_text().splitlines()) == 8
    table = (folder / "table.txt").read_text()
    assert table in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    stems = ("block_efficiency", "overlap", "rates-0", "rates-1", "speed", "curve")
    assert pages.pictures(page) == [(folder / f"{stem}.png").read_bytes() for stem in stems]


def test_curves_alone_need_no_model(
    run_jspec: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "progress.jsonl"
    curve.write_text('{"tokens": 10, "held_out": {"block_efficiency": 1.5}}\n')
    runs = tmp_path / "runs"
    assert run_jspec("--experiment=acceptance", f"--curve={curve}", f"--output={runs}") == 0
    (folder,) = runs.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "curve.png", "curve.svg", "summary.json", "table.txt"}
    assert "1.50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "workloads is not given"),
        (["--acceptance_drafters=early-exit"], "after how many layers"),
        (["--acceptance_drafters="], "is empty"),
        (["--temperatures="], "is empty"),
        (["--temperatures=0,0.0"], "names one twice"),
        (["--gamma=0"], "drafts nothing"),
        (["--timed_repeats=2"], "has no effect without --timed"),
        (["--timed", "--timed_drafters=eagle3"], "is none of --acceptance_drafters"),
        (["--timed", "--timed_repeats=0"], "is below 1"),
        (["--drafter=ngram"], "is what --acceptance_drafters names here"),
        (["--tree=3,2"], "is what --acceptance_drafters names here"),
        (["--temperature=1"], "is one of --temperatures here"),
        (["--curve=nowhere.jsonl"], "cannot be read"),
    ],
)
def test_bad_flags(
    arguments: list[str],
    words: str,
    run_jspec: Callable[..., int],
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [f"--workloads={questions}"] if arguments else []
    command = ["--experiment=acceptance", f"--output={tmp_path / 'runs'}", *given, *arguments]
    assert run_jspec(*command) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
