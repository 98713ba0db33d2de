"""Statistics of rejection sampling in plain jax.numpy: their meaning, and the XLA path."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import (
    Drafts,
    Statistics,
    Transforms,
    of_parents,
    on_path,
    parents_of,
)
from pallas_kernels.rejection_sampling.transforms import edit

# Bits of infinity: as integers, the floats 0 .. inf are ordered as they are as floats.
INFINITY = 0x7F800000


def negated(bits: jax.Array) -> jax.Array:
    """Return minus the float32 whose bits these int32 are."""
    return -jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest_threshold(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Return the largest float32 threshold of at most 0 for which `holds`, -inf if none.

    Args:
        holds: from thresholds to bools of the same shape; never true again once false as
            thresholds rise. Not asked at -inf.
        shape: of the thresholds.
    """

    def step(_: jax.Array, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, known = bracket
        middle = below + (known - below) // 2
        held = (middle == known) | holds(negated(middle))
        return jnp.where(held, below, middle), jnp.where(held, middle, known)

    start = (jnp.full(shape, -1, jnp.int32), jnp.full(shape, INFINITY, jnp.int32))
    # At -1 the middle may be -1 itself only once the bracket is closed: 31 halvings.
    _, known = jax.lax.fori_loop(0, 31, step, start)
    return negated(known)


def kept_from(scores: jax.Array, transforms: Transforms) -> jax.Array:
    """Return the [B, T] threshold from which scores [B, T, V] are kept."""
    vocab = scores.shape[-1]
    shape = scores.shape[:2]
    count = jnp.where(transforms.top_k == 0, vocab, jnp.minimum(transforms.top_k, vocab))

    def enough(threshold: jax.Array) -> jax.Array:
        above = jnp.sum(scores >= threshold[..., None], axis=-1, dtype=jnp.int32)
        return above >= count[:, None]

    by_count = jnp.where(
        (transforms.top_k > 0)[:, None], largest_threshold(enough, shape), -jnp.inf
    )
    weight = jnp.where(scores >= by_count[..., None], jnp.exp(scores), 0.0)
    mass = transforms.top_p[:, None] * jnp.sum(weight, axis=-1)

    def covers(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(scores >= threshold[..., None], weight, 0.0), axis=-1) >= mass

    # A row that asks for everything must not lose its tail to the rounding of the sum.
    by_mass = jnp.where((transforms.top_p < 1)[:, None], largest_threshold(covers, shape), -jnp.inf)
    by_best = jnp.log(transforms.min_p)[:, None]
    return jnp.maximum(jnp.maximum(by_count, by_mass), by_best)


def statistics(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> Statistics:
    """Return what a decision needs to know of the logits.

    Args:
        logits: [B, T, V] float32 or bfloat16, raw.
        transforms: of the rows.
        drafts: of the round.
    """
    raw = logits.astype(jnp.float32)
    ways = jnp.where(on_path(drafts), drafts.tokens[:, None, :], -1)
    edited = edit(raw, transforms, ways)
    best = jnp.argmax(edited, axis=-1).astype(jnp.int32)
    highest = jnp.max(edited, axis=-1)
    greedy = (transforms.temperature == 0)[:, None]
    # The maximum is subtracted before dividing, so a tiny temperature cannot overflow.
    temperature = jnp.where(greedy, 1.0, transforms.temperature[:, None])
    scores = (edited - highest[..., None]) / temperature[..., None]
    threshold = kept_from(scores, transforms)
    kept = jnp.where(scores >= threshold[..., None], scores, -jnp.inf)
    log_total = jnp.log(jnp.sum(jnp.exp(kept), axis=-1))
    raw_total = jax.nn.logsumexp(raw, axis=-1)

    parents = parents_of(drafts)
    row = jax.lax.broadcasted_iota(jnp.int32, parents.shape, 0)
    tokens = jnp.clip(drafts.tokens, 0, logits.shape[-1] - 1)

    is_best = drafts.tokens == of_parents(best, drafts)
    log_p = kept[row, parents, tokens] - of_parents(log_total, drafts)
    log_p = jnp.where(greedy, jnp.where(is_best, 0.0, -jnp.inf), log_p)
    overlap, q = jnp.exp(log_p), jnp.ones_like(log_p)
    log_q = drafts.chain_log_q
    if log_q is not None:
        law = jnp.exp(kept - log_total[..., None])[:, :-1]
        token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        point = (token[None, None, :] == best[:, :-1, None]).astype(jnp.float32)
        law = jnp.where(greedy[..., None], point, law)
        overlap = jnp.sum(jnp.minimum(law, jnp.exp(log_q)), axis=-1)
        overlap = jnp.where(usable(log_q), overlap, jnp.nan)
        q = jnp.exp(jnp.take_along_axis(log_q, tokens[..., None], axis=-1)[..., 0])
    return Statistics(
        usable=usable(edited),
        best=best,
        highest=highest,
        threshold=threshold,
        log_total=log_total,
        raw_total=raw_total,
        log_p=log_p,
        raw_log_p=raw[row, parents, tokens] - of_parents(raw_total, drafts),
        overlap=overlap,
        q=q,
    )


def usable(logits: jax.Array) -> jax.Array:
    """Return whether logits [..., V] define a distribution: no NaN, no +inf, not all -inf."""
    # Compared one by one: XLA's maximum on CPU loses a NaN once the vocabulary is large.
    return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)
