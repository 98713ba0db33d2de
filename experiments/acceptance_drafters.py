"""Drafters as --acceptance_drafters writes them, with commas between.

NAME[+int8][+sure:P][+lookup][@SHAPE].

NAME is ngram, early-exit:LAYERS, draft-model:MODEL, or else a trained drafter's name or directory.
SHAPE is chain:DRAFTS, a tree's branching (3,2,1), its parents (parents:-1,0,0,1), or
dynamic[:DRAFTS[/DEPTH[/WIDTH]]]. P is the least probability of a chain's drafts, as in
--min_confidence. No name is a number, so the commas of a tree are its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import jspec
from experiments import flags, tree_flags
from experiments.tree_flags import Choice
from jspec.drafting.draft_tree import Draws
from jspec.errors import InputError, require
from jspec.quantization import Weights

FIELD = "acceptance_drafters"
NGRAM, EARLY_EXIT, DRAFT_MODEL = "ngram", "early-exit", "draft-model"
_LOOKUP, _INT8 = "+lookup", "+int8"
_SURE = re.compile(r"\+sure:(\d*\.?\d+)$")
_REMEDY = (
    "write NAME[+int8][+sure:P][+lookup][@SHAPE], as ngram,eagle@3,2,1,eagle+lookup@dynamic:16"
)
_INTEGER = re.compile(r"-?\d+")
_DYNAMIC = re.compile(r"dynamic(?::(\d+)(?:/(\d+)(?:/(\d+))?)?)?")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A drafter that is asked for.

    Attributes:
        text: as it was written; its name in every result.
        kind: `NGRAM`, `EARLY_EXIT`, `DRAFT_MODEL` or "trained".
        argument: of the kind: layers, a model, a trained drafter's name or directory; "" for ngram.
        lookup: whether earlier text is looked up first.
        weights: of a trained drafter.
        min_confidence: of a chain's drafts.
        gamma: drafts of its chain, None where that is --gamma.
        tree: None for a chain.
    """

    text: str
    kind: str
    argument: str
    lookup: bool
    weights: Weights
    min_confidence: float
    gamma: int | None
    tree: Choice | None


def parse(items: Sequence[str]) -> list[Spec]:
    """Return the drafters of the flag's items, which were split at commas.

    Raises:
        InputError: nothing is asked for, or something twice, or not in this notation.
    """
    texts: list[str] = []
    for item in map(str.strip, items):
        if texts and _INTEGER.fullmatch(item) and "@" in texts[-1]:
            texts[-1] += f",{item}"
        else:
            texts.append(item)
    shown = ",".join(items)
    require(bool(texts), FIELD, shown, "is empty", "name one at least, as ngram")
    require(len(set(texts)) == len(texts), FIELD, shown, "names one twice", "name each once")
    return [_spec(text) for text in texts]


def _spec(text: str) -> Spec:
    name, at, shape = text.rpartition("@") if "@" in text else (text, "", "")
    lookup = name.endswith(_LOOKUP)
    name = name.removesuffix(_LOOKUP)
    sure = _SURE.search(name)
    name = _SURE.sub("", name)
    weights: Weights = "int8" if name.endswith(_INT8) else "same"
    name = name.removesuffix(_INT8)
    require(
        bool(name) and not _INTEGER.fullmatch(name) and bool(shape) == bool(at),
        FIELD,
        text,
        "is no drafter",
        _REMEDY,
    )
    kind, _, argument = name.partition(":")
    if kind not in (NGRAM, EARLY_EXIT, DRAFT_MODEL):
        kind, argument = "trained", name
    require(kind != NGRAM or not argument, FIELD, text, "is no drafter", _REMEDY)
    require(
        kind != EARLY_EXIT or argument.isdigit(),
        FIELD,
        text,
        "does not say after how many layers",
        "write early-exit:LAYERS",
    )
    require(
        kind != DRAFT_MODEL or bool(argument),
        FIELD,
        text,
        "does not say which model",
        "write draft-model:MODEL",
    )
    require(
        kind == "trained" or not (lookup or weights == "int8"),
        FIELD,
        text,
        "cannot have +lookup or +int8",
        "add them to a trained drafter",
    )
    gamma, tree = _shape(text, kind, shape)
    require(
        sure is None or (kind != NGRAM and tree is None),
        FIELD,
        text,
        "cannot have +sure",
        "add it to what drafts chains by a model or a head",
    )
    confidence = 0.0 if sure is None else float(sure[1])
    return Spec(text, kind, argument, lookup, weights, confidence, gamma, tree)


