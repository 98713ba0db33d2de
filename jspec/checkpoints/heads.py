"""Trained drafters on disk: EAGLE, EAGLE-3 and Medusa heads as published, and small draft models.

A drafter is a directory with `config.json` and `model.safetensors` (Medusa's may be called
`medusa_lm_head.safetensors`). Everything in it is checked against the target before it is used:
a head of another model would draft, and nearly all its drafts would be rejected.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save as serialized

from jspec.checkpoints import heads_config, heads_layout
from jspec.checkpoints.assembly import checked_dtype
from jspec.checkpoints.heads_config import Kind
from jspec.checkpoints.heads_layout import D2T, T2D, Layout
from jspec.checkpoints.huggingface import SafetensorsSource
from jspec.checkpoints.huggingface_config import read_json
from jspec.config import ModelConfig
from jspec.drafting.vocabulary import prune
from jspec.errors import InputError, require
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.models.parameters import TransformerParams
from jspec.quantization import Int8Matrix


@dataclasses.dataclass(frozen=True)
class TrainedDrafter:
    """A drafter as it is stored.

    Attributes:
        name: of its directory.
        kind: "eagle", "eagle3", "medusa" or "draft-model".
        config: its architecture.
        params: its parameters. Where it is loaded, what the file leaves out is the target's own
            array (embedding; the head, or the rows of it that it can propose). To be saved,
            embedding and head are None where the target shall lend them.
        vocabulary: [Vd] int32, rising, the tokens that it can propose; None for all.
    """

    name: str
    kind: Kind
    config: EagleConfig | MedusaConfig | ModelConfig
    params: EagleParams | MedusaParams | TransformerParams
    vocabulary: jax.Array | None


def load(
    path: str | Path,
    target: ModelConfig,
    target_params: TransformerParams,
    dtype: DTypeLike,
    kind: Kind | None = None,
) -> TrainedDrafter:
    """Load a drafter.

    Args:
        path: its directory.
        target: of the model that it drafts for.
        target_params: of that model, for what the file leaves out; shared, not copied.
        dtype: of the drafter's own parameters: float32, bfloat16 or float16.
        kind: what it must be; None takes what there is.

    Raises:
        InputError: a file is missing, damaged or pickled, or the drafter does not fit: another
            kind, hidden size, vocabulary, number of layers, or other tensors than it describes.
    """
    require(isinstance(path, str | os.PathLike), "path", path, "is no path", "give a str or a Path")
    directory, numpy_dtype = Path(path), checked_dtype(dtype)
    try:
        found = directory.is_dir()
    except (OSError, ValueError):
        found = False
    require(found, "path", str(path), "is no directory", "give the directory of a trained drafter")
    described = read_json(directory / "config.json")
    source = SafetensorsSource(directory, heads_layout.FILENAMES, (D2T, T2D))
    actual = heads_config.kind_of(described, source.shapes)
    require(
        kind in (None, actual),
        "kind",
        kind,
        f"is not what {directory.name} holds, which is {actual}",
        f"load it as {actual}",
    )
    heads_config.check_target(described, target)
    config: EagleConfig | MedusaConfig | ModelConfig
    if actual == "medusa":
        config = heads_config.read_medusa(described, target, source.shapes)
        known = target.vocab_size
    elif actual == "draft-model":
        config = heads_config.read_draft_model(described, target)
        known = target.vocab_size
    else:
        config = heads_config.read_eagle(actual, described, target, "fc.bias" in source.shapes)
        known = config.layer.vocab_size
    ids = heads_layout.read_vocabulary(source, target, known)
    return _assembled(
        directory.name, actual, config, source, numpy_dtype, target, target_params, ids
    )


def _assembled(
    name: str,
    kind: Kind,
    config: EagleConfig | MedusaConfig | ModelConfig,
    source: SafetensorsSource,
    dtype: np.dtype[Any],
    target: ModelConfig,
    target_params: TransformerParams,
    ids: np.ndarray[Any, np.dtype[np.int32]] | None,
) -> TrainedDrafter:
    """Read the tensors and put the target's in the place of those that are left out."""
    known = target.vocab_size if ids is None else len(ids)
    if isinstance(config, EagleConfig):
        layer = dataclasses.replace(
            config.layer,
            vocab_size=known,
            token_count=target.token_count if ids is None else None,
        )
        config = dataclasses.replace(config, layer=layer)
    elif isinstance(config, MedusaConfig):
        config = dataclasses.replace(config, vocab_size=known)
    layout = heads_layout.of(config)
    width = config.layer.hidden_size if isinstance(config, EagleConfig) else config.hidden_size
    optional: dict[str, tuple[int, ...]] = dict.fromkeys(layout.heads, (known, width))
    if layout.embedding is not None:
        optional[layout.embedding] = (target.vocab_size, width)
    for vocabulary in (D2T, T2D):  # their shapes have been looked at
        if vocabulary in source.shapes:
            optional[vocabulary] = source.shapes[vocabulary]
    heads_layout.check(source, layout, optional)

    params: Any = heads_layout.read(source, layout, dtype)
    kept = None if ids is None else jnp.asarray(ids)
    if isinstance(config, MedusaConfig):
        head = _head(source, layout, dtype, width, target_params, ids)
        params = dataclasses.replace(params, heads=head, vocabulary=kept)
        return TrainedDrafter(name, kind, config, params, kept)
    lender = target_params
    if layout.embedding in source.shapes:
        embedding = heads_layout.read_matrix(source, str(layout.embedding), dtype)
        lender = dataclasses.replace(lender, embedding=embedding)
        if isinstance(config, ModelConfig) and config.tie_embeddings:
            lender = dataclasses.replace(lender, head=embedding)
    else:
        _require_width(width, target.hidden_size, str(layout.embedding))
    head = _head(source, layout, dtype, width, lender, ids)
    params = dataclasses.replace(params, embedding=lender.embedding, head=head)
    if isinstance(config, EagleConfig):
        params = dataclasses.replace(params, vocabulary=kept)
    else:
        config = dataclasses.replace(config, tie_embeddings=False)
    return TrainedDrafter(name, kind, config, params, kept)


