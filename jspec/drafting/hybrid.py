"""A hybrid of prompt lookup and a head, as a chain: lookup where it matches, else the head.

A row whose last tokens occur earlier in its text drafts what followed them there
(`jspec.drafting.ngram`); the others draft with the head: a draft model, an EAGLE head, Medusa
heads. Where every row has a match the head's passes are left out.

Whether there is a match depends on committed tokens alone, so each row's drafts have a law that is
known: a point mass, or the head's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec import trees
from jspec.drafting import BoundDrafter
from jspec.drafting.hybrid_state import (
    HybridState,
    HybridStateDrafter,
    hidden_size,
)
from jspec.drafting.ngram import NGramDrafter
from jspec.drafting.protocol import MOST_NODES, Context, Dense, Law, PointMass, Proposal
from jspec.errors import require

_WINDOW = 64


@dataclasses.dataclass(frozen=True)
class HybridDrafter(HybridStateDrafter):
    """Drafts a chain, by lookup where a row has a match and by the head elsewhere.

    Attributes:
        lookup: the other drafter.
    """

    lookup: NGramDrafter

    def propose(
        self, params: Any, state: HybridState, context: Context, gamma: int
    ) -> tuple[Proposal, HybridState]:
        """Return `gamma` drafts a row."""
        batch = context.length.shape[0]
        looked_up, _ = self.lookup.propose((), (), context, gamma)
        found = looked_up.valid[:, 0]
        wanted = jnp.any(~found & (context.room > 0))
        head = self.catch_up(params, state, context, gamma + 1, wanted)

        # A row with a match does not keep the head going.
        open_room = jnp.where(found, 0, context.room)
        unmatched = dataclasses.replace(context, room=open_room)

        def draft(head: Any) -> tuple[jax.Array, jax.Array, Law, Any]:
            proposal, head = self.head.propose(params, head, unmatched, gamma)
            return proposal.tokens, proposal.valid, proposal.law, head

        # A loop of at most one iteration, since a conditional would copy the head's cache.
        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            return jnp.bool_(False), draft(carry[1][-1])

        shapes = jax.eval_shape(draft, head)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[:-1])
        start = (wanted, (*nothing, head))
        _, drafted = jax.lax.while_loop(lambda carry: carry[0], step, start)
        tokens, valid, law, head = drafted

        tokens = jnp.where(found[:, None], looked_up.tokens, tokens)
        if isinstance(law, Dense):
            token = jnp.arange(context.vocab_size, dtype=jnp.int32)[None, None, :]
            certain = jnp.where(token == tokens[:, :, None], jnp.float32(0), -jnp.inf)
            law = Dense(jnp.where(found[:, None, None], certain, law.log_q))
        elif not isinstance(law, PointMass):
            raise ValueError("the head draws its drafts without replacement, as trees do")
        proposal = Proposal(
            tokens=tokens,
            topology=trees.chain(gamma),
            valid=jnp.where(found[:, None], looked_up.valid, valid),
            law=law,
        )
        node = jnp.arange(MOST_NODES, dtype=jnp.int32)[None, :]
        own = (node == 0) | ~found[:, None]
        return proposal, dataclasses.replace(
            state,
            head=head,
            ran=jnp.broadcast_to(wanted, (batch,)),
            nodes=jnp.where(own, node, -1),
        )


def hybrid(head: BoundDrafter, max_n: int = 3, min_n: int = 2) -> BoundDrafter:
    """Return a drafter that looks up where it can and drafts with a head elsewhere.

    Args:
        head: a drafter of chains.
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match.

    Raises:
        InputError: a length is no integer or out of its range, or the head drafts trees.
    """
    require(
        head.drafts is None,
        "head",
        head.name,
        "drafts trees",
        "give a drafter of chains, or use hybrid_tree",
    )
    width = hidden_size(head)
    most = head.most_drafts
    if width > 0:  # two rounds' features have to fit
        longest = _WINDOW // 2 - 1
        most = longest if most is None else min(most, longest)
    drafter = HybridDrafter(head.drafter, _WINDOW, width, NGramDrafter(max_n, min_n))
    return BoundDrafter(f"hybrid-{head.name}", drafter, head.params, most_drafts=most)