def _shape(text: str, kind: str, shape: str) -> tuple[int | None, Choice | None]:
    if not shape:
        return None, None
    if shape.startswith("chain:"):
        drafts = shape.removeprefix("chain:")
        return _size(text, drafts), None
    dynamic = _DYNAMIC.fullmatch(shape)
    if dynamic is not None:
        width = tree_flags.MATCHES if kind == NGRAM else tree_flags.WIDTH
        sizes = [
            default if given is None else _size(text, given)
            for given, default in zip(
                dynamic.groups(), (tree_flags.NODES, tree_flags.DEPTH, width), strict=True
            )
        ]
        return None, Choice("dynamic", (), *sizes)
    require(
        kind != NGRAM,
        FIELD,
        text,
        "asks for a shape that lookups, which branch where they find text, cannot honour",
        "write ngram@dynamic:DRAFTS",
    )
    try:
        parents = tree_flags.parse(shape)
    except InputError as error:
        raise InputError(FIELD, text, f"asks for a tree that {error.problem}", _REMEDY) from None
    return None, Choice("static", parents, len(parents) - 1, 0, 0)


def _size(text: str, digits: str) -> int:
    most = tree_flags.MOST_DRAFTS
    value = int(digits) if digits.isdigit() else 0
    require(1 <= value <= most, FIELD, text, "asks for no such number", f"give counts of 1..{most}")
    return value


def bind(target: jspec.Model, spec: Spec) -> jspec.BoundDrafter:
    """Return the drafter, under the name that it was asked for by.

    Raises:
        InputError: it cannot be loaded or does not fit the target.
    """
    try:
        bound = _bind(target, spec)
    except InputError as error:
        raise InputError(
            FIELD, spec.text, f"{error.problem} ({error.field}={error.value!r})", error.remedy
        ) from error
    return dataclasses.replace(bound, name=spec.text)


def _bind(target: jspec.Model, spec: Spec) -> jspec.BoundDrafter:
    tree, draws = spec.tree, cast("Draws", flags.DRAWS.value)
    if spec.kind == NGRAM:
        if tree is None:
            return jspec.ngram(flags.NGRAM_MAX.value, flags.NGRAM_MIN.value)
        # Trees do best with other lengths than chains, unless told.
        lengths = {"max_n": flags.NGRAM_MAX, "min_n": flags.NGRAM_MIN}
        told = {name: flag.value for name, flag in lengths.items() if flag.present}
        return jspec.ngram_tree(tree.nodes, tree.width, **told)
    if spec.kind == "trained":
        return _trained(target, spec)
    if spec.kind == EARLY_EXIT:
        model = jspec.early_exit_model(target, int(spec.argument))
    else:
        weights = cast("Weights", flags.WEIGHTS.value)
        model = jspec.load(spec.argument, flags.DTYPE.value, weights, flags.KERNELS.value)
    if tree is None:
        return jspec.draft_model(target, model, min_confidence=spec.min_confidence)
    if tree.kind == "dynamic":
        return jspec.dynamic_draft_tree(target, model, tree.nodes, tree.depth, tree.width)
    return jspec.draft_tree(target, model, tree.parents, draws)


def _trained(target: jspec.Model, spec: Spec) -> jspec.BoundDrafter:
    tree, shape = spec.tree, dict[str, Any]()
    if tree is not None and tree.kind == "dynamic":
        shape = {"tree": "dynamic", "nodes": tree.nodes, "depth": tree.depth, "width": tree.width}
    elif tree is not None:
        # Some can't draw: where nothing is asked for, each does as it does best.
        asked = {"draws": flags.DRAWS.value} if flags.DRAWS.present else {}
        shape = {"tree": tree.parents, **asked}
    elif spec.min_confidence:
        shape = {"min_confidence": spec.min_confidence}
    bound: jspec.BoundDrafter = jspec.load_drafter(
        target, spec.argument, lookup=spec.lookup, weights=spec.weights, **shape
    )
    return bound
