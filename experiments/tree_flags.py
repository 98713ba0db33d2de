"""The tree that the flags ask for, parsed and checked before any model is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from absl.flags import FlagHolder

from experiments import flags
from jspec import tree_shapes, trees
from jspec.errors import InputError, require

MOST_DRAFTS = 127
# Of dynamic trees, where no flag says otherwise.
NODES, DEPTH, WIDTH, MATCHES = 15, 5, 4, 8
_OF_MODELS = ("draws", "tree_depth")
_REMEDY = "give branching by level (3,2,1), parents:-1,0,0,1 or dynamic"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tree, as far as the flags say.

    Attributes:
        kind: "static", "dynamic" (its shape is found anew in every round) or "optimal" (to be found
            by measuring).
        parents: of a static tree's nodes.
        nodes: most drafts; of a static tree, its drafts.
        depth: most levels of a dynamic or optimal one.
        width: of a dynamic one, nodes of a level that are grown on, and children of each; of an
            optimal one, most children of a node; of lookups, continuations looked at.
    """

    kind: str
    parents: tuple[int, ...]
    nodes: int
    depth: int
    width: int


def parse(text: str) -> tuple[int, ...]:
    """Return the parents of a static tree as --tree writes it.

    Raises:
        InputError: it is no tree, or has no drafts or too many.
    """
    listed = text.startswith("parents:")
    try:
        numbers = [int(item) for item in text.removeprefix("parents:").split(",")]
    except ValueError:
        raise InputError("tree", text, "is no tree", _REMEDY) from None
    if listed:
        try:
            trees.from_parents(tuple(numbers))
        except ValueError as error:
            raise InputError(
                "tree", text, f"is no tree ({error})", "give -1, then the number of earlier nodes"
            ) from None
        drafts = len(numbers) - 1
    else:
        require(min(numbers) >= 1, "tree", text, "has a level without children", "give counts >= 1")
        drafts = sum(math.prod(numbers[: level + 1]) for level in range(min(len(numbers), 128)))
    require(
        1 <= drafts <= MOST_DRAFTS,
        "tree",
        text,
        f"has {drafts if drafts < 10**6 else 'very many'} drafts",
        f"draft 1 to {MOST_DRAFTS}",
    )
    return tuple(numbers) if listed else tree_shapes.k_ary(numbers)


def written(parents: Sequence[int]) -> str:
    """Return what --tree has to say for this tree."""
    return "parents:" + ",".join(map(str, parents))


def choice(drafter: str | None = None) -> Choice | None:
    """Return the tree that the flags ask for, None for a chain.

    Args:
        drafter: what drafts it, "any" where that is left open; None takes the flag's.

    Raises:
        InputError: the flags contradict each other.
    """
    text, drafter = flags.TREE.value, drafter or flags.DRAFTER.value
    sizes = (flags.TREE_NODES, flags.TREE_DEPTH, flags.TREE_WIDTH)
    for holder in (flags.TREE, *sizes, flags.DRAWS):
        require(
            not holder.present or drafter != "none",
            holder.name,
            holder.value,
            "has no effect with --drafter=none",
            "leave it out, or choose a drafter",
        )
        require(
            not holder.present or drafter != "ngram" or holder.name not in _OF_MODELS,
            holder.name,
            holder.value,
            "has no effect with --drafter=ngram, which looks its drafts up",
            "leave it out, or give --drafter=trained, draft-model or early-exit",
        )
    found = _choice(text, drafter)
    if found is None or found.kind == "static":
        for size in sizes:
            require(
                not size.present,
                size.name,
                size.value,
                "has no effect without --tree=dynamic",
                "leave it out, or give --tree=dynamic",
            )
    if found is None:
        require(
            not flags.DRAWS.present,
            "draws",
            flags.DRAWS.value,
            "has no effect on a chain",
            "leave it out, or give --tree",
        )
        return None
    if found.kind == "dynamic":
        require(
            not flags.DRAWS.present or flags.DRAWS.value == "top-k",
            "draws",
            flags.DRAWS.value,
            "cannot be honoured by --tree=dynamic, which keeps the most probable nodes",
            "leave it out, or give a tree of fixed shape",
        )
    require(
        flags.VERIFICATION.value != "block",
        "verification",
        flags.VERIFICATION.value,
        "is a rule for chains, and --tree makes trees",
        "use token, or leave --tree out",
    )
    if found.kind != "optimal":
        require(
            not flags.GAMMA.present or flags.GAMMA.value == found.nodes,
            "gamma",
            flags.GAMMA.value,
            f"is not the {found.nodes} drafts of the tree",
            "leave it out: the tree says how many",
        )
    return found


def _choice(text: str | None, drafter: str) -> Choice | None:
    nodes, depth, width = (
        _size(flag, default)
        for flag, default in (
            (flags.TREE_NODES, NODES),
            (flags.TREE_DEPTH, DEPTH),
            (flags.TREE_WIDTH, MATCHES if drafter == "ngram" else WIDTH),
        )
    )
    if text is None:
        # Lookups branch by themselves: a size is enough.
        sized = flags.TREE_NODES.present and drafter == "ngram"
        return Choice("dynamic", (), nodes, depth, width) if sized else None
    if text in ("dynamic", "optimal"):
        if text == "optimal" and not flags.TREE_DEPTH.present:
            depth = min(nodes, 32)
        return Choice(text, (), nodes, depth, width)
    parents = parse(text)
    require(
        drafter != "ngram",
        "tree",
        text,
        "cannot be honoured by --drafter=ngram, whose trees take the shape of what it finds",
        "give --tree=dynamic, or --drafter=trained, draft-model or early-exit",
    )
    return Choice("static", parents, len(parents) - 1, 0, 0)


def _size(flag: FlagHolder[int | None], default: int) -> int:
    value = flag.value
    if value is None:
        return default
    require(
        1 <= value <= MOST_DRAFTS,
        flag.name,
        value,
        f"is outside 1..{MOST_DRAFTS}",
        "give a count in it",
    )
    return value
