"""The folder of a job that goes on where it was killed.

    settings.json   what the results depend on; another run must agree with it
    results.jsonl   a line a finished row, only ever appended to
    lock            held by the process that works on the job

Nothing here trusts that the last process came to an end: whole files appear under their names by
renaming, and what is left of a line that was being written is cut off before the next is written.
A kill loses no line that was written; a power failure at most those of the last second.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import runs
from jspec.errors import InputError, require

SETTINGS = "settings.json"
RESULTS = "results.jsonl"
LOCK = "lock"
_PARTIAL = ".partial"
_SYNC_EVERY = 1.0  # seconds between two fsyncs, or more where they are slow
_SYNC_SHARE = 20
_COPY_BYTES = 1 << 20
_KEPT = "free some space and run the same command again: what is finished is kept"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from it while inside.

    The lock is the system's: it ends with the process, however that ends.

    Raises:
        InputError: another process works on the job, or the folder cannot be written.
    """
    # POSIX alone has it, and the other experiments run elsewhere too.
    import fcntl

    with _disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            raise InputError(
                "output",
                str(folder),
                f"is being worked on by another process (number {holder})",
                "wait for it to end, or give another --output",
            ) from None
        except OSError as error:
            raise InputError(
                "output",
                str(folder),
                f"cannot be locked ({error.strerror})",
                "give a folder on another file system",
            ) from error
        with _disk(folder):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is there as a whole or not at all, whatever happens meanwhile.

    Raises:
        InputError: the disk is full.
    """
    data = f"{runs.to_json(dict(value), indent=2)}\n".encode("utf-8", "backslashreplace")
    partial = path.with_name(path.name + _PARTIAL)
    with _disk(path):
        with _created(partial) as descriptor:
            _write(descriptor, data)
        _put_in_place(partial, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what `write_json` wrote; None where there is no such file, or not a whole one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return None
    except OSError as error:
        raise InputError(
            "output", str(path), f"cannot be read ({error.strerror})", "check its permissions"
        ) from error
    return value if isinstance(value, dict) else None


def remove(path: Path) -> None:
    """Remove a file that may be missing."""
    with _disk(path):
        path.unlink(missing_ok=True)


def has_results(folder: Path) -> bool:
    """Tell whether anything has been finished in the folder."""
    path = folder / RESULTS
    return path.exists() and path.stat().st_size > 0


class Results:
    """The lines of results.jsonl, one for each finished row of the job.

    Lines that were cut short, are damaged or come twice are taken out first.

    Args:
        folder: of the job, locked.
        rows: of the job.
        whole: whether a line has everything that a line must have; others are damaged.
        keep: whether a whole line stays; the rows of others are to be done again.

    Attributes:
        path: of the file.
        rows: of the job.
        finished: rows that have a line.
        damaged: lines that were taken out though `keep` was not asked.

    Raises:
        InputError: the file cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        rows: int,
        whole: Callable[[dict[str, Any]], bool],
        keep: Callable[[dict[str, Any]], bool],
    ) -> None:
        self.path = folder / RESULTS
        self.rows = rows
        self.finished = 0
        self.damaged = 0
        self._done = bytearray(rows)
        self._next_sync = 0.0
        self._whole = whole
        self._repair(keep)
        with _disk(self.path):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._end = os.fstat(self._descriptor).st_size
            _sync_folder(folder)

    def has(self, index: int) -> bool:
        """Tell whether the row is finished."""
        return bool(self._done[index])

    def write(self, index: int, line: Mapping[str, Any]) -> None:
        """Append the line of a row, unless the row has one.

        The line survives the process from now on, and a power failure from the next `sync`, which
        comes by itself about once a second.

        Args:
            index: of the row.
            line: its result.

        Raises:
            InputError: the disk is full; the file is as it was before.
        """
        if self._done[index]:
            return
        text = runs.to_json({"index": index, **line})
        data = f"{text}\n".encode("utf-8", "backslashreplace")
        with _disk(self.path):
            try:
                _write(self._descriptor, data)
                self._end += len(data)
            except BaseException:
                # A full disk can still shorten a file; if not, the next run will.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                raise
        self._done[index] = 1
        self.finished += 1
        if time.monotonic() >= self._next_sync:
            self.sync()

    def sync(self) -> None:
        """Have the system put on the disk what has been written.

        Raises:
            InputError: it cannot.
        """
        started = time.monotonic()
        with _disk(self.path):
            os.fsync(self._descriptor)
        now = time.monotonic()
        self._next_sync = now + max(_SYNC_EVERY, _SYNC_SHARE * (now - started))

    def close(self) -> None:
        """Sync and close.

        Raises:
            InputError: the lines of the last second may be lost in a power failure.
        """
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def _repair(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Find the lines that stay, and take out all others."""
        if not self.path.exists():
            return
        spans: list[tuple[int, int]] = []  # of neighbouring lines that stay, in bytes
        end = 0
        with _disk(self.path):
            with self.path.open("rb") as file:
                for data in file:
                    start, end = end, end + len(data)
                    if not self._stays(data, keep):
                        continue
                    if spans and spans[-1][1] == start:
                        spans[-1] = (spans[-1][0], end)
                    else:
                        spans.append((start, end))
            if [(0, end)] != (spans or [(0, 0)]):
                self._keep(spans)

    def _stays(self, data: bytes, keep: Callable[[dict[str, Any]], bool]) -> bool:
        value = _parse(data)
        index = value.get("index") if value is not None else None
        if value is None or type(index) is not int or not 0 <= index < len(self._done):
            self.damaged += 1
            return False
        if self._done[index] or not self._whole(value):
            self.damaged += 1
            return False
        if not keep(value):
            return False
        self._done[index] = 1
        self.finished += 1
        return True

    def _keep(self, spans: list[tuple[int, int]]) -> None:
        if len(spans) <= 1 and (not spans or spans[0][0] == 0):
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                os.ftruncate(descriptor, spans[0][1] if spans else 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            return
        partial = self.path.with_name(RESULTS + _PARTIAL)
        with self.path.open("rb") as file, _created(partial) as descriptor:
            for start, end in spans:
                file.seek(start)
                while start < end:
                    data = file.read(min(_COPY_BYTES, end - start))
                    _write(descriptor, data)
                    start += len(data)
        _put_in_place(partial, self.path)


def require_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], remedy: str) -> None:
    """Raise `InputError` where a setting is not what the job was begun with."""
    for name, value in wanted.items():
        require(
            stored.get(name) == value,
            name,
            "not given" if value is None else value,
            f"is not what this job was begun with: {stored.get(name)!r}",
            remedy,
        )


def _parse(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """Open a new file for writing; it is on the disk afterwards, or gone if that failed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it: the system may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _put_in_place(partial: Path, path: Path) -> None:
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Put the names of a folder's files on the disk, where the file system knows how."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn the system's complaints about a path into one about --output."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "output",
            str(path),
            f"cannot be written ({error.strerror or error})",
            _KEPT if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give another --output",
        ) from error
