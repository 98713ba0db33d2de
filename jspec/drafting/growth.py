"""A dynamic tree while it grows, whatever gives the confidence (EAGLE-2, arXiv 2406.16858).

The nodes that are run, E in all, are the root and `width` of each level but the last; level by
level their children join the pool of P candidates, of which the most valuable make the row's tree
(`jspec.drafting.expansion`). Every row has its own, and none needs another program.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import trees
from jspec.drafting import expansion
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.errors import require, require_integer
from jspec.trees import Topology


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large trees grow.

    Attributes:
        nodes: drafts that are kept.
        depth: levels.
        width: nodes of a level that are expanded, and children of each.
    """

    nodes: int
    depth: int
    width: int

    @property
    def run(self) -> int:
        """E, nodes that are run."""
        return 1 + (self.depth - 1) * self.width

    def places(self, level: jax.Array) -> jax.Array:
        """Return [W] int32, which of the E nodes those of a level below the root are."""
        return 1 + (level - 1) * self.width + jnp.arange(self.width, dtype=jnp.int32)


def checked(nodes: int, depth: int, width: int, tokens: int) -> Sizes:
    """Return the sizes if they make sense.

    Args:
        nodes: drafts a round.
        depth: deepest draft; the drafter runs as often.
        width: nodes of a level that are expanded, and children that each of them may get.
        tokens: how many the drafter can propose.

    Raises:
        InputError: a size is no integer or out of its range, or depth and width give fewer nodes.
    """
    for field, value in (("nodes", nodes), ("depth", depth), ("width", width)):
        require_integer(field, value)
        require(1 <= value <= 127, field, value, "is outside 1..127", "give a smaller tree")
    require(
        width <= tokens,
        "width",
        width,
        f"is above the draft model's {tokens} tokens",
        "give a narrower tree",
    )
    most = width + (depth - 1) * width**2
    require(
        nodes <= most,
        "nodes",
        nodes,
        f"is more than the {most} that depth {depth} and width {width} can give",
        "give fewer nodes, or a deeper or wider tree",
    )
    return Sizes(nodes, depth, width)


class Growth(NamedTuple):
    """A tree being grown: E nodes that are run, P candidates, W nodes to expand next.

    Attributes:
        tokens: [B, E] int32.
        parents: [B, E] int32, among the E; what is not filled yet hangs from the root.
        candidates: [B, P] int32, tokens.
        values: [B, P] float32; -inf where there is none yet.
        above: [B, P] int32, the candidate that is the parent; -1 is the root.
        slots: [B, P] int32, which of the E nodes the candidate is; -1 if it is not run.
        next_values: [B, W] float32.
        next_candidates: [B, W] int32, -1 for the root.
    """

    tokens: jax.Array
    parents: jax.Array
    candidates: jax.Array
    values: jax.Array
    above: jax.Array
    slots: jax.Array
    next_values: jax.Array
    next_candidates: jax.Array

    def topology(self) -> Topology:
        """Return that of the E nodes."""
        return trees.from_parent_rows(self.parents)

    def confidence(
        self, context: Context, logits: jax.Array, topology: Topology, places: jax.Array
    ) -> jax.Array:
        """Return [B, F, V] log probabilities of the tokens after some nodes.

        Args:
            context: of the round.
            logits: [B * F, V] float32 after them.
            topology: of the E nodes.
            places: [F] int32, which of the E they are.
        """
        batch, found = context.length.shape[0], places.shape[0]
        ways = jnp.take(trees.paths(self.tokens[:, 1:], topology), places, axis=1)
        logits = context.edit(logits.reshape(batch, found, -1), ways)
        return jax.nn.log_softmax(logits, axis=-1)


def start(sizes: Sizes, context: Context) -> Growth:
    """Return the root alone, which is to be expanded."""
    batch = context.length.shape[0]
    pool = (batch, sizes.depth * sizes.width**2)
    pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
    node = jnp.arange(sizes.run, dtype=jnp.int32)
    first = jnp.arange(sizes.width, dtype=jnp.int32) == 0
    return Growth(
        tokens=jnp.broadcast_to(pending, (batch, sizes.run)),
        parents=jnp.broadcast_to(jnp.where(node == 0, -1, 0), (batch, sizes.run)),
        candidates=jnp.zeros(pool, jnp.int32),
        values=jnp.full(pool, -jnp.inf, jnp.float32),
        above=jnp.full(pool, -1, jnp.int32),
        slots=jnp.full(pool, -1, jnp.int32),
        next_values=jnp.broadcast_to(
            jnp.where(first, jnp.float32(0), -jnp.inf), (batch, sizes.width)
        ),
        next_candidates=jnp.full((batch, sizes.width), -1, jnp.int32),
    )


def grow(
    sizes: Sizes, growth: Growth, level: jax.Array, places: jax.Array, log_confidence: jax.Array
) -> Growth:
    """Expand the nodes chosen for it and choose those of the level below.

    Args:
        sizes: of the tree.
        growth: so far.
        level: int32 scalar, of the nodes to be expanded; 0 is the root's.
        places: [F] int32, which of the E nodes they are: the root alone, or W.
        log_confidence: [B, F, V] float32 after them.
    """
    width = sizes.width
    batch, count, _ = log_confidence.shape
    found = expansion.children(growth.next_values[:, :count], log_confidence, width)
    chosen_values, chosen = jax.lax.top_k(found.values, width)

    # The last level's nodes have no place among the E: what is past the end is dropped.
    below = sizes.places(level + 1)
    row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], chosen.shape)
    first = level * width * width
    at = first + chosen

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(array, values, first, axis=1)

    return Growth(
        tokens=growth.tokens.at[row, below].set(
            jnp.take_along_axis(found.tokens, chosen, axis=1), mode="drop"
        ),
        parents=growth.parents.at[row, below].set(
            jnp.take(places, jnp.take(found.parents, chosen)), mode="drop"
        ),
        candidates=put(growth.candidates, found.tokens),
        values=put(growth.values, found.values),
        above=put(growth.above, jnp.take(growth.next_candidates, found.parents, axis=1)),
        slots=growth.slots.at[row, at].set(
            jnp.broadcast_to(jnp.where(below < sizes.run, below, -1), chosen.shape)
        ),
        next_values=chosen_values,
        next_candidates=at,
    )


def tree(sizes: Sizes, growth: Growth, deepest: jax.Array) -> tuple[Proposal, jax.Array]:
    """Return the most valuable tree.

    Args:
        sizes: of the tree.
        growth: of all levels.
        deepest: [B] int32, deepest draft of use to each row.

    Returns:
        The proposal, and [B, nodes + 1] int32, which of the E each of its nodes is; -1 if none.
    """
    level = 1 + jnp.arange(growth.values.shape[1], dtype=jnp.int32) // sizes.width**2
    values = jnp.where(level[None, :] <= deepest[:, None], growth.values, -jnp.inf)
    kept = expansion.rerank(values, growth.above, sizes.nodes)
    slots = jnp.take_along_axis(growth.slots, kept.places, axis=1)
    proposal = Proposal(
        tokens=jnp.take_along_axis(growth.candidates, kept.places, axis=1),
        topology=trees.from_parent_rows(kept.parents),
        valid=kept.valid,
        law=PointMass(),
    )
    return proposal, jnp.pad(slots, [(0, 0), (1, 0)])
