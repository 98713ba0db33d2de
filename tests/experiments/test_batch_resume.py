"""A batch job that goes on: after what, with what, and what it then gives."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jspec
from experiments import input_files, journal
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.requests import Delta, Request
from tests import tiny
from tests.experiments.batch_jobs import (
    ROWS,
    Command,
    Killed,
    kill_after,
    read,
    results,
    untimed,
    write,
)


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def test_going_on_gives_what_would_have_been_given(
    run_batch: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No seed is given: the first process draws one, and it holds for the others.
    rows = [*ROWS, "{", *({"prompt": "x" * n, "temperature": 1} for n in range(1, 5))]
    for lines in (3, 0, 4):
        with monkeypatch.context() as patch:
            kill_after(patch, lines)
            with pytest.raises(Killed):
                run_batch(rows=rows)
        assert not (job / "summary.json").exists()
    assert len(results(job)) == 7
    assert run_batch(rows=rows) == 1
    pieces = untimed(job)
    seed = read(job / "settings.json")["seed"]
    summary = read(job / "summary.json")
    assert summary["last_process"]["rows"] == 4

    for path in job.iterdir():
        path.unlink()
    assert run_batch(f"--seed={seed}", rows=rows) == 1
    assert untimed(job) == pieces
    whole = read(job / "summary.json")
    assert summary | {"last_process": None} == whole | {"last_process": None}


def test_what_is_finished_loads_no_model(
    run_batch: Command,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_batch(rows=ROWS[:2]) == 0
    summary = (job / "summary.json").read_bytes()

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(jspec, "load", refuse)
    capsys.readouterr()
    assert run_batch(rows=ROWS[:2]) == 0
    assert "Everything is finished: 2 rows" in capsys.readouterr().err
    assert (job / "summary.json").read_bytes() == summary
    # A kill between the last row and the summary: the sums come from the lines.
    (job / "summary.json").unlink()
    assert run_batch(rows=ROWS[:2]) == 0
    assert read(job / "summary.json") == json.loads(summary) | {"last_process": None}


# Arguments of the second run, and what the one sentence must name.
OTHERS = [
    (["--gamma=3", "--drafter=ngram"], ["drafter='ngram'", "'none'"]),
    (["--temperature=0.5"], ["temperature=0.5", "begun with: 0.0"]),
    (["--max_new_tokens=9"], ["max_new_tokens=9", "begun with: 8"]),
    (["--raw"], ["raw=True", "begun with: False"]),
    (["--stop_token_ids=1"], ["stop_token_ids=['1']", "begun with: []"]),
    (["--dtype=bfloat16"], ["dtype='bfloat16'", "'float32'"]),
    (["--seed=4"], ["seed=4", "begun with: 3"]),
]


@pytest.mark.parametrize(("arguments", "words"), OTHERS)
def test_other_settings_are_refused(
    arguments: list[str],
    words: list[str],
    run_batch: Command,
    job: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_batch("--seed=3", rows=ROWS[:1]) == 0
    before = {path.name: path.read_bytes() for path in job.iterdir()}
    assert run_batch(*arguments, rows=ROWS[:1]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    for word in [*words, "another --output"]:
        assert word in sentence
    assert {path.name: path.read_bytes() for path in job.iterdir()} == before


def test_other_input_is_refused(
    run_batch: Command, tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_batch(rows=ROWS[:1]) == 0
    assert run_batch(rows=ROWS[:2]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    for word in ("input=", "rows (2 rows, sha256", "rows (1 rows, sha256", "another --output"):
        assert word in sentence
    # The same content somewhere else, packed, is the same input.
    packed = tmp_path / "elsewhere" / "rows.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(f"{json.dumps(ROWS[0])}\n".encode()))
    assert run_batch(f"--input={packed}") == 0


def test_the_same_files_in_another_order_are_refused(
    run_batch: Command,
    tmp_path: Path,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = write(tmp_path / "one.jsonl", [{"prompt": "a", "id": "a"}, {"prompt": "b", "id": "b"}])
    second = write(tmp_path / "two.jsonl", [{"prompt": "c", "id": "c"}])
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            run_batch(f"--input={first}", f"--input={second}")
    before = {path.name: path.read_bytes() for path in job.iterdir()}
    assert run_batch(f"--input={second}", f"--input={first}") == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("error: input=")
    for word in ("two, one", "in the order one, two", "another --output"):
        assert word in sentence
    assert {path.name: path.read_bytes() for path in job.iterdir()} == before
    assert run_batch(f"--input={first}", f"--input={second}") == 0
    assert [line["id"] for line in results(job)] == ["a", "b", "c"]


def test_an_order_binds_from_the_first_result_on(
    run_batch: Command, base_model: Path, tmp_path: Path, job: Path
) -> None:
    first = write(tmp_path / "one.jsonl", [{"prompt": "a", "id": "a"}])
    second = write(tmp_path / "two.jsonl", [{"prompt": "c", "id": "c"}])
    inputs = [f"--input={first}", f"--input={second}"]
    assert run_batch(*inputs, f"--model={base_model}") == 2  # it has no template
    assert run_batch(*inputs[::-1]) == 0
    assert [line["id"] for line in results(job)] == ["c", "a"]


def test_a_mark_alone_on_the_first_line_is_no_row(
    run_batch: Command, tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"prompt":"x"}\n{"prompt":"y"}\n')
    assert run_batch(f"--input={path}") == 0
    assert "Finished: 2 rows" in capsys.readouterr().err
    assert [line["id"] for line in results(job)] == ["marked:2", "marked:3"]
    assert run_batch(f"--input={path}") == 0
    assert "Everything is finished: 2 rows" in capsys.readouterr().err


def test_a_row_that_never_comes_is_no_success(
    run_batch: Command,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = input_files.lines
    with monkeypatch.context() as patch:
        patch.setattr(input_files, "lines", lambda files: itertools.islice(lines(files), 1))
        assert run_batch(rows=ROWS[:2]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 2 rows" in sentence
    assert "report" in sentence
    assert not (job / "summary.json").exists()
    assert run_batch(rows=ROWS[:2]) == 0
    assert len(results(job)) == 2


def test_the_record_is_of_the_run_that_began_the_results(
    run_batch: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any) -> None:
        raise InputError("model", "m", "cannot be loaded", "wait")

    with monkeypatch.context() as patch:
        patch.setattr(jspec, "load", missing)
        assert run_batch("--seed=1", "--batch_size=4", rows=ROWS[:1]) == 2
    assert run_batch("--seed=2", rows=ROWS[:1]) == 0
    config, settings = read(job / "config.json"), read(job / "settings.json")
    assert (config["seed"], settings["seed"]) == (2, 2)
    assert (config["flags"]["seed"], config["flags"]["batch_size"]) == (2, 2)
    assert results(job)[0]["seed"] == 2
    # It stays as it was from then on.
    before = (job / "config.json").read_bytes()
    (job / "summary.json").unlink()
    assert run_batch("--batch_size=1", rows=ROWS[:1]) == 0
    assert (job / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch_size=1"],
        ["--batch_size=5"],
        ["--rounds_per_chunk=1"],
        ["--retry_failed"],
        ["--seed=3"],
    ],
)
def test_what_leaves_the_results_alone_may_change(
    arguments: list[str], run_batch: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "cd"}, {"prompt": "ef"}]
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            run_batch("--seed=3", "--temperature=1", rows=rows)
    assert run_batch("--temperature=1", *arguments, rows=rows) == 0
    pieces = [line["token_ids"] for line in results(job)]
    (job / "results.jsonl").unlink()
    assert run_batch("--seed=3", "--temperature=1", rows=rows) == 0
    assert [line["token_ids"] for line in results(job)] == pieces


def test_a_full_disk_ends_the_job_and_loses_nothing(
    run_batch: Command,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_some, room = os.write, [2000]

    def limited(descriptor: int, data: bytes) -> int:
        size = min(len(data), room[0])
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= size
        return write_some(descriptor, bytes(data)[:size])

    with monkeypatch.context() as patch:
        # What comes before the first row has its space.
        patch.setattr(journal, "write_json", lambda path, value: path.write_text(json.dumps(value)))
        patch.setattr(os, "write", limited)
        assert run_batch("--seed=1") == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("error: output=")
    assert "No space left on device" in sentence
    assert "what is finished is kept" in sentence
    kept = untimed(job)
    assert 0 < len(kept) < len(ROWS)
    assert run_batch() == 0
    pieces = untimed(job)
    assert all(line in pieces for line in kept)
    for path in job.iterdir():
        path.unlink()
    assert run_batch("--seed=1") == 0
    assert untimed(job) == pieces


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_ends_the_job_after_the_rows_at_hand(
    number: signal.Signals,
    status: int,
    times: int,
    run_batch: Command,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream, begun = Decoder.stream, []

    def interrupted(self: Decoder, requests: list[Request]) -> Iterator[Delta]:
        begun.append(requests)
        for place, delta in enumerate(stream(self, requests)):
            if len(begun) == 2 and place == 0:
                for _ in range(times):
                    os.kill(os.getpid(), number)
            yield delta

    rows = [{"prompt": "x"}] * 6
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "stream", interrupted)
        before = signal.getsignal(number)
        assert run_batch(rows=rows) == status
        assert signal.getsignal(number) == before
    err = capsys.readouterr().err
    done = 4 if times == 1 else 2
    assert f"{done} of 6 rows are finished; run the same command again" in err
    assert len(results(job)) == done
    assert run_batch(rows=rows) == 0
    assert len(results(job)) == 6


def test_a_row_that_has_been_decoded_for_company_is_not_written_twice(
    run_batch: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            run_batch(rows=ROWS[:2])
    (first,) = results(job)
    assert run_batch(rows=ROWS[:2]) == 0
    found = results(job)
    assert len(found) == 2
    assert first in found
