"""SIGKILL at any instant, and the job goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

Drive = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def drive(tmp_path: Path, tiny_model: Path) -> Drive:
    """Run kill_driver on a job of so many rows; returns its kills, with every job finished."""

    def run(rows: int, *, scripted: bool, kills: int, kills_a_job: int = 1) -> list[dict[str, Any]]:
        file = tmp_path / "rows.jsonl"
        texts = [{"token_ids": [97 + index % 26] * (1 + index % 9)} for index in range(rows)]
        file.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
        argv = [
            "jspec",
            "--experiment=batch",
            f"--model={tiny_model}",
            f"--input={file}",
            "--drafter=none",
            "--max_new_tokens=8",
            "--temperature=1",
            "--seed=5",
            "--batch_size=2",
            "--compilation_cache=",
        ]
        spec = {
            "argv": argv,
            "folder": str(tmp_path),
            "rows": rows,
            "scripted": scripted,
            "kills": kills,
            "kills_a_job": kills_a_job,
            "seed": 11,
        }
        variables = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.experiments.kill_driver", json.dumps(spec)],
            env=os.environ | variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    return run


def results(folder: Path) -> dict[int, dict[str, Any]]:
    """Every line without its times, by row; none is torn and none comes twice."""
    data = (folder / "results.jsonl").read_bytes()
    assert data.endswith(b"\n")
    lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    found = {line["index"]: line | {"timing": None} for line in lines}
    assert len(found) == len(lines)
    return found


def check(folder: Path, jobs: set[str], rows: int) -> None:
    """All jobs ended with what an undisturbed one gives."""
    whole = results(folder / "whole")
    assert len(whole) == rows
    assert len({tuple(line["token_ids"]) for line in whole.values()}) > rows / 2
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    for job in jobs:
        assert results(folder / job) == whole, job
        config = json.loads((folder / job / "config.json").read_text())
        assert config["experiment"] == "batch"
        ended = json.loads((folder / job / "summary.json").read_text())
        assert ended | {"last_process": None} == summary | {"last_process": None}
        assert {path.name for path in (folder / job).iterdir()} <= {
            "config.json",
            "lock",
            "results.jsonl",
            "settings.json",
            "summary.json",
        }


def check_spread(kills: list[dict[str, Any]], rows: int) -> None:
    """They came before the first result, and at many places among the results."""
    lines = [kill["lines"] for kill in kills]
    among = [count for count in lines if 0 < count < rows]
    assert lines.count(0) > 0
    assert len(among) > len(kills) / 2
    assert len(set(among)) > len(kills) / 4
    # How many rows end before a signal arrives is the machine's business; where they differ is not.
    assert max(among) - min(among) > rows / 4


@pytest.mark.slow
def test_a_kill_at_random_instants(drive: Drive, tmp_path: Path) -> None:
    kills = drive(80, scripted=False, kills=20, kills_a_job=5)
    assert len(kills) == 20
    check_spread(kills, 80)
    check(tmp_path, {kill["job"] for kill in kills}, 80)


@pytest.mark.slow
def test_a_hundred_kills_of_jobs_without_a_model(drive: Drive, tmp_path: Path) -> None:
    kills = drive(60, scripted=True, kills=100, kills_a_job=10)
    assert len(kills) == 100
    check_spread(kills, 60)
    check(tmp_path, {kill["job"] for kill in kills}, 60)


@pytest.mark.slow
def test_a_kill_at_every_call_to_the_system(drive: Drive, tmp_path: Path) -> None:
    kills = drive(5, scripted=True, kills=0)
    # Each of the five lines, and the files around them, were cut in the middle.
    assert {kill["lines"] for kill in kills} == {0, 1, 2, 3, 4, 5}
    assert len(kills) > 20
    check(tmp_path, {kill["job"] for kill in kills}, 5)
