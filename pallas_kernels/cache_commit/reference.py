"""The accepted path's move in plain jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cache_commit(cache: jax.Array, start: jax.Array, path: jax.Array, nodes: int) -> jax.Array:
    """Move the entries of each row's accepted path next to its prefix.

    The entry at slot start + path[i] goes to slot start + i; every other slot stays as it is.

    Args:
        cache: [B, G, S, H].
        start: [B] int32, at least 0: committed entries of each row, behind which its nodes lie.
        path: [B, D] int32 node indices below `nodes`, ascending, with path[i] at least i; -1
            (behind the others) moves nothing. A slot past the capacity neither gives nor takes.
        nodes: T, at least D: how many entries behind `start` a path may come from.

    Returns:
        [B, G, S, H].
    """
    slots = cache.shape[2]
    row = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    source = start[:, None] + path
    moved = cache[row, :, jnp.clip(source, 0, slots - 1)]
    target = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    real = (path >= 0) & (path < nodes) & (source < slots)
    target = jnp.where(real, target, slots + target)
    return cache.at[row, :, target].set(moved, mode="drop", unique_indices=True)
