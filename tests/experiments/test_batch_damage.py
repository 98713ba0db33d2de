"""A batch job whose files were damaged: what is done again, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.experiments.batch_jobs import ROWS, Command, Killed, kill_after, read, untimed


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.mark.parametrize("name", ["config.json", "summary.json", "settings.json.partial"])
def test_a_torn_file_beside_the_results_is_no_obstacle(
    name: str, run_batch: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            run_batch(rows=ROWS[:2])
    (job / name).write_bytes(b'{"experiment": "ba')
    assert run_batch(rows=ROWS[:2]) == 0
    assert read(job / "config.json")["experiment"] == "batch"
    assert read(job / "summary.json")["rows"] == 2


@pytest.mark.parametrize("name", ["settings.json", "results.jsonl", "config.json"])
def test_a_folder_of_something_else_is_refused(
    name: str, run_batch: Command, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch(rows=ROWS[:1]) == 0
    if name == "settings.json":
        (job / name).write_bytes(b'{"format": 2, "fla')
    else:
        (job / "settings.json").unlink()
        if name == "config.json":
            (job / "results.jsonl").unlink()
    assert run_batch(rows=ROWS[:1]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "settings.json" in sentence
    assert "another --output" in sentence


@pytest.mark.parametrize(
    "damage",
    [
        '{"index": 0}',
        '{"index": 0, "error": null}',
        '{"index": 0, "id": "first", "error": null, "finish_reason": "stop"}',
    ],
)
def test_a_line_that_lacks_something_is_done_again(
    damage: str, run_batch: Command, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch("--seed=1", rows=ROWS[:2]) == 0
    pieces = untimed(job)
    summary = read(job / "summary.json")
    path = job / "results.jsonl"
    path.write_text("".join([f"{damage}\n", *path.read_text().splitlines(keepends=True)[1:]]))
    (job / "summary.json").unlink()
    assert run_batch(rows=ROWS[:2]) == 0
    assert "1 lines of" in capsys.readouterr().err
    assert untimed(job) == pieces
    assert read(job / "summary.json") | {"last_process": None} == summary | {"last_process": None}


# What settings.json may have become; a format alone, and one of another version.
DAMAGED = [
    {},
    {"format": 2},
    {"format": 2, "flags": {}, "input": []},
    {"format": 2, "flags": [], "input": [], "seed": 1},
    {"format": 2, "flags": {}, "input": {"rows": {}}, "seed": 1},
    {"format": 2, "flags": {}, "input": [["rows", 1]], "seed": 1},
    {"format": 2, "flags": {}, "input": [["rows", "1", None]], "seed": 1},
    {"format": 2, "flags": {}, "input": [], "seed": None},
    {"format": "2", "flags": {}, "input": [], "seed": 1},
    {"format": 1},
]


@pytest.mark.parametrize("settings", DAMAGED)
def test_settings_that_lack_something_are_an_error_beside_results_alone(
    settings: dict[str, Any], run_batch: Command, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch("--seed=3", rows=ROWS[2:3]) == 0
    whole = read(job / "settings.json")
    (job / "settings.json").write_text(json.dumps(settings))
    before = {path.name: path.read_bytes() for path in job.iterdir()}
    assert run_batch(rows=ROWS[2:3]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("error: output=")
    assert "another --output" in sentence
    assert ("another version" if settings == {"format": 1} else "settings.json") in sentence
    assert {path.name: path.read_bytes() for path in job.iterdir()} == before
    # Without results there is nothing to lose.
    (job / "results.jsonl").unlink()
    assert run_batch("--seed=3", rows=ROWS[2:3]) == 0
    assert read(job / "settings.json") == whole


def test_settings_that_lack_their_seed_alone_are_begun_anew(run_batch: Command, job: Path) -> None:
    assert run_batch("--seed=3", rows=ROWS[2:3]) == 0
    whole = read(job / "settings.json")
    (job / "results.jsonl").unlink()
    (job / "settings.json").write_text(json.dumps(whole | {"seed": None}))
    assert run_batch(rows=ROWS[2:3]) == 0
    assert type(read(job / "settings.json")["seed"]) is int


def test_no_line_that_a_job_writes_is_damaged(run_batch: Command, job: Path) -> None:
    rows = [
        *ROWS,
        "{",
        {"prompt": "two", "n": 2, "temperature": 1},
        {"prompt": "p", "logprobs": 1, "prompt_logprobs": 1},
        {"turns": ["short", "long " * 300]},
        {"turns": ["t"], "n": 2},
    ]
    arguments = ["--drafter=ngram", "--seed=1"]
    assert run_batch(*arguments, rows=rows) == 1
    before = (job / "results.jsonl").read_bytes()
    (job / "summary.json").unlink()
    assert run_batch(*arguments, rows=rows) == 1
    assert (job / "results.jsonl").read_bytes() == before
    assert read(job / "summary.json")["rows"] == len(rows)


def test_a_folder_of_other_things_is_not_taken_over(
    run_jspec: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "hi"}\n')
    arguments = ["--experiment=batch", f"--input={source}", f"--output={folder}"]
    assert run_jspec(*arguments) == 2
    assert "holds notes.md without a settings.json" in capsys.readouterr().err
    assert (folder / "notes.md").read_text() == "mine"
