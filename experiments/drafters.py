"""From the drafting flags to a drafter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import cast

import jspec
from experiments import flags, models, tree_flags
from experiments.tree_flags import Choice
from jspec import trained
from jspec.config import SpeculationConfig, Verification
from jspec.drafting.draft_tree import Draws
from jspec.errors import InputError, require
from jspec.quantization import Weights

# Flag -> the drafters that it belongs to.
_OWNERS = {
    "draft_model": ("draft-model",),
    "exit_layers": ("early-exit",),
    "ngram_max": ("ngram",),
    "ngram_min": ("ngram",),
    "trained": ("trained",),
    "lookup": ("trained",),
    "drafter_weights": ("trained",),
    "min_confidence": ("trained", "draft-model", "early-exit"),
}
# The library speaks of its own parameters; here they are flags.
_FLAGS = {
    "drafter": flags.DRAFT_MODEL.name,
    "layers": flags.EXIT_LAYERS.name,
    "max_n": flags.NGRAM_MAX.name,
    "min_n": flags.NGRAM_MIN.name,
    "parents": flags.TREE.name,
    "nodes": flags.TREE_NODES.name,
    "depth": flags.TREE_DEPTH.name,
    "width": flags.TREE_WIDTH.name,
    "matches": flags.TREE_WIDTH.name,
    "name": flags.TRAINED.name,
    "tree": flags.TREE.name,
    "draws": flags.DRAWS.name,
}
# Drafts of a chain where --gamma does not say: heads are trained for a few steps.
_TRAINED_GAMMA = 4


def check_flags() -> None:
    """Raise `InputError` where the drafting flags contradict each other; reads no model."""
    choice = tree_flags.choice()
    require(
        choice is None or choice.kind != "optimal",
        "tree",
        flags.TREE.value,
        "is not known before it has been measured",
        "run --experiment=tree --tree=optimal, and give the tree that it prints",
    )
    require(
        choice is None or flags.MIN_CONFIDENCE.value == 0,
        "min_confidence",
        flags.MIN_CONFIDENCE.value,
        "ends chains, and a tree is asked for",
        "leave it out; a dynamic tree grows where the drafter is surest",
    )
    check_drafter()


def check_drafter() -> None:
    """Raise `InputError` where the flags of what drafts contradict each other."""
    drafter = flags.DRAFTER.value
    for holder in (
        flags.DRAFT_MODEL,
        flags.EXIT_LAYERS,
        flags.NGRAM_MAX,
        flags.NGRAM_MIN,
        flags.TRAINED,
        flags.LOOKUP,
        flags.DRAFTER_WEIGHTS,
        flags.MIN_CONFIDENCE,
    ):
        owners = _OWNERS[holder.name]
        require(
            not holder.present or drafter in owners,
            holder.name,
            holder.value,
            f"has no effect with --drafter={drafter}",
            f"leave it out, or give --drafter={' or '.join(owners)}",
        )
    if drafter == "draft-model":
        require(
            bool(flags.DRAFT_MODEL.value),
            "draft_model",
            flags.DRAFT_MODEL.value,
            "names no model for --drafter=draft-model",
            "give a smaller model of the target's family",
        )
    if drafter == "trained":
        require(
            bool(flags.TRAINED.value),
            "trained",
            flags.TRAINED.value,
            "names no drafter for --drafter=trained",
            f"give {', '.join(trained.SHIPPED)}, or the directory of a trained drafter",
        )
        with _named():
            trained.locate(flags.TRAINED.value or "")
    if drafter == "early-exit":
        require(
            flags.EXIT_LAYERS.value is not None and flags.EXIT_LAYERS.value >= 1,
            "exit_layers",
            flags.EXIT_LAYERS.value,
            "is no number of layers for --drafter=early-exit",
            "give at least 1 and fewer than the target has",
        )
    if drafter == "ngram":
        shortest, longest = flags.NGRAM_MIN.value, flags.NGRAM_MAX.value
        require(shortest >= 1, "ngram_min", shortest, "is below 1", "match at least one token")
        require(
            longest >= shortest,
            "ngram_max",
            longest,
            f"is below ngram_min ({shortest})",
            "give ngram_max >= ngram_min",
        )


def load(target: jspec.Model) -> jspec.BoundDrafter | None:
    """Return the drafter that the flags name, None for plain decoding.

    Raises:
        InputError: the draft model cannot be loaded or does not fit, or the flags are wrong.
    """
    check_flags()
    if flags.DRAFTER.value == "none":
        return None
    return of(target, draft_model(target), tree_flags.choice())


def draft_model(target: jspec.Model) -> jspec.Model | None:
    """Return the model that drafts, None where drafts are looked up.

    Raises:
        InputError: it cannot be loaded, or there are too many layers before the exit.
    """
    if flags.DRAFTER.value == "draft-model":
        return models.load(flags.DRAFT_MODEL)
    if flags.DRAFTER.value == "early-exit":
        with _named():
            return jspec.early_exit_model(target, flags.EXIT_LAYERS.value or 0)
    return None


def of(target: jspec.Model, model: jspec.Model | None, tree: Choice | None) -> jspec.BoundDrafter:
    """Return what drafts a tree, or a chain where there is none.

    Args:
        target: what is drafted for.
        model: what `draft_model` returns.
        tree: static or dynamic.

    Raises:
        InputError: the draft model does not fit, or a size is out of range.
    """
    with _named():
        if flags.DRAFTER.value == "trained":
            return _trained(target, tree)
        if model is None:
            if tree is None:
                return jspec.ngram(flags.NGRAM_MAX.value, flags.NGRAM_MIN.value)
            # Trees do best with other lengths than chains, unless told.
            lengths = {"max_n": flags.NGRAM_MAX, "min_n": flags.NGRAM_MIN}
            told = {name: flag.value for name, flag in lengths.items() if flag.present}
            return jspec.ngram_tree(tree.nodes, tree.width, **told)
        if tree is None:
            confidence = flags.MIN_CONFIDENCE.value
            bound = jspec.draft_model(target, model, min_confidence=confidence)
        elif tree.kind == "dynamic":
            bound = jspec.dynamic_draft_tree(
                target, model, nodes=tree.nodes, depth=tree.depth, width=tree.width
            )
        else:
            draws = cast("Draws", flags.DRAWS.value)
            bound = jspec.draft_tree(target, model, tree.parents, draws)
        # What drafts comes first in the name, then how many layers it has, then its tree.
        shape = "" if tree is None else f"-{tree.kind}-tree-{tree.nodes}"
        name = f"{flags.DRAFTER.value}-{model.config.num_layers}l{shape}"
        return dataclasses.replace(bound, name=name)


def _trained(target: jspec.Model, tree: Choice | None) -> jspec.BoundDrafter:
    shape: trained.Tree | None = None
    sizes = {}
    if tree is not None and tree.kind == "dynamic":
        shape = "dynamic"
        sizes = {"nodes": tree.nodes, "depth": tree.depth, "width": tree.width}
    elif tree is not None:
        shape = tree.parents
    draws = cast("Draws", flags.DRAWS.value) if flags.DRAWS.present and tree else None
    name, lookup = flags.TRAINED.value or "", bool(flags.LOOKUP.value)
    weights = cast("Weights", flags.DRAFTER_WEIGHTS.value)
    return jspec.load_drafter(
        target,
        name,
        tree=shape,
        draws=draws,
        lookup=lookup,
        weights=weights,
        min_confidence=flags.MIN_CONFIDENCE.value,
        **sizes,
    )


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Name the flag in errors about the parameter that it stands for."""
    try:
        yield
    except InputError as error:
        field = _FLAGS.get(error.field, error.field)
        raise InputError(field, error.value, error.problem, error.remedy) from error


