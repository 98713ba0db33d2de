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


# Passes of at least this many nodes (prefill) go block by block over the slots in use; narrower
# ones are cheaper in one piece, since a cache is hardly larger than its longest row.
WIDE = 32
BLOCK = 128
# Grouped queries (N/G * T) up to which scores are computed with the keys first.
FEW = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which slots the nodes of one forward pass attend to.

    Attributes:
        visible: [B, T, S] bool, slots that each node attends to.
        used: int32 scalar, slots that some row's prefix or nodes reach.
    """

    visible: jax.Array
    used: jax.Array


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


def plan(
    prefix_length: jax.Array, ancestors: jax.Array, slots: int, window: int | None = None
) -> Plan:
    """Plan one forward pass of T nodes.

    Args:
        prefix_length: [B] int32, committed entries of each row; the T nodes lie at the slots
            prefix_length .. prefix_length + T - 1.
        ancestors: [T, W] or [B, T, W] uint32 packed ancestor-or-self bits.
        slots: S, cache slots.
        window: sliding window: a node at position p sees positions above p - window alone. A
            node's position is prefix_length + its depth, whatever its slot. None: no window.
    """
    batch, nodes = prefix_length.shape[0], ancestors.shape[-2]
    dense = jnp.broadcast_to(unpack_ancestors(ancestors, nodes), (batch, nodes, nodes))
    offset = jnp.arange(slots, dtype=jnp.int32)[None, :] - prefix_length[:, None]
    in_tree = jnp.take_along_axis(dense, jnp.clip(offset, 0, nodes - 1)[:, None, :], axis=2)
    is_node = (offset >= 0) & (offset < nodes)
    visible = (offset < 0)[:, None, :] | (is_node[:, None, :] & in_tree)
    if window is not None:
        depth = jnp.sum(dense, axis=-1, dtype=jnp.int32) - 1
        # Relative to the prefix's end: a cached entry lies at its offset, a node at its depth.
        of_node = jnp.take_along_axis(depth, jnp.clip(offset, 0, nodes - 1), axis=1)
        place = jnp.where(offset < 0, offset, of_node)
        visible &= place[:, None, :] > depth[:, :, None] - window
    # The barrier keeps XLA from recomputing the mask in every layer.
    return jax.lax.optimization_barrier(
        Plan(visible=visible, used=jnp.minimum(jnp.max(prefix_length) + nodes, slots))
    )


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    planned: Plan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attend from T nodes to each row's committed prefix and to their own ancestors.

    Scores of stale slots are masked, whatever is in them. Values must be finite everywhere, stale
    slots included (0 times NaN is NaN): `jspec.cache.write` stores no other.

    Args:
        query: [B, T, N, H], rotated.
        keys: [B, G, S, H], with the nodes' own entries already written past the prefix.
        values: [B, G, S, H], finite.
        planned: of this pass.
        scale: factor of the scores; None is H ** -0.5.
        softcap: c in scores -> c tanh(scores / c), before the mask (Gemma 2, arXiv 2408.00118);
            None caps nothing.

    Returns:
        [B, T, N, H] in the query's dtype; products accumulate in float32.
    """
    batch, nodes, heads, head_dim = query.shape
    groups, slots = keys.shape[1], keys.shape[2]
    per = heads // groups

    # The group's queries fold into rows, so keys and values are read once a group.
    grouped = query.reshape(batch, nodes, groups, per, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, groups, per * nodes, head_dim)
    # In float32: rounded to bfloat16, Gemma 2 27B's 144 ** -0.5 makes all scores 0.2 % too large.
    scale = head_dim**-0.5 if scale is None else scale
    grouped = (grouped.astype(jnp.float32) * scale).astype(query.dtype)
    if nodes >= WIDE and slots % BLOCK == 0 and slots > BLOCK:
        out = _by_blocks(grouped, keys, values, planned, softcap)
    else:
        scores = _scores(grouped, keys, planned.visible, softcap)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        out = _mix(weights, values) / jnp.sum(weights, axis=-1, keepdims=True)
    out = out.astype(query.dtype)
    out = out.reshape(batch, groups, per, nodes, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, nodes, heads, head_dim)


