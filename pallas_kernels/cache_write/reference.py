"""Ragged cache write in plain jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cache_write(cache: jax.Array, entries: jax.Array, start: jax.Array) -> jax.Array:
    """Write each row's T entries at its own start, in place when the cache is donated.

    A scatter with unique indices: XLA neither copies the cache nor serialises the rows, as it does
    for a vmapped dynamic_update_slice. Entries that fall past the capacity are dropped, never
    clamped onto live ones. `cache_write.op` says what the arguments are.
    """
    batch, count = entries.shape[:2]
    if batch * count == 1:
        # XLA turns a one-index scatter into a select of a dynamic-update-slice, which it then fuses
        # into every reader and copies the cache for. A second index past the capacity, which is
        # dropped, keeps it a scatter.
        entries = jnp.concatenate([entries, entries], axis=1)
        slot = jnp.stack([start, jnp.full_like(start, cache.shape[2])], axis=1)
        row = jnp.zeros_like(slot)
        return cache.at[row, :, slot].set(entries, mode="drop", unique_indices=True)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    slot = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return cache.at[row, :, slot].set(entries, mode="drop", unique_indices=True)
