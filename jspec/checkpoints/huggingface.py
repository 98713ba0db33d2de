"""Weights of a Hugging Face directory: model.safetensors, whole or sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16, which safetensors then returns)
import numpy as np
from safetensors import SafetensorError, safe_open

from jspec.checkpoints.huggingface_config import is_text_part, read_json
from jspec.errors import InputError, require

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "BOOL")
# Prefixes in multimodal checkpoints, up to transformers 4.51 and since; other parts are left out.
_TEXT_PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}


class SafetensorsSource:
    """The tensors of one directory, as a `WeightSource`.

    A file stays open, and so mapped, from the first read to the next `release`.

    Args:
        directory: with a config.json.
        filenames: what a single file of weights may be called, in this order.
        integers: names of tensors that hold integers or booleans.
    """

    def __init__(
        self,
        directory: Path,
        filenames: Sequence[str] = ("model.safetensors",),
        integers: Collection[str] = (),
    ) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._opened: dict[Path, Any] = {}
        self._stored_names: dict[str, str] = {}
        nested = is_text_part(read_json(directory / "config.json"))
        for path, wanted in _shards(directory, filenames).items():
            handle = _open(path)
            stored = set(handle.keys())
            for stored_name in sorted(stored if wanted is None else stored & wanted):
                name = _text_name(stored_name) if nested else stored_name
                if name is None:
                    continue
                tensor = handle.get_slice(stored_name)
                wanted_dtypes = _INTEGERS if stored_name in integers else _DTYPES
                require(
                    tensor.get_dtype() in wanted_dtypes,
                    "tensor",
                    stored_name,
                    f"in {path.name} has dtype {tensor.get_dtype()}, which is not supported",
                    f"use a checkpoint stored as one of {', '.join(wanted_dtypes)}",
                )
                self._files[name] = path
                self._stored_names[name] = stored_name
                self._shapes[name] = tuple(tensor.get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return a copy of rows start:stop, in the stored dtype."""
        path = self._files[name]
        if path not in self._opened:
            self._opened[path] = _open(path)
        rows: np.ndarray[Any, Any] = self._opened[path].get_slice(self._stored_names[name])[
            start:stop
        ]
        return rows

    def stored_name(self, name: str) -> str:
        """Return the file's name of a tensor: the plan's, but in a multimodal checkpoint."""
        return self._stored_names.get(name, name)

    def release(self) -> None:
        """Close, and so unmap, the files that are open."""
        self._opened.clear()


def _text_name(name: str) -> str | None:
    """Return the name in the text part's own checkpoint, or None for another part's tensor."""
    for theirs, ours in _TEXT_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise InputError(
            "path", str(path), f"is truncated or corrupt ({error})", "fetch the file again"
        ) from None
    except FileNotFoundError:
        raise InputError(
            "path",
            str(path),
            "is named by the index but does not exist",
            "fetch the checkpoint again, with all its files",
        ) from None
    except (OSError, ValueError) as error:  # a directory, a name that is none
        raise InputError(
            "path", str(path), f"cannot be read ({error})", "fetch the file again"
        ) from None


def _shards(directory: Path, filenames: Sequence[str]) -> dict[Path, set[str] | None]:
    """Return the weight files, each with the names that the index expects in it, if any."""
    for filename in filenames:
        if (directory / filename).exists():
            return {directory / filename: None}
    index_path = directory / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        require(
            isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values()),
            "path",
            str(index_path),
            "holds no weight_map",
            "fetch the file again",
        )
        shards: dict[Path, set[str] | None] = {}
        for name, filename in (weight_map or {}).items():
            require(
                Path(filename).name == filename and filename not in ("", ".."),
                "weight_map",
                filename,
                "leaves the checkpoint's directory",
                "fetch the index from a source that you trust",
            )
            names = shards.setdefault(directory / filename, set())
            if names is not None:
                names.add(name)
        return shards
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise pickle_refusal(directory / pickles[0])
    raise InputError(
        "path",
        str(directory),
        f"holds neither {filenames[0]} nor model.safetensors.index.json",
        "fetch the checkpoint again, with its weights",
    )


def pickle_refusal(path: Path) -> InputError:
    """Return the error for a pickled checkpoint, which can run code when it is opened."""
    return InputError(
        "path",
        str(path),
        "is a pickle, which can run code when opened and is never loaded",
        "convert it to safetensors",
    )
