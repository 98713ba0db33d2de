"""Checkpoints of the project's own: Orbax for the parameters, JSON for the rest.

A directory holds `params` (Orbax), `jspec.json` (architecture and end-of-sequence ids) and, when a
tokenizer was given, its files. This is the one module that imports Orbax.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import orbax.checkpoint.experimental.v1 as ocp
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jspec.checkpoints.assembly import checked_dtype, placements_of
from jspec.checkpoints.huggingface_config import read_json
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError, require, require_integer
from jspec.models.parameters import TransformerParams, abstract, named
from jspec.quantization import (
    Weights,
    is_int8,
    is_matrix_name,
    is_quantized,
    map_matrices,
    quantize_matrix,
)

MANIFEST = "jspec.json"
_PARAMS = "params"
_FORMAT = 1


class SavesFiles(Protocol):
    """What `save` asks of a tokenizer."""

    def save(self, directory: Path) -> None:
        """Write the files from which it can be built again."""


def save(
    directory: Path,
    config: ModelConfig,
    params: TransformerParams,
    eos_token_ids: tuple[int, ...],
    tokenizer: SavesFiles | None,
) -> None:
    """Write a checkpoint; the directory appears only when it is complete.

    In a multi-process run every process calls it, and process 0 writes the JSON files.
    """
    check_tree(config, params)
    require(
        not directory.exists() or (directory.is_dir() and not any(directory.iterdir())),
        "directory",
        str(directory),
        "exists already",
        "give a new directory, or remove the old one",
    )
    partial = directory.with_name(f".{directory.name}.partial")
    first = jax.process_index() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier("partial directory made")
    ocp.save(partial.absolute() / _PARAMS, params)
    if first:
        manifest = {
            "format": _FORMAT,
            "config": dataclasses.asdict(config),
            "eos_token_ids": list(eos_token_ids),
        }
        text = json.dumps(manifest, indent=2) + "\n"
        (partial / MANIFEST).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(partial)
        if directory.exists():
            directory.rmdir()  # empty, as checked
        partial.rename(directory)
    _barrier("directory renamed")


def read_manifest(directory: Path) -> tuple[ModelConfig, tuple[int, ...]]:
    """Return the architecture and the end-of-sequence ids of a checkpoint written by `save`."""
    path = directory / MANIFEST
    manifest = read_json(path)
    require(
        manifest.get("format") == _FORMAT,
        "format",
        manifest.get("format"),
        f"of {path} is not {_FORMAT}",
        "read it with the version that wrote it",
    )
    try:
        fields = {**manifest["config"]}
        fields["rope"] = RopeConfig(**fields["rope"])
        fields["windows"] = tuple(fields.get("windows", ()))
        local_rope = fields.get("local_rope")
        fields["local_rope"] = None if local_rope is None else RopeConfig(**local_rope)
        config, eos_token_ids = ModelConfig(**fields), tuple(manifest["eos_token_ids"])
    except (KeyError, TypeError) as error:
        raise InputError(
            "path", str(path), f"is incomplete ({error})", "read it with the version that wrote it"
        ) from None
    for token in eos_token_ids:
        require_integer("eos_token_ids", token)
    return config, eos_token_ids


def load_params(
    directory: Path,
    config: ModelConfig,
    dtype: DTypeLike,
    shardings: TransformerParams | None,
    weights: Weights,
) -> TransformerParams:
    """Read the parameters, each shard straight to its devices and converted to `dtype`.

    Stored int8 matrices stay so. Others are quantised, if `weights` says so, from float32.
    """
    path = directory.absolute() / _PARAMS
    require(
        path.is_dir(), "path", str(path), "does not exist", "copy the whole checkpoint directory"
    )
    checked = checked_dtype(dtype)
    try:
        shapes = _stored_shapes(ocp.metadata(path).metadata)
    except Exception as error:  # of a damaged file Orbax and TensorStore raise anything
        raise _broken(path, error) from None
    stored_weights: Weights = "int8" if "embedding.values" in shapes else "same"
    wanted = abstract(config, checked, stored_weights)
    _check_shapes(shapes, wanted)
    final = "int8" if weights == "int8" else stored_weights
    placements = placements_of(config, shardings, final)
    if final == stored_weights:
        return _read(path, wanted, placements)

    wanted = map_matrices(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "float32"), wanted)
    plain = _read(path, wanted, [p.values if is_int8(p) else p for p in placements])
    names = named(plain)
    tensors, treedef = jax.tree.flatten(plain)
    del plain
    for index, (name, placement) in enumerate(zip(names, placements, strict=True)):
        if is_matrix_name(name):
            tensors[index] = jax.device_put(quantize_matrix(tensors[index]), placement)
    return cast(TransformerParams, jax.tree.unflatten(treedef, tensors))


def _read(path: Path, wanted: TransformerParams, placements: list[Any]) -> TransformerParams:
    """Read the tree `wanted`; a placement of None, one a tensor, is the default device."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    tensors, treedef = jax.tree.flatten(wanted, is_leaf=is_int8)

    def placed(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    targets = [
        jax.tree.map(lambda leaf: placed(leaf, default), tensor)
        if placement is None
        else jax.tree.map(placed, tensor, placement)
        for tensor, placement in zip(tensors, placements, strict=True)
    ]
    try:
        return cast(TransformerParams, ocp.load(path, jax.tree.unflatten(treedef, targets)))
    except jax.errors.JaxRuntimeError:  # the device, as when its memory is full
        raise
    except Exception as error:
        raise _broken(path, error) from None


def _broken(path: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    reason = reason if len(reason) <= 200 else f"{reason[:197]}..."
    return InputError(
        "path", str(path), f"is no Orbax checkpoint, or damaged ({reason})", "copy it again"
    )


def check_tree(config: ModelConfig, params: TransformerParams) -> None:
    """Raise `InputError` unless `params` has the tensors and shapes of `config`."""
    _check_shapes(
        {name: tuple(leaf.shape) for name, leaf in named(params).items()},
        abstract(config, "float32", "int8" if is_quantized(params) else "same"),
    )


def _stored_shapes(stored: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(stored)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _check_shapes(found: dict[str, tuple[int, ...]], wanted: TransformerParams) -> None:
    _require_shapes(found, {name: leaf.shape for name, leaf in named(wanted).items()})


def _require_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(expected.keys() | found.keys()):
        have, want = found.get(name), expected.get(name)
        require(
            have == want,
            "tensor",
            name,
            f"has shape {have}, expected {want}",
            "use parameters and config of one model",
        )


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"jspec checkpoint: {name}")


def save_arrays(directory: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write arrays by name, as of a training that is to go on.

    The directory appears only when it is complete.

    Raises:
        InputError: it exists already.
    """
    require(
        not directory.exists(),
        "directory",
        str(directory),
        "exists already",
        "give a new directory, or remove the old one",
    )
    ocp.save(directory.absolute(), dict(arrays))


def load_arrays(directory: Path, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Read what `save_arrays` wrote.

    Args:
        directory: where it is.
        like: names, shapes, dtypes and placements that are wanted.

    Raises:
        InputError: it is missing, damaged, or has other names, shapes or dtypes.
    """
    path = directory.absolute()
    try:
        stored = _stored_shapes(ocp.metadata(path).metadata)
    except Exception as error:  # of a damaged file Orbax and TensorStore raise anything
        raise _broken(path, error) from None
    _require_shapes(stored, {name: tuple(leaf.shape) for name, leaf in like.items()})
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in like.items()
    }
    try:
        return cast("dict[str, jax.Array]", ocp.load(path, wanted))
    except jax.errors.JaxRuntimeError:  # the device, as when its memory is full
        raise
    except Exception as error:
        raise _broken(path, error) from None