def speculation(rounds_per_chunk: int) -> SpeculationConfig:
    """Return what the flags say about speculation.

    Args:
        rounds_per_chunk: where the flag does not say.

    Raises:
        InputError: a flag is out of its range, or the drafting flags contradict each other.
    """
    check_flags()
    return speculation_of(tree_flags.choice(), rounds_per_chunk)


def require_lossless(speculation: SpeculationConfig) -> None:
    """Refuse a lossy rule where outputs are compared with plain decoding's.

    Raises:
        InputError: the rule is lossy.
    """
    require(
        speculation.lossless,
        "verification",
        speculation.verification,
        "is lossy, and this experiment compares speculation with plain decoding as equals",
        "use token or block, or --experiment=generate or batch",
    )


def longest_chain(wanted: int) -> int:
    """Return how many of `wanted` drafts a chain of the drafter's can have."""
    most = None
    if flags.DRAFTER.value == "trained":
        most = trained.most_drafts(flags.TRAINED.value or "")
    return wanted if most is None else min(most, wanted)


def _chain_length() -> int:
    """Return the drafts of a chain."""
    if flags.GAMMA.present or flags.DRAFTER.value != "trained":
        return int(flags.GAMMA.value)
    return longest_chain(_TRAINED_GAMMA)


def speculation_of(tree: Choice | None, rounds_per_chunk: int) -> SpeculationConfig:
    """Return what the flags say about speculation with this tree, or with a chain."""
    if flags.ROUNDS_PER_CHUNK.value is not None:
        rounds_per_chunk = flags.ROUNDS_PER_CHUNK.value
    gamma = _chain_length() if tree is None else tree.nodes
    if flags.DRAFTER.value == "none":
        require(
            not flags.GAMMA.present or gamma == 0,
            "gamma",
            gamma,
            "asks for drafts but --drafter=none makes none",
            "leave it out, or choose a drafter",
        )
        gamma = 0
    return SpeculationConfig(
        gamma=gamma,
        verification=cast("Verification", flags.VERIFICATION.value),
        rounds_per_chunk=rounds_per_chunk,
    )
