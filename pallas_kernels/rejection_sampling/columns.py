"""What both kernels are given and leave as columns of float32 numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import (
    Drafts,
    Statistics,
    Transforms,
    fault,
    of_parents,
    parents_of,
)

# Columns of the parameters, a row of the batch each.
TEMPERATURE, GREEDY, WANTED, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE = range(8)
# Columns of the statistics, a node each.
USABLE, BEST, HIGHEST, THRESHOLD, LOG_TOTAL, RAW_TOTAL = range(6)


def unfit(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> str | None:
    """Return why no kernel can run on these arrays (or abstract ones), or None."""
    problem = fault(logits, transforms, drafts)
    if problem is None and logits.shape[-1] >= 2**24:
        return f"token ids are carried in float32, which {logits.shape[-1]} of them exceed"
    return problem


def parameters(transforms: Transforms, vocab: int) -> jax.Array:
    """Return [B, 8] float32, a greedy row's temperature being 1."""
    greedy = transforms.temperature == 0
    ones = jnp.ones_like(transforms.temperature)
    penalties = transforms.penalties
    top_k = jnp.where(transforms.top_k == 0, vocab, jnp.minimum(transforms.top_k, vocab))
    columns = [
        jnp.where(greedy, 1.0, transforms.temperature),
        greedy.astype(jnp.float32),
        top_k.astype(jnp.float32),
        transforms.top_p,
        jnp.log(transforms.min_p),
        ones if penalties is None else penalties.repetition,
        ones if penalties is None else penalties.frequency,
        ones if penalties is None else penalties.presence,
    ]
    return jnp.stack(columns, axis=-1)


def unpacked(
    drafts: Drafts,
    stats: jax.Array,
    log_p: jax.Array | None,
    raw: jax.Array | None,
    compared: tuple[jax.Array, jax.Array] | None,
) -> Statistics:
    """Return the statistics of columns.

    Args:
        drafts: of the round, J of them a row.
        stats: [B, T, >= 6] float32.
        log_p: [B, T, >= J] float32, of every draft at every node; None without drafts.
        raw: [B, T, >= J] float32, logits of every draft at every node; None without drafts.
        compared: [B, J] float32 each, sum min(p, q) and log q of every draft of a chain drawn
            from q; None for others.
    """
    parents = parents_of(drafts)
    row = jax.lax.broadcasted_iota(jnp.int32, parents.shape, 0)
    draft = jax.lax.broadcasted_iota(jnp.int32, parents.shape, 1)
    none = jnp.zeros(parents.shape, jnp.float32)
    own = none if log_p is None else log_p[row, parents, draft]
    raw_total = stats[..., RAW_TOTAL]
    raw_own = none if raw is None else raw[row, parents, draft] - of_parents(raw_total, drafts)
    overlap, q = jnp.exp(own), jnp.ones_like(own)
    if compared is not None:
        overlap, q = compared[0], jnp.exp(compared[1])
    return Statistics(
        usable=stats[..., USABLE] > 0,
        best=stats[..., BEST].astype(jnp.int32),
        highest=stats[..., HIGHEST],
        threshold=stats[..., THRESHOLD],
        log_total=stats[..., LOG_TOTAL],
        raw_total=raw_total,
        log_p=own,
        raw_log_p=raw_own,
        overlap=overlap,
        q=q,
    )
