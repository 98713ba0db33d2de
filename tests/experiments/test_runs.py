from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import environment, runs
from jspec.errors import InputError


def test_the_folder_has_name_time_and_tail(tmp_path: Path) -> None:
    with runs.create("bench", {"gamma": 3}, str(tmp_path / "deep" / "results")) as run:
        run.write_json(runs.SUMMARY, {})
    assert run.folder.parent == tmp_path / "deep" / "results"
    assert re.fullmatch(r"bench-\d{8}-\d{6}-[0-9a-f]{6}", run.folder.name)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["flags"] == {"gamma": 3}


def test_files_appear_when_they_are_whole(tmp_path: Path) -> None:
    with runs.create("x", {}, str(tmp_path)) as run:
        run.append(runs.METRICS, {"a": 1})
        run.append(runs.METRICS, {"b": [float("nan"), float("inf"), 0.5]})
        assert not (run.folder / runs.METRICS).exists()
    text = (run.folder / runs.METRICS).read_text()
    # NaN and infinity are no JSON.
    assert text == '{"a": 1}\n{"b": [null, null, 0.5]}\n'
    assert sorted(p.name for p in run.folder.iterdir()) == ["config.json", "metrics.jsonl"]


def test_arguments_that_are_not_utf_8_are_recorded(tmp_path: Path) -> None:
    argument = b"a\xff".decode("utf-8", "surrogateescape")
    with runs.create("x", {"prompt": argument}, str(tmp_path)) as run:
        run.append(runs.METRICS, {"prompt": argument})
    for name in ("config.json", runs.METRICS):
        text = (run.folder / name).read_bytes().decode("utf-8")
        assert '"a\\udcff"' in text, name
    assert json.loads((run.folder / "config.json").read_text())["flags"]["prompt"] == argument


def test_no_two_runs_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tails = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda size: next(tails))
    with runs.create("x", {}, str(tmp_path)) as first:
        first.write_text("mine", "1")
    # The same second, most likely; if not, the folder differs anyway.
    with runs.create("x", {}, str(tmp_path)) as second:
        pass
    assert first.folder != second.folder
    assert (first.folder / "mine").read_text() == "1"


def test_a_run_that_fails_early_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), runs.create("x", {}, str(tmp_path)):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_late_keeps_its_lines(tmp_path: Path) -> None:
    def interrupted() -> None:
        with runs.create("x", {}, str(tmp_path)) as run:
            run.append(runs.METRICS, {"a": 1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (folder,) = tmp_path.iterdir()
    assert (folder / runs.METRICS).read_text() == '{"a": 1}\n'
    assert not (folder / runs.SUMMARY).exists()


def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"output=.* cannot be written .*; free some space"),
        runs.create("x", {}, str(tmp_path / "file" / "results")),
    ):
        pass


def test_a_full_disk_is_refused_before_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with (
        pytest.raises(InputError, match="full disk"),
        runs.create("x", {}, str(tmp_path)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **keywords: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with runs.create("x", {}, str(tmp_path)) as run, monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match="No space left on device"):
            run.write_json(runs.SUMMARY, {})


def test_the_revision_is_that_of_the_checkout() -> None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    revision = (environment.describe()["git"] or {})["revision"]
    head = (root / ".git" / "HEAD").read_text().strip()
    if head.startswith("ref: "):
        loose = root / ".git" / head.removeprefix("ref: ")
        if not loose.exists():
            pytest.skip("the branch's ref is packed")
        head = loose.read_text().strip()
    assert revision == head
