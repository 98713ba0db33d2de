"""From what was trained to a drafter that drafts, and to files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from experiments.training import methods
from experiments.training.losses import Kind
from experiments.training.methods import Start
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter
from jspec.drafting import draft_model as draft_models
from jspec.drafting.eagle import eagle
from jspec.model import Model
from jspec.models.eagle import EagleConfig
from jspec.models.medusa import MedusaConfig


@dataclasses.dataclass(frozen=True)
class TrainedDrafter:
    name: str
    kind: Kind
    config: Any
    params: Any
    vocabulary: Any


def trained(name: str, begun: Start, params: Any) -> TrainedDrafter:
    """Return what was trained with what the target lends."""
    method = begun.method
    whole = methods.whole(begun, params)
    return TrainedDrafter(name, method.kind, method.config, whole, begun.vocabulary)


def bind(target: Model, drafter: TrainedDrafter) -> BoundDrafter:
    """Return the drafter of chains."""
    kernels = target.functions.kernels
    config = drafter.config
    if isinstance(config, EagleConfig):
        return eagle(target.config, config, drafter.params, kernels)
    if isinstance(config, MedusaConfig):
        from jspec.drafting.medusa import medusa

        return medusa(config, drafter.params)
    assert isinstance(config, ModelConfig)
    return draft_models.draft_model(config, drafter.params, kernels, drafter.vocabulary)


def save(path: Path, drafter: TrainedDrafter) -> None:
    path.mkdir()
    leaves = jax.tree_util.tree_leaves_with_path(drafter.params)
    save_file(
        {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(x) for p, x in leaves},
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(dataclasses.asdict(drafter.config)))
