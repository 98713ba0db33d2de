"""The accepted path's move in plain jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cache_commit(cache: jax.Array, start: jax.Array, path: jax.Array, nodes: int) -> jax.Array:
    """Move the entries of each row's accepted path; `cache_commit.op` says of what."""
    slots = cache.shape[2]
    row = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    source = start[:, None] + path
    moved = cache[row, :, jnp.clip(source, 0, slots - 1)]
    target = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    real = (path >= 0) & (path < nodes) & (source < slots)
    target = jnp.where(real, target, slots + target)
    return cache.at[row, :, target].set(moved, mode="drop", unique_indices=True)
