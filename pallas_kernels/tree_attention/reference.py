"""Tree attention in plain jax.numpy: the meaning of the op, and the XLA path on every backend.

What depends on lengths and topology alone is planned once a forward pass; every layer then attends
by the same plan.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# Finite, so that a row whose every slot is masked gives numbers instead of 0/0.
MASKED_SCORE = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which slots the nodes of one forward pass attend to.

    Attributes:
        visible: [B, T, S] bool, slots that each node attends to.
        written: [B, S] bool, slots that hold the prefix or this pass's nodes.
    """

    visible: jax.Array
    written: jax.Array


def unpack_ancestors(ancestors: jax.Array, size: int) -> jax.Array:
    """Unpack ancestor bits.

    Args:
        ancestors: [..., W] uint32, bit j % 32 of word j // 32 set where node j is the node itself
            or one of its ancestors.
        size: T, number of nodes, at most 32 * W.

    Returns:
        [..., T] bool.
    """
    node = jnp.arange(size, dtype=jnp.uint32)
    words = jnp.take(ancestors, node // 32, axis=-1)
    shift = jnp.broadcast_to(node % 32, words.shape)
    return (jnp.right_shift(words, shift) & jnp.uint32(1)) == jnp.uint32(1)


def plan(prefix_length: jax.Array, ancestors: jax.Array, slots: int) -> Plan:
    """Plan one forward pass of T nodes.

    Args:
        prefix_length: [B] int32, committed entries of each row; the T nodes lie at the slots
            prefix_length .. prefix_length + T - 1.
        ancestors: [T, W] or [B, T, W] uint32 packed ancestor-or-self bits.
        slots: S, cache slots.
    """
    batch, nodes = prefix_length.shape[0], ancestors.shape[-2]
    dense = jnp.broadcast_to(unpack_ancestors(ancestors, nodes), (batch, nodes, nodes))
    offset = jnp.arange(slots, dtype=jnp.int32)[None, :] - prefix_length[:, None]
    in_tree = jnp.take_along_axis(dense, jnp.clip(offset, 0, nodes - 1)[:, None, :], axis=2)
    is_node = (offset >= 0) & (offset < nodes)
    visible = (offset < 0)[:, None, :] | (is_node[:, None, :] & in_tree)
    # The barrier keeps XLA from recomputing the mask in every layer.
    return jax.lax.optimization_barrier(Plan(visible=visible, written=offset < nodes))


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, planned: Plan) -> jax.Array:
    """Attend from T nodes to each row's committed prefix and to their own ancestors.

    Stale slots are masked in scores and in values, so NaN left there by an earlier request does
    not leak (0 times NaN is NaN).

    Args:
        query: [B, T, N, H], rotated.
        keys: [B, G, S, H], with the nodes' own entries already written past the prefix.
        values: [B, G, S, H].
        planned: of this pass.

    Returns:
        [B, T, N, H] in the query's dtype; products accumulate in float32.
    """
    batch, nodes, heads, head_dim = query.shape
    groups, slots = keys.shape[1], keys.shape[2]
    per = heads // groups
    live = jnp.broadcast_to(planned.written[:, None, :, None], values.shape)
    values = jnp.where(live, values, jnp.zeros_like(values))

    # The group's queries fold into rows, so keys and values are read once a group.
    grouped = query.reshape(batch, nodes, groups, per, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, groups, per * nodes, head_dim)
    scale = jnp.asarray(head_dim**-0.5, query.dtype)
    scores = jnp.einsum(
        "bgmh,bgsh->bgms", grouped * scale, keys, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, groups, per, nodes, slots)
    scores = jnp.where(planned.visible[:, None, None], scores, jnp.float32(MASKED_SCORE))
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1).reshape(batch, groups, per * nodes, 1)
    weights = weights.reshape(batch, groups, per * nodes, slots).astype(values.dtype)
    mixed = jnp.einsum("bgms,bgsh->bgmh", weights, values, preferred_element_type=jnp.float32)
    out = (mixed / total).astype(query.dtype)
    out = out.reshape(batch, groups, per, nodes, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, nodes, heads, head_dim)


def tree_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    prefix_length: jax.Array,
    ancestors: jax.Array,
) -> jax.Array:
    """Plan and attend in one call: the op as the kernels will sign it.

    Args:
        query: [B, T, N, H], rotated.
        keys: [B, G, S, H], with the nodes' own entries already written past the prefix.
        values: [B, G, S, H].
        prefix_length: [B] int32.
        ancestors: [T, W] or [B, T, W] uint32 packed ancestor-or-self bits.

    Returns:
        [B, T, N, H] in the query's dtype.
    """
    return attend(query, keys, values, plan(prefix_length, ancestors, keys.shape[2]))
