"""Log probabilities of prompt and generated tokens, kept by slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Prompt positions whose logits are held at once: [B * 32, V] float32.
PROMPT_BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogProbs:
    """What is known about the token in every slot.

    "Raw" is the target's own distribution, before any parameter; "processed" the one that the token
    was drawn from, a point mass in a greedy row. Prompt tokens have raw ones alone.

    Attributes:
        raw: [B, S] float32.
        processed: [B, S] float32.
        top_raw: [B, S, n] float32, of the n most probable tokens there, best first.
        top_raw_ids: [B, S, n] int32.
        top_processed: [B, S, n] float32.
        top_processed_ids: [B, S, n] int32.
        of_prompt: static; whether prompt tokens are wanted.
    """

    raw: jax.Array
    processed: jax.Array
    top_raw: jax.Array
    top_raw_ids: jax.Array
    top_processed: jax.Array
    top_processed_ids: jax.Array
    of_prompt: bool = dataclasses.field(metadata={"static": True})


def init(batch: int, slots: int, top: int, of_prompt: bool) -> LogProbs:
    """Return an empty record of `top` tokens a slot."""
    each = jnp.zeros((batch, slots), jnp.float32)
    values = jnp.zeros((batch, slots, top), jnp.float32)
    ids = jnp.zeros((batch, slots, top), jnp.int32)
    return LogProbs(each, jnp.zeros_like(each), values, ids, values + 0, ids + 0, of_prompt)


def _chosen(log_p: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]


def record(
    logprobs: LogProbs,
    raw_logits: jax.Array,
    log_p: jax.Array,
    tokens: jax.Array,
    slots: jax.Array,
) -> LogProbs:
    """Add one round's tokens.

    Args:
        logprobs: so far.
        raw_logits: [B, K, V] float32, the target's, where each token was decided.
        log_p: [B, K, V] float32, what it was drawn from.
        tokens: [B, K] int32.
        slots: [B, K] int32 where they lie; S for those that are not committed.
    """
    log_raw = jax.nn.log_softmax(raw_logits, axis=-1)
    row = jnp.broadcast_to(jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None], slots.shape)

    def put(array: jax.Array, values: jax.Array) -> jax.Array:
        return array.at[row, slots].set(values, mode="drop")

    top = logprobs.top_raw.shape[-1]
    new = dataclasses.replace(
        logprobs,
        raw=put(logprobs.raw, _chosen(log_raw, tokens)),
        processed=put(logprobs.processed, _chosen(log_p, tokens)),
    )
    if top == 0:
        return new
    values, ids = jax.lax.top_k(log_raw, top)
    processed, processed_ids = jax.lax.top_k(log_p, top)
    return dataclasses.replace(
        new,
        top_raw=put(new.top_raw, values),
        top_raw_ids=put(new.top_raw_ids, ids),
        top_processed=put(new.top_processed, processed),
        top_processed_ids=put(new.top_processed_ids, processed_ids),
    )


def record_prompt(
    logprobs: LogProbs,
    logits_of: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    tokens: jax.Array,
    slots: jax.Array,
) -> LogProbs:
    """Add prompt tokens, a block of positions at a time.

    Args:
        logprobs: so far.
        logits_of: from [D, rows] outputs to [rows, V] float32 logits.
        hidden: [D, B * W], the target's outputs, each one token before the token it predicts.
        tokens: [B, W] int32, the tokens predicted.
        slots: [B, W] int32 where they lie; S for padding.
    """
    batch, width = tokens.shape
    by_row = hidden.reshape(-1, batch, width)
    for start in range(0, width, PROMPT_BLOCK):
        block = slice(start, min(start + PROMPT_BLOCK, width))
        logits = logits_of(by_row[:, :, block].reshape(by_row.shape[0], -1))
        logits = logits.reshape(batch, -1, logits.shape[-1])
        # A prompt token is drawn from nothing: what is written as processed is the raw one.
        log_raw = jax.nn.log_softmax(logits, axis=-1)
        logprobs = record(logprobs, logits, log_raw, tokens[:, block], slots[:, block])
    return logprobs