def _scores(
    grouped: jax.Array, keys: jax.Array, visible: jax.Array, softcap: float | None
) -> jax.Array:
    """Return capped and masked float32 scores [B, G, M, S] of M = N/G * T grouped queries."""
    batch, groups, rows, _ = grouped.shape
    nodes, slots = visible.shape[1:]
    if rows <= FEW:
        # Keys first: XLA:CPU would repack them all for the other order, which costs more than the
        # product of a few queries. The barrier keeps it from changing the order back.
        scores = jnp.einsum("bgsh,bgmh->bgsm", keys, grouped, preferred_element_type=jnp.float32)
        scores = jnp.swapaxes(jax.lax.optimization_barrier(scores), 2, 3)
    else:
        scores = jnp.einsum("bgmh,bgsh->bgms", grouped, keys, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = scores.reshape(batch, groups, rows // nodes, nodes, slots)
    scores = jnp.where(visible[:, None, None], scores, jnp.float32(MASKED_SCORE))
    return scores.reshape(batch, groups, rows, slots)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Return float32 weighted sums [B, G, M, H] of the values."""
    return jnp.einsum(
        "bgms,bgsh->bgmh",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )


def _by_blocks(
    grouped: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    planned: Plan,
    softcap: float | None,
) -> jax.Array:
    """Attend block by block of the slots in use, with a running maximum and sum.

    The online softmax of Milakov and Gimelshein (arXiv 1805.02867). What a block adds that a row
    sees nothing of has weight 0 once a block follows that it sees something of, as its own does.
    """
    shape = grouped.shape

    def step(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, mixed = carry
        start = index * BLOCK
        some_keys, some_values, some_visible = (
            jax.lax.dynamic_slice_in_dim(array, start, BLOCK, axis=2)
            for array in (keys, values, planned.visible)
        )
        scores = _scores(grouped, some_keys, some_visible, softcap)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - higher)
        keep = jnp.exp(highest - higher)
        total = total * keep + jnp.sum(weights, axis=-1, keepdims=True)
        return higher, total, mixed * keep + _mix(weights, some_values)

    start = (
        jnp.full((*shape[:3], 1), MASKED_SCORE, jnp.float32),
        jnp.zeros((*shape[:3], 1), jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    blocks = (planned.used + (BLOCK - 1)) // BLOCK
    _, total, mixed = jax.lax.fori_loop(0, blocks, step, start)
    return mixed / total


def gather_pages(pool: jax.Array, block_table: jax.Array) -> jax.Array:
    """Lay a paged cache out row by row.

    Args:
        pool: [P, G, page, ...] pages.
        block_table: [B, S / page] int32, pages of each row in order. Entries past a row's length
            may hold anything.

    Returns:
        [B, G, S, ...].
    """
    pages = jnp.moveaxis(jnp.take(pool, block_table, axis=0, mode="clip"), 2, 1)
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])


def tree_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    prefix_length: jax.Array,
    ancestors: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    block_table: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    planned: Plan | None = None,
) -> jax.Array:
    """Plan and attend in one call; `pallas_kernels.tree_attention.tree_attention` says of what.

    A plan given is used instead of one made from the lengths, the tree and the window.
    """
    if block_table is not None:
        keys, values = gather_pages(keys, block_table), gather_pages(values, block_table)
        if key_scales is not None:
            key_scales = gather_pages(key_scales, block_table)
        if value_scales is not None:
            value_scales = gather_pages(value_scales, block_table)
    if planned is None:
        planned = plan(prefix_length, ancestors, keys.shape[2], window)
    dtype = query.dtype
    if key_scales is not None or value_scales is not None:
        query = query.astype(jnp.float32)
        keys, values = _dequantize(keys, key_scales), _dequantize(values, value_scales)
    return attend(query, keys, values, planned, scale=scale, softcap=softcap).astype(dtype)


def _dequantize(entries: jax.Array, scales: jax.Array | None) -> jax.Array:
    wide = entries.astype(jnp.float32)
    return wide if scales is None else wide * scales.astype(jnp.float32)[..., None]
