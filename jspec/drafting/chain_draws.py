"""Choosing the drafts of a chain one after another, whatever gives their logits.

A chain may end early, before the first draft that the drafter is not sure enough of: its highest
probability is below `min_confidence`. That is known before the draft is drawn and depends on no
draw of its own, so the drafts before it keep their law. Transformers' assisted generation ends its
chains alike (`assistant_confidence_threshold`), but looks at the token that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jspec import randomness, sampling, trees
from jspec.drafting.protocol import Context, Dense, Proposal
from jspec.errors import require
from jspec.randomness import Purpose


class Drafted(NamedTuple):
    """The drafts so far.

    Attributes:
        last: [B] int32, the last one.
        tokens: [B, K] int32.
        valid: [B, K] bool; no token can be chosen where the row's own edits forbid all that the
            drafter knows, and none after one that it is not sure of.
        going: [B] bool, the row's chain has not ended.
        log_q: [B, K, V] float32, what each was drawn from; not filled in where all rows are greedy.
    """

    last: jax.Array
    tokens: jax.Array
    valid: jax.Array
    going: jax.Array
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
        valid=jnp.zeros((batch, gamma), bool),
        going=context.room > 0,
        log_q=jnp.zeros((batch, gamma, context.vocab_size), jnp.float32),
    )


def choose(
    context: Context,
    step: jax.Array,
    logits: jax.Array,
    drafted: Drafted,
    min_confidence: float = 0.0,
) -> Drafted:
    """Draw the next draft under the rows' own transforms.

    Args:
        context: of the round.
        step: int32 scalar, drafts so far.
        logits: [B, V] float32 after them, over the target's vocabulary; -inf is never drawn.
        drafted: the drafts so far.
        min_confidence: static; the chain ends where no token is as probable, after the row's edits
            and at temperature 1.
    """
    batch, gamma = drafted.tokens.shape
    place = jnp.arange(gamma, dtype=jnp.int32)[None, :]
    path = jnp.where(place < step, drafted.tokens, -1)
    logits = context.edit(logits[:, None], path[:, None])[:, 0]
    usable = sampling.usable(logits)
    going = drafted.going & usable
    if min_confidence > 0:
        highest = jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1)
        going &= jnp.exp(highest) >= min_confidence

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
        valid=drafted.valid | ((place == step) & going[:, None]),
        going=going & (context.room > step + 1),
        log_q=jax.lax.dynamic_update_index_in_dim(drafted.log_q, log_q, step, axis=1),
    )


Carry = TypeVar("Carry")


def go_on(
    start: int,
    gamma: int,
    step: Callable[[jax.Array, tuple[Drafted, Carry]], tuple[Drafted, Carry]],
    carry: tuple[Drafted, Carry],
) -> tuple[Drafted, Carry]:
    """Run `step` for drafts `start` to `gamma` - 1, while some row's chain goes on.

    A loop, so that a program is compiled for one step, however many there are.

    Args:
        start: static, drafts that there are.
        gamma: static.
        step: of the number of drafts so far, and the carry.
        carry: the drafts so far, and what else is carried.
    """

    def more(state: tuple[jax.Array, tuple[Drafted, Carry]]) -> jax.Array:
        index, (drafted, _) = state
        return (index < gamma) & jnp.any(drafted.going)

    def body(
        state: tuple[jax.Array, tuple[Drafted, Carry]],
    ) -> tuple[jax.Array, tuple[Drafted, Carry]]:
        index, inner = state
        return index + 1, step(index, inner)

    return jax.lax.while_loop(more, body, (jnp.int32(start), carry))[1]


def check_confidence(min_confidence: float) -> None:
    """Refuse what is no probability.

    Raises:
        InputError: `min_confidence` is no number of 0 to 1.
    """
    require(
        isinstance(min_confidence, int | float)
        and not isinstance(min_confidence, bool)
        and 0 <= min_confidence <= 1,
        "min_confidence",
        min_confidence,
        "is no probability",
        "give a number of 0 to 1; 0 never ends a chain early",
    )
