"""Checkpoints of a training that goes on where it was killed.

    checkpoints/step-00000400/    weights, optimiser and step, by Orbax

A checkpoint has its name only when it is whole; the oldest go when there are more than are kept.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import jax

from jspec.checkpoints import orbax
from jspec.errors import InputError

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)")


def save(folder: Path, step: int, tree: Any, keep: int) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Args:
        folder: of the job.
        step: that it was taken after.
        tree: of arrays.
        keep: how many stay, at least one.

    Returns:
        Where it is.
    """
    root = folder / FOLDER
    root.mkdir(exist_ok=True)
    path = root / f"step-{step:08}"
    partial = root / f".{path.name}.partial"
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(partial, ignore_errors=True)
    orbax.save_arrays(partial, _named(tree))
    partial.rename(path)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(root / f"step-{old:08}", ignore_errors=True)
    return path


def steps(folder: Path) -> list[int]:
    """Return the steps that the job has checkpoints of, rising."""
    root = folder / FOLDER
    if not root.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in root.iterdir())
    return sorted(int(match[1]) for match in found if match)


def load(folder: Path, like: Any) -> tuple[int, Any] | None:
    """Return the last checkpoint that can be read and its step, None where there is none.

    Args:
        folder: of the job.
        like: a tree of arrays with the structure, shapes, dtypes and placements of what was saved.

    Raises:
        InputError: there are checkpoints, and none of them can be read.
    """
    names, treedef = list(_named(like)), jax.tree.structure(like)
    failure: InputError | None = None
    for step in reversed(steps(folder)):
        try:
            found = orbax.load_arrays(folder / FOLDER / f"step-{step:08}", _named(like))
        except InputError as error:
            failure = failure or error
            continue
        return step, jax.tree.unflatten(treedef, [found[name] for name in names])
    if failure is not None:
        raise failure
    return None


def _named(tree: Any) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
