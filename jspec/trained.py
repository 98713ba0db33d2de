"""Trained drafters: those that come with jspec, and any directory in a published layout."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jspec.checkpoints import heads
from jspec.checkpoints.heads import TrainedDrafter
from jspec.checkpoints.huggingface_config import read_json
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, chain_draws
from jspec.drafting.draft_model import draft_model
from jspec.drafting.draft_tree import Draws, draft_tree
from jspec.drafting.dynamic_tree import dynamic_draft_tree
from jspec.drafting.eagle import eagle
from jspec.drafting.eagle_dynamic_tree import eagle_dynamic_tree
from jspec.drafting.eagle_tree import eagle_tree
from jspec.drafting.hybrid import hybrid
from jspec.drafting.hybrid_tree import hybrid_tree
from jspec.drafting.medusa import medusa, medusa_tree
from jspec.errors import InputError, require
from jspec.model import Model, require_model
from jspec.models.eagle import EagleConfig
from jspec.models.medusa import MedusaConfig
from jspec.quantization import Weights, check_weights, quantize_drafter
from pallas_kernels.dispatch import Kernels

# What comes with jspec, for SmolLM2-135M-Instruct.
SHIPPED = ("eagle", "medusa", "draft")
_FOLDER = Path(__file__).parent / "drafters"
_GIVE = f"give {', '.join(SHIPPED)}, or the directory of a trained drafter"

# A static tree's parents, or one that grows anew in every round.
Tree = Sequence[int] | Literal["dynamic"]


def locate(name: str | Path) -> Path:
    """Return the directory of a trained drafter; a name of `SHIPPED` goes before a directory's.

    Raises:
        InputError: there is none.
    """
    require(isinstance(name, str | os.PathLike) and str(name) != "", "name", name, "is none", _GIVE)
    path = _FOLDER / name if name in SHIPPED else Path(name)
    try:
        found = path.is_dir()
    except (OSError, ValueError):  # a name that is too long, or none
        found = False
    problem = "does not come with this installation" if name in SHIPPED else "is no directory"
    require(found, "name", str(name), problem, _GIVE)
    return path


def most_drafts(name: str | Path) -> int | None:
    """Return how long a trained drafter's chains can be, by its config.json; None for any length.

    Raises:
        InputError: there is none, or its config.json cannot be read.
    """
    heads_of_medusa = read_json(locate(name) / "config.json").get("medusa_num_heads")
    return heads_of_medusa if isinstance(heads_of_medusa, int) else None


def load_drafter(
    target: Model,
    name: str | Path,
    *,
    tree: Tree | None = None,
    nodes: int = 15,
    depth: int = 5,
    width: int = 4,
    draws: Draws | None = None,
    lookup: bool = False,
    weights: Weights = "same",
    min_confidence: float = 0.0,
) -> BoundDrafter:
    """Load a trained drafter for a target.

    Args:
        target: what is drafted for; it lends embedding and head where the drafter has none.
        name: "eagle", "medusa" or "draft", which come with jspec and are for
            SmolLM2-135M-Instruct; or a directory: an EAGLE, EAGLE-3 or Medusa head as published
            (safetensors), or a draft model.
        tree: the parents of a static tree's nodes, as `jspec.tree_shapes` makes them; "dynamic"
            for one that grows where the drafter is surest (EAGLE-2), which Medusa heads can't; None
            for a chain.
        nodes: drafts of a dynamic tree.
        depth: deepest draft of a dynamic tree.
        width: nodes of a dynamic tree's level that are expanded, and most children of each.
        draws: how the children in a static tree are chosen: "top-k", "without-replacement" or
            "independent". None takes the most probable ones with Medusa heads and with `lookup`,
            which can nothing else, and draws without replacement otherwise.
        lookup: draft what followed the text's last tokens earlier on, where there is a match.
        weights: "int8" rounds the drafter's matrices, which is cheaper where reading them is what a
            draft costs, and changes no law; "same" leaves them in the target's dtype.
        min_confidence: a chain ends before the first draft whose highest probability is lower, and
            where that leaves no draft the round costs a plain step. 0 never ends one.

    Raises:
        InputError: there is no such drafter, it is damaged or does not fit the target, or the
            settings ask for what it can't do.
    """
    require_model("target", target)
    require(isinstance(lookup, bool), "lookup", lookup, "is no boolean", "give True or False")
    check_weights(weights)
    chain_draws.check_confidence(min_confidence)
    require(
        tree is None or min_confidence == 0,
        "min_confidence",
        min_confidence,
        "ends chains, and a tree is asked for",
        "leave it out; a dynamic tree grows where the drafter is surest",
    )
    drafter = heads.load(locate(name), target.config, target.params, target.dtype)
    if weights == "int8":
        drafter = dataclasses.replace(drafter, params=quantize_drafter(_params(drafter)))
    if draws is None:
        draws = "top-k" if lookup or drafter.kind == "medusa" else "without-replacement"
    only = "Medusa heads" if drafter.kind == "medusa" else "a hybrid with lookup"
    require(
        draws == "top-k" or tree is None or not (lookup or drafter.kind == "medusa"),
        "draws",
        draws,
        f"cannot be honoured by {only}, which takes the most probable tokens",
        "leave it out, or give top-k",
    )
    kernels = target.functions.kernels
    if tree is None:
        bound = chain(drafter, target.config, kernels, min_confidence)
        return hybrid(bound) if lookup else bound
    if isinstance(tree, str):
        require(tree == "dynamic", "tree", tree, "is no tree", "give dynamic, or nodes' parents")
        bound = _dynamic_tree(drafter, target.config, kernels, nodes, depth, width)
    else:
        bound = _static_tree(drafter, target.config, kernels, tree, draws)
    return hybrid_tree(bound) if lookup else bound


def chain(
    drafter: TrainedDrafter, target: ModelConfig, kernels: Kernels, min_confidence: float = 0.0
) -> BoundDrafter:
    """Return a drafter of chains.

    Args:
        drafter: with what the target lends.
        target: of the target.
        kernels: what its programs ask for.
        min_confidence: as for `load_drafter`.
    """
    config, params = drafter.config, _params(drafter)
    if isinstance(config, EagleConfig):
        return eagle(target, config, params, kernels, min_confidence)
    if isinstance(config, MedusaConfig):
        return medusa(config, params, min_confidence)
    return draft_model(config, params, kernels, drafter.vocabulary, min_confidence)


def _static_tree(
    drafter: TrainedDrafter,
    target: ModelConfig,
    kernels: Kernels,
    parents: Sequence[int],
    draws: Draws,
) -> BoundDrafter:
    config, params = drafter.config, _params(drafter)
    if isinstance(config, EagleConfig):
        return eagle_tree(target, config, params, parents, draws, kernels)
    if isinstance(config, MedusaConfig):
        return medusa_tree(config, params, parents)
    return draft_tree(config, params, parents, draws, kernels, drafter.vocabulary)


def _dynamic_tree(
    drafter: TrainedDrafter,
    target: ModelConfig,
    kernels: Kernels,
    nodes: int,
    depth: int,
    width: int,
) -> BoundDrafter:
    config, params = drafter.config, _params(drafter)
    if isinstance(config, EagleConfig):
        return eagle_dynamic_tree(target, config, params, nodes, depth, width, kernels)
    if isinstance(config, MedusaConfig):
        raise InputError(
            "tree",
            "dynamic",
            "cannot be honoured by Medusa heads, which do not see each other's choices",
            "give a tree of fixed shape",
        )
    return dynamic_draft_tree(config, params, nodes, depth, width, kernels, drafter.vocabulary)


def _params(drafter: TrainedDrafter) -> Any:
    """Return the parameters, whose type goes with the configuration's."""
    return drafter.params
