"""What hybrids share: a head's state that stays right whoever's drafts were accepted.

After a round the head is told of one that ended at the last accepted node that was its own: the
root at least, as after any rejection. What was committed beyond that it takes in by `extend` before
it drafts again, as it does after rounds without drafts, with the target's features kept here for
that. So a head needs nothing of its own to be part of a hybrid, and none of its guesses outlives a
round in which others' drafts were accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.drafting import BoundDrafter
from jspec.drafting.protocol import MOST_NODES, Context, Drafter, Outcome


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridState:
    """State of a hybrid.

    Attributes:
        head: the head's own.
        features: [B, F, D] for each of the head's layers, the target's of the last F tokens: token
            i's at i modulo F.
        behind: [B] bool, something was committed that the head was not told of.
        ran: [B] bool, the head drafted in the last round; the same for all rows.
        nodes: [B, 128] int32, which of the head's nodes each node of the last round is; -1 if it is
            none of them. The root is 0.
    """

    head: Any
    features: tuple[jax.Array, ...]
    behind: jax.Array
    ran: jax.Array
    nodes: jax.Array


@dataclasses.dataclass(frozen=True)
class HybridStateDrafter:
    """Everything of `protocol.Drafter` but `propose`, which starts from `catch_up`.

    Attributes:
        head: the drafter whose state is kept; the hybrid's parameters are its own.
        window: F, tokens whose features are kept: two rounds' at least.
        hidden_size: D, the target's; 0 where the head asks for no features.
    """

    head: Drafter
    window: int
    hidden_size: int

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The head's."""
        return self.head.feature_layers

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> HybridState:
        """Return the head's empty state."""
        shape = (batch, self.window, self.hidden_size)
        # Typed as rounds leave it, or the second chunk would be another program.
        node = jnp.where(jnp.arange(MOST_NODES, dtype=jnp.int32) == 0, jnp.int32(0), jnp.int32(-1))
        return HybridState(
            head=self.head.init(batch, capacity, dtype),
            features=tuple(jnp.zeros(shape, dtype) for _ in self.feature_layers),
            behind=jnp.zeros(batch, bool),
            ran=jnp.zeros(batch, bool),
            nodes=jnp.broadcast_to(node, (batch, MOST_NODES)),
        )

    def synced(self, state: HybridState, length: jax.Array) -> jax.Array:
        """Return how many tokens the head has taken in."""
        return self.head.synced(state.head, length)

    def extend(
        self,
        params: Any,
        state: HybridState,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> HybridState:
        """Let the head take in the tokens."""
        head = self.head.extend(params, state.head, tokens, count, features)
        return dataclasses.replace(state, head=head)

    def lag(self, state: HybridState, head: Any, length: jax.Array) -> jax.Array:
        """Return [B] int32: tokens that a head in the state `head` has to catch up on.

        Where all drafts were its own it knows itself what it lacks.
        """
        behind = length - 1 - self.head.synced(head, length)
        return jnp.where(state.behind, jnp.maximum(behind, 0), 0)

    def catch_up(
        self, params: Any, state: HybridState, context: Context, width: int, wanted: jax.Array
    ) -> Any:
        """Return the head's state after what it was not told of, `width` tokens a row and step.

        Args:
            params: the head's.
            state: before the round.
            context: of the round.
            width: static.
            wanted: bool scalar; otherwise only where features would be lost by the next round.
        """
        if self.feature_layers:
            lost = self.lag(state, state.head, context.length) > self.window - width
            wanted = wanted | jnp.any(lost)

        def lacks(head: Any) -> jax.Array:
            return wanted & jnp.any(self.lag(state, head, context.length) > 0)

        def step(head: Any) -> Any:
            start = self.head.synced(head, context.length)
            count = jnp.minimum(self.lag(state, head, context.length), width)
            slot = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
            tokens = jnp.take_along_axis(context.tokens, slot, axis=1, mode="clip")
            place = (slot % self.window)[:, :, None]
            kept = [jnp.take_along_axis(ring, place, axis=1) for ring in state.features]
            features = tuple(ring.reshape(-1, self.hidden_size).T for ring in kept)
            return self.head.extend(params, head, tokens, count, features)

        return jax.lax.while_loop(lacks, step, state.head)

    def absorb(self, state: HybridState, outcome: Outcome) -> HybridState:
        """Tell the head of its own nodes on the path, and keep the features of all."""
        batch, width = outcome.path.shape
        place = jnp.arange(width, dtype=jnp.int32)[None, :]
        own = jnp.take_along_axis(state.nodes, outcome.path, axis=1)
        told = (own >= 0) & (place < outcome.committed[:, None])
        told = jnp.cumprod(told.astype(jnp.int32), axis=1) == 1
        count = jnp.sum(told, axis=1, dtype=jnp.int32)
        start = outcome.length - outcome.committed
        row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, width))
        slot = (start[:, None] - 1 + place) % self.window
        slot = jnp.where(place < outcome.committed[:, None], slot, self.window)  # dropped
        node = jnp.where(told, own, width)
        rings, of_head = [], []
        for ring, feature in zip(state.features, outcome.features, strict=True):
            by_node = feature.T.reshape(batch, width, -1)
            along = jnp.take_along_axis(by_node, outcome.path[:, :, None], axis=1)
            rings.append(ring.at[row, slot].set(along.astype(ring.dtype), mode="drop"))
            # The features of the head's nodes, where it looks for them.
            moved = jnp.zeros_like(by_node).at[row, node].set(along, mode="drop")
            of_head.append(moved.reshape(batch * width, -1).T)
        heard = Outcome(
            length=start + count,
            committed=count,
            path=jnp.where(told, own, 0),
            features=tuple(of_head),
        )
        ran = jnp.any(state.ran)

        # A loop of at most one iteration, since a conditional would copy the head's cache.
        def tell(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            return jnp.bool_(False), self.head.absorb(carry[1], heard)

        _, head = jax.lax.while_loop(lambda carry: carry[0], tell, (ran, state.head))
        missed = jnp.where(ran, count, 0) < outcome.committed
        return dataclasses.replace(
            state,
            head=head,
            features=tuple(rings),
            behind=missed | (state.behind & ~ran),
        )

    def permute_rows(self, state: HybridState, source: jax.Array) -> HybridState:
        """Move rows."""
        own = dataclasses.replace(state, head=())
        moved = jax.tree.map(lambda leaf: jnp.take(leaf, source, axis=0), own)
        return dataclasses.replace(moved, head=self.head.permute_rows(state.head, source))


def hidden_size(head: BoundDrafter) -> int:
    """Return the D that a hybrid of this head needs: its `hidden_size` if it asks for features.

    Raises:
        ValueError: it asks for features and does not say how wide they are.
    """
    if not head.drafter.feature_layers:
        return 0
    width = getattr(head.drafter, "hidden_size", None)
    if not isinstance(width, int):
        raise ValueError(f"{head.name} reads features but has no `hidden_size`")
    return width
