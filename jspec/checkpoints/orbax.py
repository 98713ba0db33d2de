"""Checkpoints of the project's own: Orbax for the parameters, JSON for the rest.

A directory holds `params` (Orbax), `jspec.json` (architecture and end-of-sequence ids) and, when a
tokenizer was given, its files. This is the one module that imports Orbax.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import orbax.checkpoint.experimental.v1 as ocp
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jspec.checkpoints.assembly import checked_dtype, sharding_leaves
from jspec.checkpoints.huggingface_config import read_json
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError, require
from jspec.models.parameters import TransformerParams, abstract, named

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
        fields = dict(manifest["config"])
        config = ModelConfig(**(fields | {"rope": RopeConfig(**fields["rope"])}))
        return config, tuple(int(token) for token in manifest["eos_token_ids"])
    except (KeyError, TypeError) as error:
        raise InputError(
            "path", str(path), f"is incomplete ({error})", "read it with the version that wrote it"
        ) from None


def load_params(
    directory: Path, config: ModelConfig, dtype: DTypeLike, shardings: TransformerParams | None
) -> TransformerParams:
    """Read the parameters, each shard straight to its devices and converted to `dtype`."""
    path = directory.absolute() / _PARAMS
    require(
        path.is_dir(), "path", str(path), "does not exist", "copy the whole checkpoint directory"
    )
    wanted = abstract(config, checked_dtype(dtype))
    try:
        stored = ocp.metadata(path).metadata
    except (OSError, ValueError) as error:
        raise InputError(
            "path", str(path), f"is no Orbax checkpoint ({error})", "copy it again"
        ) from None
    _check_shapes(_stored_shapes(stored), wanted)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves, treedef = jax.tree.flatten(wanted)
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement or default)
        for leaf, placement in zip(leaves, sharding_leaves(config, shardings), strict=True)
    ]
    return cast(TransformerParams, ocp.load(path, jax.tree.unflatten(treedef, placed)))


def check_tree(config: ModelConfig, params: TransformerParams) -> None:
    """Raise `InputError` unless `params` has the tensors and shapes of `config`."""
    _check_shapes(
        {name: tuple(leaf.shape) for name, leaf in named(params).items()},
        abstract(config, "float32"),
    )


def _stored_shapes(stored: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(stored)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _check_shapes(found: dict[str, tuple[int, ...]], wanted: TransformerParams) -> None:
    expected = {name: leaf.shape for name, leaf in named(wanted).items()}
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