def _head(
    source: SafetensorsSource,
    layout: Layout,
    dtype: np.dtype[Any],
    width: int,
    lender: TransformerParams,
    ids: np.ndarray[Any, np.dtype[np.int32]] | None,
) -> Any:
    """Return the stored head, Medusa's stacked; or the lender's, its rows `ids` alone."""
    missing = [head for head in layout.heads if head not in source.shapes]
    if not missing:
        stored = [heads_layout.read_matrix(source, head, dtype) for head in layout.heads]
        return stored[0] if layout.embedding is not None else jnp.stack(stored)
    require(
        len(missing) == len(layout.heads),
        "tensor",
        missing[0],
        "is missing, though other heads have theirs",
        "use the files that were published together",
    )
    head = lender.embedding if lender.head is None else lender.head
    _require_width(width, _columns(head), missing[0])
    return head if ids is None else prune(lender, ids)[0].head


def _columns(matrix: Any) -> int:
    return int((matrix.values if isinstance(matrix, Int8Matrix) else matrix).shape[1])


def _require_width(width: int, lent: int, missing: str) -> None:
    require(
        width == lent,
        "hidden_size",
        width,
        f"is not the target's {lent}, so the target cannot lend the {missing} that is left out",
        heads_config.OTHER,
    )


def save(
    directory: str | Path,
    drafter: TrainedDrafter,
    target: ModelConfig,
    *,
    target_name: str = "",
    dtype: DTypeLike | None = None,
) -> None:
    """Write a drafter in its published layout; config.json, which `load` asks for, comes last.

    Args:
        directory: where to; files of these names are replaced.
        drafter: what to write; embedding and head are left out where its parameters have None.
        target: of the model that it was trained for, which is recorded.
        target_name: of that model, for messages.
        dtype: of the stored numbers; None leaves them as they are.

    Raises:
        InputError: the parameters are not those of the configuration, or the layout cannot hold
            the architecture.
    """
    require(drafter.kind in get_args(Kind), "kind", drafter.kind, "is no kind", "use one of Kind")
    layout = heads_layout.of(drafter.config)
    known = target.vocab_size if drafter.vocabulary is None else len(drafter.vocabulary)
    config = heads_config.write(drafter.kind, drafter.config, target, known)
    config["target"] = heads_config.fingerprint(target_name, target)
    stored = heads_layout.tensors(drafter.params, layout) | _lent(drafter, layout)
    if dtype is not None:
        numpy_dtype = checked_dtype(dtype)
        stored = {name: array.astype(numpy_dtype) for name, array in stored.items()}
    if drafter.vocabulary is not None:
        ids = np.asarray(drafter.vocabulary).astype(np.int64)
        member = np.zeros(target.vocab_size, bool)
        member[ids] = True
        stored |= {D2T: ids - np.arange(len(ids)), T2D: member}
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        whole = {name: np.ascontiguousarray(array) for name, array in stored.items()}
        # Not by `save_file`, whose files nobody else may read.
        (folder / "model.safetensors").write_bytes(serialized(whole))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            "directory", str(directory), f"cannot be written ({error.strerror})", "give another"
        ) from None


def _lent(drafter: TrainedDrafter, layout: Layout) -> dict[str, np.ndarray[Any, Any]]:
    """Return embedding and heads, where the drafter has its own."""
    params: Any = drafter.params
    stored = {}
    if layout.embedding is not None and params.embedding is not None:
        stored[layout.embedding] = np.asarray(params.embedding)
    if isinstance(params, MedusaParams):
        own = [] if params.heads is None else list(np.asarray(params.heads))
    else:
        own = [] if params.head is None else [np.asarray(params.head)]
    return stored | dict(zip(layout.heads, own, strict=bool(own)))
