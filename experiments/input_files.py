"""The JSON-lines files of a batch job: what they hold, read line by line and never as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from experiments.paths import expanded
from jspec.errors import InputError, require

_SUFFIXES = (".jsonl", ".jsonl.gz")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank; a byte order mark before the first is no part of it.

    Attributes:
        index: among all such lines of all files, from 0.
        name: "prompts:3" for the third line of prompts.jsonl.
        data: its bytes.
    """

    index: int
    name: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file as it was when the job began, or went on.

    Attributes:
        path: where it is.
        name: without suffix and folder, or as it was given where two would share that name.
        sha256: of its bytes, uncompressed: a file and its compressed form are the same.
        rows: lines that are not blank.
    """

    path: Path
    name: str
    sha256: str
    rows: int


def scan(paths: Sequence[str]) -> list[InputFile]:
    """Read the files of --input once.

    Raises:
        InputError: there is none, one is given twice, cannot be read, or all are empty.
    """
    require(len(paths) > 0, "input", None, "is not given", "give --input=FILE.jsonl")
    found = [expanded("input", path) for path in paths]
    for path, given in zip(found, paths, strict=True):
        require(
            path.name.endswith(_SUFFIXES),
            "input",
            given,
            f"is neither a {' nor a '.join(_SUFFIXES)} file",
            "give a file with a JSON object a line",
        )
        # A pipe would be empty when it is read again.
        require(path.is_file() or not path.exists(), "input", given, "is no file", "check the path")
    resolved = [path.resolve() for path in found]
    for path, given in zip(resolved, paths, strict=True):
        once = resolved.count(path) == 1
        require(once, "input", given, "is given twice", "give every file once")
    stems = [path.name.removesuffix(".gz").removesuffix(".jsonl") for path in found]
    files = []
    for path, stem, given in zip(found, stems, paths, strict=True):
        digest = hashlib.sha256()
        rows = sum(1 for _ in _rows(path, digest.update))
        name = stem if stems.count(stem) == 1 else given
        files.append(InputFile(path, name, digest.hexdigest(), rows))
    total = sum(file.rows for file in files)
    require(total > 0, "input", ", ".join(paths), "has no rows", "give a JSON object a line")
    return files


def lines(files: Sequence[InputFile]) -> Iterator[Line]:
    """Yield the lines of all files that are not blank.

    Raises:
        InputError: a file cannot be read any more, or is not what it was.
    """
    index = 0
    for file in files:
        digest = hashlib.sha256()
        changed = InputError(
            "input",
            str(file.path),
            "was changed while it was read",
            "begin a new job in another --output",
        )
        end = index + file.rows
        for number, data in _rows(file.path, digest.update):
            if index == end:  # its index is that of another file's row, or of none
                raise changed
            yield Line(index, f"{file.name}:{number}", data)
            index += 1
        if digest.hexdigest() != file.sha256:
            raise changed


def _rows(path: Path, digest: Callable[[bytes], None]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers, and feed all bytes to `digest`."""
    for number, data in enumerate(_read(path, digest), start=1):
        if number == 1:
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if data.strip():
            yield number, data


def _read(path: Path, digest: Callable[[bytes], None]) -> Iterator[bytes]:
    """Yield the raw lines and feed them to `digest`."""
    try:
        with contextlib.closing(_open(path)) as file:
            for line in file:
                digest(line)
                yield line
    # The last two are what gzip says of a file that was cut or damaged.
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise InputError(
            "input",
            str(path),
            f"cannot be read ({problem})",
            "check the file and run the same command again: what is finished is kept",
        ) from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")
