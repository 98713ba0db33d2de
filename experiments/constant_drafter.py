"""A drafter that costs nothing, to time the loop by."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec import trees
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.drafting.stateless import StatelessDrafter


@dataclasses.dataclass(frozen=True)
class ConstantDrafter(StatelessDrafter):
    """Proposes the row's pending token over and over, in every round and at no cost.

    It isolates the loop's own work: a round with it is a forward pass plus verification and commit.
    """

    def propose(
        self, params: Any, state: tuple[()], context: Context, gamma: int
    ) -> tuple[Proposal, tuple[()]]:
        """Return the pending token `gamma` times."""
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        tokens = jnp.broadcast_to(pending, (pending.shape[0], gamma))
        valid = jnp.ones(tokens.shape, bool)
        return Proposal(tokens, trees.chain(gamma), valid, PointMass()), ()
