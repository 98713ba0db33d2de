"""The folder of a run: config.json, metrics.jsonl, summary.json and what the experiment adds.

Every file appears under its name only when it is whole. summary.json comes last, so a folder
without it belongs to a run that was cut short; a run without any result leaves no folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from experiments import environment, paths
from jspec.errors import InputError, require

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
_PARTIAL = ".partial"
_LEAST_FREE = 1 << 20
# Arguments that are not UTF-8 hold lone surrogates; the backslashed form is JSON's own escape.
_ERRORS = "backslashreplace"


@dataclasses.dataclass
class Run:
    """An open run.

    Attributes:
        folder: its own.
    """

    folder: Path
    _growing: dict[str, IO[str]] = dataclasses.field(default_factory=dict)

    def append(self, name: str, value: dict[str, Any]) -> None:
        """Add a line to a .jsonl file, which gets its name when the run ends.

        Raises:
            InputError: the disk is full.
        """
        with _disk(self.folder):
            if name not in self._growing:
                path = self.folder / f"{name}{_PARTIAL}"
                self._growing[name] = path.open("x", encoding="utf-8", errors=_ERRORS)
            self._growing[name].write(f"{to_json(value)}\n")
            self._growing[name].flush()

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file.

        Raises:
            InputError: the disk is full.
        """
        self.write_text(name, f"{to_json(value, indent=2)}\n")

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write summary.json, and in it which kernels the run went by.

        Raises:
            InputError: the disk is full.
        """
        self.write_json(SUMMARY, summary | {"kernels": environment.kernels()})

    def write_text(self, name: str, text: str) -> None:
        """Write a text file.

        Raises:
            InputError: the disk is full.
        """
        self.write_bytes(name, text.encode("utf-8", _ERRORS))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file of any kind.

        Raises:
            InputError: the disk is full.
        """
        with _disk(self.folder):
            partial = self.folder / f"{name}{_PARTIAL}"
            partial.write_bytes(content)
            partial.replace(self.folder / name)

    @contextlib.contextmanager
    def profile(self, wanted: bool) -> Iterator[None]:
        """Trace what runs inside into the folder `profile`, if `wanted`."""
        if not wanted:
            yield
            return
        with jax.profiler.trace(str(self.folder / "profile")):
            yield

    def close(self) -> None:
        """Give the growing files their names."""
        with _disk(self.folder):
            for name, file in self._growing.items():
                file.close()
                os.replace(file.name, self.folder / name)
        self._growing.clear()


@contextlib.contextmanager
def create(experiment: str, flags: dict[str, Any], output: str, **more: Any) -> Iterator[Run]:
    """Make `<output>/<experiment>-<time>-<short>/` with its config.json.

    Args:
        experiment: its name.
        flags: every flag and its value.
        output: folder of the runs, made where it is missing.
        more: further entries of config.json.

    Raises:
        InputError: the folder cannot be written; nothing has been computed.
    """
    started = datetime.datetime.now().astimezone()
    root = paths.expanded("output", output)
    run = Run(_new_folder(root, f"{experiment}-{started:%Y%m%d-%H%M%S}"))
    try:
        run.write_json(CONFIG, config(experiment, flags, started, **more))
        yield run
    except BaseException:
        if METRICS in run._growing:
            with contextlib.suppress(InputError):
                run.close()
        else:
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    run.close()


def config(
    experiment: str, flags: dict[str, Any], started: datetime.datetime, **more: Any
) -> dict[str, Any]:
    """Return what config.json says of a run; see `create`. It starts JAX's backend."""
    return {
        "experiment": experiment,
        "started": started.isoformat(timespec="seconds"),
        "command": sys.argv,
        "flags": flags,
        **more,
        **environment.describe(),
    }


def _new_folder(root: Path, stem: str) -> Path:
    with _disk(root):
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        require(
            free >= _LEAST_FREE,
            "output",
            str(root),
            f"is on a full disk ({free} bytes free)",
            "free some space, or give another --output",
        )
        while True:
            folder = root / f"{stem}-{secrets.token_hex(3)}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder


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
            "free some space, or give another --output",
        ) from error


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as all our files have it; what JSON cannot say of a number is null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
