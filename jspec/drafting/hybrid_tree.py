"""A hybrid of prompt lookup and a head, as one tree that holds both.

The most valuable continuations that lookup finds (`jspec.drafting.ngram_tree`) are put into the
head's tree: what both propose is one node, and the head's last nodes make room for the rest. All
candidates are chosen without chance, so the tree is verified as point masses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec import trees
from jspec.drafting import BoundDrafter, expansion
from jspec.drafting.hybrid_state import (
    HybridState,
    HybridStateDrafter,
    hidden_size,
)
from jspec.drafting.ngram_tree import NGramTreeDrafter, ngram_tree
from jspec.drafting.protocol import MOST_NODES, Context, PointMass, Proposal
from jspec.errors import require, require_integer


@dataclasses.dataclass(frozen=True)
class HybridTreeDrafter(HybridStateDrafter):
    """Drafts the head's tree with looked-up continuations in it.

    Attributes:
        lookup: the other drafter.
        nodes: drafts of the head's tree, and of the whole.
        lookups: most of them that lookup gives.
    """

    lookup: NGramTreeDrafter
    nodes: int
    lookups: int

    def propose(
        self, params: Any, state: HybridState, context: Context, gamma: int
    ) -> tuple[Proposal, HybridState]:
        """Return the tree; `gamma` is its number of drafts."""
        if gamma != self.nodes:
            raise ValueError(f"gamma is {gamma}, but the tree has {self.nodes} drafts")
        head = self.catch_up(params, state, context, gamma + 1, jnp.bool_(True))
        own, head = self.head.propose(params, head, context, gamma)
        if not isinstance(own.law, PointMass):
            raise ValueError("the head draws its drafts; a tree of both takes the best ones")
        found, _ = self.lookup.propose((), (), context, self.lookups)
        tokens, values, parents = _merged(own, found)
        kept = expansion.rerank(values, parents, gamma)
        proposal = Proposal(
            tokens=jnp.take_along_axis(tokens, kept.places, axis=1),
            topology=trees.from_parent_rows(kept.parents),
            valid=kept.valid,
            law=PointMass(),
        )
        nodes = jnp.where(kept.valid & (kept.places < gamma), kept.places + 1, -1)
        after = MOST_NODES - 1 - gamma
        return proposal, dataclasses.replace(
            state,
            head=head,
            ran=jnp.ones_like(state.ran),
            nodes=jnp.pad(
                jnp.pad(nodes, [(0, 0), (1, 0)]), [(0, 0), (0, after)], constant_values=-1
            ),
        )


def _merged(own: Proposal, found: Proposal) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the nodes of both trees as candidates for `expansion.rerank`.

    What was found comes first, in its order, then the head's nodes in theirs; a node of both counts
    as found, and is the head's.

    Returns:
        Tokens, values and parents, [B, K + L] each: the head's K nodes, then the L found ones.
    """
    batch, count = own.tokens.shape
    more = found.tokens.shape[1]
    above = jnp.broadcast_to(own.topology.by_row().parents[:, 1:], (batch, count)) - 1
    found_above = jnp.asarray(found.topology.by_row().parents)
    order = jnp.arange(count + more, dtype=jnp.float32)
    valid = jnp.concatenate([own.valid, jnp.zeros_like(found.valid)], axis=1)
    values = jnp.where(valid, -order, -jnp.inf)

    def put(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Find the place of a found node, whose parent has one already."""
        places, values, parents = carry
        parent = jax.lax.dynamic_index_in_dim(found_above, index + 1, axis=1)
        parent = jnp.take_along_axis(places, parent, axis=1)  # [B, 1]
        token = jax.lax.dynamic_index_in_dim(found.tokens, index, axis=1)
        usable = jax.lax.dynamic_index_in_dim(found.valid, index, axis=1)
        same = own.valid & (above == parent) & (own.tokens == token)
        known = jnp.any(same, axis=1, keepdims=True)
        place = jnp.where(known, jnp.argmax(same, axis=1, keepdims=True), count + index)
        place = place.astype(jnp.int32)
        here = (jnp.arange(count + more, dtype=jnp.int32)[None, :] == place) & usable
        value = (more - index).astype(jnp.float32)
        return (
            jax.lax.dynamic_update_slice_in_dim(places, place, index + 1, axis=1),
            jnp.where(here, jnp.maximum(values, value), values),
            jnp.where(here, parent, parents),
        )

    start = (
        jnp.full((batch, more + 1), -1, jnp.int32),  # the root's is -1
        values,
        jnp.concatenate([above, jnp.full((batch, more), -1, jnp.int32)], axis=1),
    )
    _, values, parents = jax.lax.fori_loop(0, more, put, start)
    return jnp.concatenate([own.tokens, found.tokens], axis=1), values, parents


def hybrid_tree(
    head: BoundDrafter, lookups: int | None = None, matches: int = 4, max_n: int = 5, min_n: int = 2
) -> BoundDrafter:
    """Return a drafter whose trees hold looked-up continuations and a head's candidates.

    Args:
        head: a drafter of trees, whose nodes are chosen without chance; the trees have as many
            nodes as its own.
        lookups: most nodes of a tree that lookup gives; None takes a third, but one at least.
        matches: how many continuations are looked at.
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match.

    Raises:
        InputError: a number is no integer or out of its range, or the head drafts no such trees.
    """
    require(
        head.drafts is not None and getattr(head.drafter, "draws", "top-k") == "top-k",
        "head",
        head.name,
        "drafts chains, or draws its trees' nodes",
        "give a drafter of trees, a draft model's with draws='top-k'",
    )
    nodes = head.drafts or 0
    if lookups is None:
        lookups = max(nodes // 3, 1)
    require_integer("lookups", lookups)
    require(
        1 <= lookups <= nodes,
        "lookups",
        lookups,
        f"is outside 1..{nodes}, the nodes of the head's tree",
        "give fewer",
    )
    lookup = ngram_tree(lookups, matches, max_n, min_n).drafter
    assert isinstance(lookup, NGramTreeDrafter)
    drafter = HybridTreeDrafter(
        head.drafter, 2 * (nodes + 1), hidden_size(head), lookup, nodes, lookups
    )
    return BoundDrafter(f"hybrid-{head.name}", drafter, head.params, drafts=nodes)
