"""Edits of logits that depend on the text so far, in plain jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import Bias, Penalties, Transforms, unpack


def edit(logits: jax.Array, transforms: Transforms, paths: jax.Array) -> jax.Array:
    """Apply bias, penalties, forbidden and allowed tokens.

    Args:
        logits: [B, K, V] float32 of K nodes.
        transforms: with `forbidden` and `allowed` of the same K nodes.
        paths: [B, K, J] int32, drafts on the way to each node in any order; -1 is none.

    Returns:
        [B, K, V] float32.
    """
    vocab = logits.shape[-1]
    if transforms.bias is not None:
        logits = logits + dense_bias(transforms.bias, vocab)[:, None, :]
    if transforms.penalties is not None:
        logits = _penalise(logits, transforms.penalties, paths)
    if transforms.forbidden is not None:
        where = (*_grid(transforms.forbidden.shape), transforms.forbidden)
        logits = logits.at[where].set(-jnp.inf, mode="drop")
    if transforms.allowed is not None:
        logits = jnp.where(unpack(transforms.allowed, vocab), logits, -jnp.inf)
    return logits


def dense_bias(bias: Bias, vocab: int) -> jax.Array:
    """Return the bias of every token, [B, V] float32."""
    row = jax.lax.broadcasted_iota(jnp.int32, bias.tokens.shape, 0)
    zeros = jnp.zeros((bias.tokens.shape[0], vocab), jnp.float32)
    return zeros.at[row, bias.tokens].add(bias.values, mode="drop")


def packed_counts(penalties: Penalties) -> jax.Array:
    """Return 2 * generated + in_prompt, [B, V] int32."""
    return 2 * penalties.generated + penalties.in_prompt.astype(jnp.int32)


def penalised(
    logits: jax.Array,
    seen: jax.Array,
    times: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Penalise logits of tokens that were seen (prompt included) and generated `times` times.

    Repetition after Keskar et al. (arXiv 1909.05858), by the sign of the logit.
    """
    by_sign = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, by_sign, logits)
    return logits - frequency * times - presence * jnp.minimum(times, 1.0)


def _grid(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return row, jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _penalise(logits: jax.Array, penalties: Penalties, paths: jax.Array) -> jax.Array:
    times = jnp.broadcast_to(penalties.generated[:, None, :], logits.shape)
    token = jnp.where(paths >= 0, paths, logits.shape[-1])
    times = times.at[(*_grid(paths.shape), token)].add(1, mode="drop")
    seen = penalties.in_prompt[:, None, :] | (times > 0)
    repetition, frequency, presence = (
        array[:, None, None]
        for array in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    return penalised(logits, seen, times.astype(jnp.float32), repetition, frequency, presence)
