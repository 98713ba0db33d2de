"""Narrow heads side by side in one row of the cache, so that it fills a TPU's 128 lanes.

With P heads a row of P * H lanes, a query is 0 in the lanes of the others and takes its own lanes
of the result: attention over [B, G / P, S, P * H] then gives what it gives over [B, G, S, H]. The
matrix unit multiplies 128 lanes either way, and the cache has no padding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rows_of(groups: int, packed: int) -> int:
    """Return how many rows hold G KV heads, `packed` in each; the last one may hold fewer."""
    return -(-groups // packed)


def pack_entries(entries: jax.Array, packed: int) -> jax.Array:
    """Lay the KV heads of [B, T, G, H] entries side by side: [B, T, ceil(G / P), P * H].

    Args:
        entries: keys or values.
        packed: P.
    """
    batch, nodes, groups, head_dim = entries.shape
    rows = rows_of(groups, packed)
    entries = jnp.pad(entries, ((0, 0), (0, 0), (0, rows * packed - groups), (0, 0)))
    return entries.reshape(batch, nodes, rows, packed * head_dim)


def pack_query(query: jax.Array, groups: int, packed: int) -> jax.Array:
    """Return queries for packed keys: 0 in the lanes of heads that are not theirs.

    Args:
        query: [B, T, N, H].
        groups: G.
        packed: P.

    Returns:
        [B, T, ceil(G / P) * P * N / G, P * H], the heads in the same order, then padding.
    """
    batch, nodes, heads, head_dim = query.shape
    per, rows = heads // groups, rows_of(groups, packed)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, rows * packed * per - heads), (0, 0)))
    query = query.reshape(batch, nodes, rows, packed, per, 1, head_dim)
    own = jnp.eye(packed, dtype=bool)[None, None, None, :, None, :, None]
    spread = jnp.where(own, query, jnp.zeros_like(query))
    return spread.reshape(batch, nodes, rows * packed * per, packed * head_dim)


def unpack_output(mixed: jax.Array, heads: int, groups: int, packed: int) -> jax.Array:
    """Take each head's own lanes: [B, T, N', P * H] of `pack_query`'s heads to [B, T, N, H].

    Args:
        mixed: what attention gave for the packed queries.
        heads: N.
        groups: G.
        packed: P.
    """
    batch, nodes, _, lanes = mixed.shape
    per, rows, head_dim = heads // groups, rows_of(groups, packed), lanes // packed
    mixed = mixed.reshape(batch, nodes, rows, packed, per, packed, head_dim)
    own = jnp.stack([mixed[:, :, :, j, :, j, :] for j in range(packed)], axis=3)
    return own.reshape(batch, nodes, rows * packed * per, head_dim)[:, :, :heads]
