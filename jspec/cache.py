"""Functional KV cache: truth by length.

Slots at or past a row's length hold scratch or the remains of an earlier request and are never
attended to, so rolling back is setting a length and clearing is not needed. A round writes its T
nodes past the length; committing makes the accepted ones part of the prefix.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.config import ModelConfig
from pallas_kernels.cache_commit import cache_commit
from pallas_kernels.cache_write import cache_write
from pallas_kernels.dispatch import Kernels
from pallas_kernels.tree_attention import packing

# By this process's default backend.
DEFAULT_KERNELS = Kernels()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, contiguous, one buffer a layer and side.

    Attributes:
        keys: L arrays [B, G, S, H]; where heads are packed (`init`) [B, ceil(G / P), S, P * H].
        values: as keys.
        length: [B] int32, committed entries of each row.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def capacity(self) -> int:
        """S, slots a row."""
        return int(self.keys[0].shape[2])


def whole_blocks(slots: int) -> int:
    """Return so many slots rounded up to whole blocks of 128: few shapes, and whole tiles."""
    return -(-slots // 128) * 128


def init(
    config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, packed: int = 1
) -> KVCache:
    """Return an empty cache (zeros; "empty" memory could hold NaN).

    Args:
        config: the model that writes it.
        batch: B.
        capacity: S, the longest row plus the T scratch entries of a round.
        dtype: of keys and values.
        packed: P, heads that lie side by side in one row.
    """
    rows = packing.rows_of(config.num_kv_heads, packed)
    shape = (batch, rows, capacity, packed * config.head_dim)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
        length=jnp.zeros(batch, jnp.int32),
    )


def write(
    cache: KVCache,
    layer: int,
    keys: jax.Array,
    values: jax.Array,
    kernels: Kernels = DEFAULT_KERNELS,
) -> tuple[jax.Array, jax.Array]:
    """Return one layer's buffers with the [B, T, G, H] entries written past each row's length.

    Entries are converted to the cache's dtype, and packed as its heads are.

    A value that is not finite is stored as 0, with NaN in its place of the key. Whoever attends to
    the entry gets NaN from the score, and nobody else does: a NaN value would reach every node of
    the pass, since a weight of 0 does not silence it.
    """
    finite = jnp.isfinite(values)
    keys = jnp.where(finite, keys, jnp.full_like(keys, jnp.nan))
    values = jnp.where(finite, values, jnp.zeros_like(values))

    def written(buffer: jax.Array, entries: jax.Array) -> jax.Array:
        packed = buffer.shape[3] // entries.shape[3]
        if packed > 1:
            entries = packing.pack_entries(entries, packed)
        entries = entries.astype(buffer.dtype)
        return cache_write(buffer, entries, cache.length, implementation=kernels)

    return written(cache.keys[layer], keys), written(cache.values[layer], values)


def commit(cache: KVCache, count: jax.Array) -> KVCache:
    """Make each row's first `count` scratch entries ([B] int32) part of its prefix.

    A chain's accepted path already lies contiguous past the length.
    """
    return dataclasses.replace(cache, length=cache.length + count)


def gather_path(
    cache: KVCache,
    path: jax.Array,
    kernels: Kernels = DEFAULT_KERNELS,
    scratch: int | None = None,
) -> KVCache:
    """Move the scratch entries of an accepted path to where `commit` takes them from.

    Args:
        cache: with the T nodes' entries past each row's length.
        path: [B, T] int32, the node of depth i at i; the root is node 0, and 0 is what follows
            the path's end.
        kernels: what the program asks for.
        scratch: entries that the path may come from, where they are not the T nodes' own.

    Returns:
        The cache whose entry length + i is the node path[:, i]'s; nothing before a row's length or
        past its scratch is touched.
    """
    drafts = path.shape[1] - 1
    if drafts == 0:
        return cache
    behind = drafts if scratch is None else max(scratch - 1, drafts)
    # The root is where it belongs; past the path's end its 0 becomes the -1 of "nothing to move".
    moves = path[:, 1:] - 1

    def move(buffer: jax.Array) -> jax.Array:
        return cache_commit(buffer, cache.length + 1, moves, behind, implementation=kernels)

    return dataclasses.replace(
        cache,
        keys=tuple(move(keys) for keys in cache.keys),
        values=tuple(move(values) for values in cache.values),
    )


def truncate(cache: KVCache, length: jax.Array) -> KVCache:
    """Cut every row to at most `length` ([B] int32) entries."""
    return dataclasses.replace(cache, length=jnp.minimum(cache.length, length))


def permute_rows(cache: KVCache, source: jax.Array) -> KVCache:
    """Return the cache whose row b is the old row source[b] ([B] int32)."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, source, axis=0), cache)
