"""What the tree-attention kernels share: the static problem, and operands laid out for them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.reference import unpack_ancestors

# The widest pass a kernel takes; prefill goes through the reference's blocks.
MOST_NODES = 128
HEAD_DIMS = (64, 96, 128, 256)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static facts of one call, which decide whether and how a kernel runs.

    Attributes:
        batch: B.
        nodes: T.
        heads: N.
        groups: G.
        slots: S, of a row's contiguous cache or of its block table.
        head_dim: H.
        query_dtype: of the query and the output.
        cache_dtype: of keys and values.
        page: slots a page, or None where the cache is contiguous.
        window: sliding window, or None.
        softcap: bound of the scores, or None.
        scaled: whether keys or values come with scales.
    """

    batch: int
    nodes: int
    heads: int
    groups: int
    slots: int
    head_dim: int
    query_dtype: np.dtype
    cache_dtype: np.dtype
    page: int | None = None
    window: int | None = None
    softcap: float | None = None
    scaled: bool = False

    @property
    def queries_per_kv(self) -> int:
        """N / G."""
        return self.heads // self.groups

    @property
    def rows(self) -> int:
        """Rows of the folded query: N / G * T."""
        return self.queries_per_kv * self.nodes

    @property
    def words(self) -> int:
        """W, 32-bit words of a node's ancestor bits."""
        return -(-self.nodes // 32)


def unsupported(problem: Problem) -> str | None:
    """Return why no kernel takes the problem, or None where the backend decides."""
    if problem.scaled or problem.cache_dtype not in (jnp.bfloat16, jnp.float32):
        return (
            "the kernels read bfloat16 and float32 keys and values, not "
            f"{problem.cache_dtype.name}{' with scales' if problem.scaled else ''}"
        )
    if problem.query_dtype != problem.cache_dtype:
        return (
            f"the query is {problem.query_dtype.name} and the cache {problem.cache_dtype.name}; "
            "the kernels want one dtype"
        )
    if problem.nodes > MOST_NODES:
        return f"{problem.nodes} nodes a row; the kernels take at most {MOST_NODES}"
    if problem.head_dim not in HEAD_DIMS:
        return f"a head dimension of {problem.head_dim} is not one of {HEAD_DIMS}"
    return None


def fold(query: jax.Array, groups: int, scale: float | None) -> jax.Array:
    """Scale the query in float32 and fold each group's heads into rows.

    Args:
        query: [B, T, N, H].
        groups: G.
        scale: factor of the scores; None is H ** -0.5.

    Returns:
        [B, G, N/G * T, H] in the query's dtype, row (n % (N/G)) * T + t.
    """
    batch, nodes, heads, head_dim = query.shape
    per = heads // groups
    scale = head_dim**-0.5 if scale is None else scale
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    folded = scaled.reshape(batch, nodes, groups, per, head_dim).transpose(0, 2, 3, 1, 4)
    return folded.reshape(batch, groups, per * nodes, head_dim)


def unfold(folded: jax.Array, nodes: int) -> jax.Array:
    """Undo `fold`: [B, G, N/G * T, H] to [B, T, N, H]."""
    batch, groups, rows, head_dim = folded.shape
    per = rows // nodes
    out = folded.reshape(batch, groups, per, nodes, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, nodes, groups * per, head_dim)


def row_words(ancestors: jax.Array, per: int, window: int | None) -> jax.Array:
    """Return what a kernel needs to know of each folded row: its ancestor bits and its depth.

    Ancestors that lie outside the window lose their bit here, so that a kernel applies the window
    to the prefix alone.

    Args:
        ancestors: [T, W] or [B, T, W] uint32.
        per: N / G.
        window: sliding window, or None.

    Returns:
        [1 or B, N/G * T, W + 1] int32: the words, then the depth.
    """
    nodes, count = ancestors.shape[-2:]
    ancestors = ancestors.reshape(-1, nodes, count)
    depth = jnp.sum(jax.lax.population_count(ancestors).astype(jnp.int32), axis=-1) - 1
    if window is not None and window < nodes:
        near = depth[:, None, :] > depth[:, :, None] - window
        kept = unpack_ancestors(ancestors, nodes) & near
        kept = jnp.pad(kept, ((0, 0), (0, 0), (0, 32 * count - nodes)))
        kept = kept.reshape(-1, nodes, count, 32).astype(jnp.uint32)
        place = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]
        ancestors = jnp.sum(kept << place, axis=-1, dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(ancestors, jnp.int32)
    return jnp.tile(jnp.concatenate([words, depth[:, :, None]], axis=-1), (1, per, 1))
