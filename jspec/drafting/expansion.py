"""Growing a tree by the drafter's confidence: EAGLE-2's expand and rerank (arXiv 2406.16858).

A node's value is the product of the confidences on the way to it, kept as a logarithm. Level by
level, the most valuable nodes of the level before are expanded into their most probable children;
at the end the most valuable nodes of all levels make the tree. Values never rise on the way down,
so these are connected.

Nothing here draws: children are the top-k, and whether one is kept depends on the drafter's
confidence alone. That is what keeps verification by rule 4 (point masses) exact at every
temperature; a place that were kept or dropped for a *sampled* token would bias the output.

All sizes are static, ties go to what was made first, so a parent never loses to its own child.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Children(NamedTuple):
    """Children of F nodes, C each, in the order of their parents, best first among siblings.

    Attributes:
        tokens: [B, F * C] int32.
        values: [B, F * C] float32; -inf where there is no child.
        parents: [F * C] int32, which of the F nodes each one comes from.
    """

    tokens: jax.Array
    values: jax.Array
    parents: jax.Array


def children(values: jax.Array, log_confidence: jax.Array, count: int) -> Children:
    """Return the `count` most probable children of every node.

    Args:
        values: [B, F] float32, the nodes' values; -inf for a node that is none.
        log_confidence: [B, F, V] float32, log probabilities of the next token, at most 0. What is
            forbidden (-inf) or no number is no child.
        count: C, static, at most V.
    """
    batch, nodes, _ = log_confidence.shape
    known = jnp.where(log_confidence > -jnp.inf, jnp.minimum(log_confidence, 0.0), -jnp.inf)
    best, tokens = jax.lax.top_k(known, count)
    return Children(
        tokens=tokens.reshape(batch, nodes * count),
        values=(values[:, :, None] + best).reshape(batch, nodes * count),
        parents=jnp.arange(nodes * count, dtype=jnp.int32) // count,
    )


class Kept(NamedTuple):
    """The nodes of a tree, chosen among P candidates; best first, and so parents first.

    Attributes:
        places: [B, K] int32, which candidate each draft is.
        parents: [B, K + 1] int32, parents in the tree whose node 0 is the root, for
            `trees.from_parent_rows`; places that are not filled hang from the root.
        valid: [B, K] bool, places that are filled.
    """

    places: jax.Array
    parents: jax.Array
    valid: jax.Array


def rerank(values: jax.Array, parents: jax.Array, count: int) -> Kept:
    """Return the `count` most valuable candidates, which are connected.

    Args:
        values: [B, P] float32, -inf for what is no candidate; none above its parent's.
        parents: [B, P] int32, each candidate's parent, an earlier candidate; -1 is the root.
        count: K, static, at most P.
    """
    batch, pool = values.shape
    kept, places = jax.lax.top_k(values, count)
    valid = kept > -jnp.inf
    row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], places.shape)
    node = jnp.broadcast_to(jnp.arange(1, count + 1, dtype=jnp.int32), places.shape)
    nodes = jnp.zeros((batch, pool), jnp.int32).at[row, places].set(node, unique_indices=True)
    parent = jnp.take_along_axis(parents, places, axis=1)
    above = jnp.take_along_axis(nodes, jnp.maximum(parent, 0), axis=1)
    above = jnp.where(valid & (parent >= 0), above, 0)
    root = jnp.full((batch, 1), -1, jnp.int32)
    return Kept(places=places, parents=jnp.concatenate([root, above], axis=1), valid=valid)
