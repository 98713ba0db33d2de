"""Metadata and tensor directory of a GGUF file.

The `gguf` package's own reader makes a numpy view for every element of every array, which takes two
seconds for the vocabulary of a small model; reading the header by `struct` takes a tenth of that,
and notices where the file ends. Format: the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jspec.errors import InputError, require

MAGIC = b"GGUF"
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: its shape, slowest dimension first (the reverse of the file's order).
        kind: storage type.
        offset: first byte, from the beginning of the file.
        num_bytes: stored size.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Everything but the weights.

    Attributes:
        path: the file.
        metadata: values by key; arrays are lists.
        tensors: by name, in file order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Parse the header of the GGUF file `path`.

    Raises:
        InputError: no GGUF file, truncated, corrupt, of another version, or one part of a split.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        require(magic == MAGIC, "path", str(path), "is not a GGUF file", "give a .gguf file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _parse(path, data)
            except (struct.error, ValueError, KeyError, OverflowError) as error:
                if isinstance(error, InputError):
                    raise
                raise _broken(path, str(error)) from None
    parts = header.metadata.get("split.count", 1)
    require(
        parts in (0, 1),
        "path",
        str(path),
        f"is one of {parts} parts",
        "merge them with llama-gguf-split",
    )
    end = max((t.offset + t.num_bytes for t in header.tensors.values()), default=0)
    if end > size:
        raise _broken(path, f"its tensors end at byte {end}, the file at {size}")
    return header


def _broken(path: Path, why: str) -> InputError:
    return InputError("path", str(path), f"is truncated or corrupt ({why})", "fetch the file again")


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    cursor.position = len(MAGIC)
    version = cursor.scalar("<u4")
    require(
        version in (2, 3),
        "path",
        str(path),
        f"has GGUF version {version}",
        "convert it to version 3, little endian",
    )
    num_tensors, num_values = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.scalar("<u4")))
    entries = []
    for _ in range(num_tensors):
        name = cursor.string()
        dims = [cursor.scalar("<u8") for _ in range(cursor.scalar("<u4"))]
        kind = GGMLQuantizationType(cursor.scalar("<u4"))
        entries.append((name, tuple(reversed(dims)), kind, cursor.scalar("<u8")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    base = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape, dtype=object))
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} has no whole blocks of {block}")
        tensors[name] = GgufTensor(shape, kind, base + offset, count // block * block_bytes)
    return GgufHeader(path, metadata, tensors)


class _Cursor:
    """Reads values one after the other; `ValueError` or `struct.error` past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def _advance(self, size: int) -> int:
        start = self.position
        if size > len(self._data) - start:
            raise ValueError(f"{size} bytes are missing at byte {start}")
        self.position = start + size
        return start

    def scalar(self, dtype: str) -> Any:
        return self.array(dtype, 1)[0]

    def array(self, dtype: str, count: int) -> list[Any]:
        start = self._advance(np.dtype(dtype).itemsize * count)
        # frombuffer on the mmap itself would keep it from being closed
        values: list[Any] = np.frombuffer(self._data[start : self.position], dtype).tolist()
        return values

    def string(self) -> str:
        (size,) = struct.unpack_from("<Q", self._data, self._advance(8))
        start = self._advance(size)
        return self._data[start : self.position].decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = GGUFValueType(self.scalar("<u4")), self.scalar("<u8")
        if item == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if item == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        return self.array(_SCALARS[item], count)
