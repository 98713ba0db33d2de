"""Choosing the drafts of a chain one after another, whatever gives their logits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import randomness, sampling, trees
from jspec.drafting.protocol import Context, Dense, Proposal
from jspec.randomness import Purpose


class Drafted(NamedTuple):
    """The drafts so far.

    Attributes:
        last: [B] int32, the last one.
        tokens: [B, K] int32.
        valid: [B, K] bool; no token can be chosen where the row's own edits forbid all that the
            drafter knows.
        log_q: [B, K, V] float32, what each was drawn from; not filled in where all rows are greedy.
    """

    last: jax.Array
    tokens: jax.Array
    valid: jax.Array
    log_q: jax.Array

    def proposal(self, deepest: jax.Array) -> Proposal:
        """Return the chain, each row's cut after its `deepest` [B] int32 draft."""
        gamma = self.tokens.shape[1]
        place = jnp.arange(gamma, dtype=jnp.int32)[None, :]
        return Proposal(
            tokens=self.tokens,
            topology=trees.chain(gamma),
            valid=self.valid & (place < deepest[:, None]),
            law=Dense(log_q=self.log_q),
        )


def nothing(context: Context, gamma: int) -> Drafted:
    """Return no drafts, with places for `gamma`."""
    batch = context.length.shape[0]
    return Drafted(
        last=jnp.zeros(batch, jnp.int32),
        tokens=jnp.zeros((batch, gamma), jnp.int32),
        valid=jnp.ones((batch, gamma), bool),
        log_q=jnp.zeros((batch, gamma, context.vocab_size), jnp.float32),
    )


def choose(context: Context, step: jax.Array, logits: jax.Array, drafted: Drafted) -> Drafted:
    """Draw the next draft under the rows' own transforms.

    Args:
        context: of the round.
        step: int32 scalar, drafts so far.
        logits: [B, V] float32 after them, over the target's vocabulary; -inf is never drawn.
        drafted: the drafts so far.
    """
    batch, gamma = drafted.tokens.shape
    place = jnp.arange(gamma, dtype=jnp.int32)[None, :]
    path = jnp.where(place < step, drafted.tokens, -1)
    logits = context.edit(logits[:, None], path[:, None])[:, 0]
    usable = sampling.usable(logits)

    def drawn() -> tuple[jax.Array, jax.Array]:
        log_q = sampling.log_probs(logits[:, None], context.sampling)[:, 0]
        log_q = jnp.where(usable[:, None], log_q, -jnp.inf)
        node = jnp.broadcast_to(step + 1, (batch, 1))
        keys = randomness.node_keys(context.keys, node, Purpose.DRAFT)[:, 0]
        return sampling.draw(log_q, keys), log_q

    def best() -> tuple[jax.Array, jax.Array]:
        # q is not looked at when every row is greedy.
        return sampling.best(logits), jnp.zeros_like(logits)

    token, log_q = jax.lax.cond(jnp.all(sampling.is_greedy(context.sampling)), best, drawn)
    return Drafted(
        last=token,
        tokens=jnp.where(place == step, token[:, None], drafted.tokens),
        valid=drafted.valid & ((place < step) | usable[:, None]),
        log_q=jax.lax.dynamic_update_index_in_dim(drafted.log_q, log_q, step, axis=1),
    )
