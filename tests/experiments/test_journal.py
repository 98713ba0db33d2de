from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import journal
from experiments.journal import Results
from jspec.errors import InputError

LINES: list[dict[str, Any]] = [
    {"index": 2, "error": None, "text": "\u00e9\U0001f600"},
    {"index": 0, "error": "bad", "text": ""},
    {"index": 1, "error": None, "text": "\ud800"},
]


def everything(line: dict[str, Any]) -> bool:
    return True


def fill(folder: Path) -> bytes:
    results = Results(folder, 4, everything, everything)
    for line in LINES:
        results.write(line["index"], {name: item for name, item in line.items() if name != "index"})
    results.close()
    return results.path.read_bytes()


def indices(folder: Path) -> list[int]:
    data = (folder / journal.RESULTS).read_bytes()
    return [json.loads(line)["index"] for line in data.splitlines()]


def test_lines_are_json_in_order(tmp_path: Path) -> None:
    data = fill(tmp_path)
    assert [json.loads(line) for line in data.split(b"\n")[:-1]] == LINES
    data.decode("utf-8")
    results = Results(tmp_path, 4, everything, everything)
    assert results.finished == 3
    assert [results.has(index) for index in range(4)] == [True, True, True, False]
    results.write(2, {"error": "a second time"})
    results.close()
    assert results.path.read_bytes() == data


def test_a_file_cut_at_any_byte_goes_on(tmp_path: Path) -> None:
    data = fill(tmp_path)
    path = tmp_path / journal.RESULTS
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        results = Results(tmp_path, 4, everything, everything)
        whole = [end for end in ends if end <= size]
        assert results.finished == len(whole)
        assert results.path.stat().st_size == max(whole, default=0)
        assert results.damaged == (size not in (0, *ends))
        for line in LINES:
            results.write(
                line["index"], {name: item for name, item in line.items() if name != "index"}
            )
        results.close()
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    "damage",
    [
        b"\0\0\0\0\n",
        b"\n",
        b"[1]\n",
        b"{}\n",
        b'{"index": 9, "error": null}\n',
        b'{"index": -1, "error": null}\n',
        b'{"index": true, "error": null}\n',
        b'{"index": 2, "error": "once more"}\n',
        b'{"index": 3, "text": "\xf0\x9f\n',
    ],
)
def test_damage_between_whole_lines_costs_none_of_them(damage: bytes, tmp_path: Path) -> None:
    data = fill(tmp_path)
    first, rest = data[: data.index(b"\n") + 1], data[data.index(b"\n") + 1 :]
    (tmp_path / journal.RESULTS).write_bytes(first + damage + rest)
    results = Results(tmp_path, 4, everything, everything)
    results.close()
    assert (results.finished, results.damaged) == (3, 1)
    assert results.path.read_bytes() == data


def test_lines_that_are_not_kept_are_to_be_done_again(tmp_path: Path) -> None:
    fill(tmp_path)
    results = Results(tmp_path, 4, everything, lambda line: line["error"] is None)
    assert (results.finished, results.damaged) == (2, 0)
    assert not results.has(0)
    results.write(0, {"error": None})
    results.close()
    assert indices(tmp_path) == [2, 1, 0]


def test_lines_that_lack_something_are_damaged_and_not_asked_about(tmp_path: Path) -> None:
    data = fill(tmp_path)
    first = data.index(b"\n") + 1
    (tmp_path / journal.RESULTS).write_bytes(data[:first] + b'{"index": 3}\n' + data[first:])
    asked: list[int] = []

    def keep(line: dict[str, Any]) -> bool:
        asked.append(line["index"])
        return True

    results = Results(tmp_path, 4, lambda line: "error" in line, keep)
    results.close()
    assert (results.finished, results.damaged) == (3, 1)
    assert asked == [2, 0, 1]
    assert not results.has(3)
    assert results.path.read_bytes() == data


def full(share: float) -> Callable[[int, bytes], int]:
    """A disk that takes that share of what is written, and then no more."""
    write, calls = os.write, []

    def limited(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1 or not share:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, bytes(data)[: int(len(data) * share)])

    return limited


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_full_disk_leaves_whole_lines(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = fill(tmp_path)
    results = Results(tmp_path, 4, everything, everything)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full(share))
        with pytest.raises(InputError, match=r"No space left.*what is finished is kept"):
            results.write(3, {"error": None, "text": "x" * 100})
    assert results.path.read_bytes() == data
    assert not results.has(3)
    # Once there is space, the same process could go on too.
    results.write(3, {"error": None})
    results.close()
    assert indices(tmp_path) == [2, 0, 1, 3]


def test_a_full_disk_while_repairing_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = fill(tmp_path)
    monkeypatch.setattr(os, "write", full(0.5))
    with pytest.raises(InputError, match="No space left"):
        Results(tmp_path, 4, everything, lambda line: line["error"] is None)
    assert (tmp_path / journal.RESULTS).read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == [journal.RESULTS]


def test_a_failing_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path, 4, everything, everything)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(InputError, match=r"output=.*Input/output error"):
        results.write(0, {"error": None})


def test_the_system_may_take_a_byte_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fill(tmp_path)
    (tmp_path / journal.RESULTS).unlink()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1]))
    assert fill(tmp_path) == whole


def test_syncs_are_about_a_second_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, synced = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    results = Results(tmp_path, 1000, everything, everything)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(clock[0]))
    for index in range(1000):
        results.write(index, {"error": None})
        clock[0] += 0.01
    assert synced == pytest.approx([100 + second for second in range(10)], abs=0.2)
    results.close()
    assert len(synced) == 11


def test_a_json_file_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    journal.write_json(path, {"a": 1})
    (tmp_path / "config.json.partial").write_text('{"a"')  # of a process that was killed
    journal.write_json(path, {"a": 2})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full(0.5))
        with pytest.raises(InputError, match="No space left"):
            journal.write_json(path, {"a": 3})
    assert journal.read_json(path) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("data", [b"", b'{"a": ', b"\xff", b"\0\0", b"[]", b"[" * 100_000])
def test_a_torn_json_file_is_none(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert journal.read_json(path) is None
    path.write_bytes(data)
    assert journal.read_json(path) is None


HOLD = """
import pathlib, sys, time
from experiments import journal
with journal.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_kept_out_until_the_first_is_dead(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    folder = tmp_path / "job"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(InputError, match=rf"another process \(number {process.pid}\)"),
            journal.locked(folder),
        ):
            pass
        process.kill()
        process.wait()
    with journal.locked(folder):
        assert (folder / journal.LOCK).read_text() == f"{os.getpid()}\n"
    with journal.locked(folder):
        pass


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"output=.*cannot be written"),
        journal.locked(tmp_path / "file" / "job"),
    ):
        pass
