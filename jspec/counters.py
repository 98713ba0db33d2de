"""Raw counters that a round keeps on the device; every derived figure is in `jspec.metrics`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts of each row since it was admitted.

    A round that ends at a stop token counts only the drafts up to it, as proposed and as accepted:
    what lies beyond was decided by the stop, not by the drafter, and is counted as discarded.

    Attributes:
        histogram: [B, G + 1, G + 1] int32, rounds by (drafts proposed, drafts accepted); G is the
            largest gamma. Rounds without a draft are at (0, 0).
        overlap: [B, G] float32, sum over examined positions of sum_x min(p, q).
        emitted: [B] int32, tokens committed.
        discarded: [B] int32, tokens verified and then cut because a stop came first.
    """

    histogram: jax.Array
    overlap: jax.Array
    emitted: jax.Array
    discarded: jax.Array


def init(batch: int, max_gamma: int) -> Counters:
    """Return zero counts for `batch` rows and rounds of up to `max_gamma` drafts."""
    return Counters(
        histogram=jnp.zeros((batch, max_gamma + 1, max_gamma + 1), jnp.int32),
        overlap=jnp.zeros((batch, max_gamma), jnp.float32),
        emitted=jnp.zeros(batch, jnp.int32),
        discarded=jnp.zeros(batch, jnp.int32),
    )


def record(
    counters: Counters,
    ran: jax.Array,
    proposed: jax.Array,
    accepted: jax.Array,
    overlap: jax.Array,
    emitted: jax.Array,
    discarded: jax.Array,
) -> Counters:
    """Add one round.

    Args:
        counters: so far.
        ran: [B] bool, rows that took part.
        proposed: [B] int32 drafts.
        accepted: [B] int32 drafts, at most `proposed`.
        overlap: [B, K] float32 of every draft; K at most the counters' G.
        emitted: [B] int32 tokens committed.
        discarded: [B] int32 tokens cut.
    """
    size = counters.histogram.shape[1]
    bins = jnp.arange(size, dtype=jnp.int32)[None, :]
    row = (bins == proposed[:, None]) & ran[:, None]
    column = bins == accepted[:, None]
    cell = (row[:, :, None] & column[:, None, :]).astype(jnp.int32)
    width = overlap.shape[1]
    position = jnp.arange(width, dtype=jnp.int32)[None, :]
    examined = (position < proposed[:, None]) & (position <= accepted[:, None]) & ran[:, None]
    seen = jnp.where(examined, overlap, 0.0)
    padded = jnp.pad(seen, [(0, 0), (0, counters.overlap.shape[1] - width)])
    zero = jnp.zeros_like(emitted)
    return Counters(
        histogram=counters.histogram + cell,
        overlap=counters.overlap + padded,
        emitted=counters.emitted + jnp.where(ran, emitted, zero),
        discarded=counters.discarded + jnp.where(ran, discarded, zero),
    )
