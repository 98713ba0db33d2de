"""What EAGLE drafters share: the head's cache, and the target's features that wait to enter it.

Of n committed tokens the target has run all but the pending one, so its features of tokens 0 to
n - 2 are known. Entry i of the head joins the features of token i with token i + 1: the inputs are
shifted by one. So all entries up to n - 2 can be true ones, and the output of entry n - 2, whose
token is the pending one, gives the first draft. Entries after it go on with guessed features: they
are written past the cache's length and never committed. What is accepted of them comes again with
the target's features, in the pass that begins the next round; so no guess stays, and after a full
acceptance there is no hole.
"""

from __future__ import annotations

import dataclasses
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.drafting import vocabulary
from jspec.drafting.protocol import Context, Outcome
from jspec.models.eagle import EagleParams
from jspec.models.eagle_head import EagleHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleState:
    """State of an `EagleStateDrafter`.

    Attributes:
        cache: the head's, of true entries alone.
        pending: [P, F, B], the target's features of the tokens that follow the cache's entries; the
            few that a round brings are one piece of memory.
        count: [B] int32, how many of the P are real.
    """

    cache: KVCache
    pending: jax.Array
    count: jax.Array


class WithHead(Protocol):
    """Parameters of a drafter with a head."""

    @property
    def head(self) -> EagleParams:
        """The head's."""
        ...


Params = TypeVar("Params", bound=WithHead, contravariant=True)


@dataclasses.dataclass(frozen=True)
class EagleStateDrafter(Generic[Params]):
    """Everything of `protocol.Drafter` but `propose`, which starts from `take_in`.

    Attributes:
        head: the head's functions.
        most: P, most tokens that a round commits.
    """

    head: EagleHead
    most: int

    @property
    def extra_slots(self) -> int:
        """Slots that a round writes beyond those that the loop's capacity has room for."""
        return 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The head's."""
        return self.head.config.feature_layers

    @property
    def hidden_size(self) -> int:
        """D, the target's."""
        return self.head.config.layer.hidden_size

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> EagleState:
        """Return an empty cache, and no features."""
        if self.extra_slots > 0:
            capacity = kv.whole_blocks(capacity + self.extra_slots)
        return EagleState(
            cache=self.head.init_cache(batch, capacity, dtype),
            pending=jnp.zeros((self.most, self.head.target_width, batch), dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def synced(self, state: EagleState, length: jax.Array) -> jax.Array:
        """Return how many tokens' features it has, or where it lacks some, can go on from.

        Of the features that wait, `extend` knows only the first one's next token.
        """
        known = state.cache.length + state.count
        return jnp.where(
            known == length - 1, known, state.cache.length + jnp.minimum(state.count, 1)
        )

    def extend(
        self,
        params: Params,
        state: EagleState,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> EagleState:
        """Run the entries whose next token is known; the last token's features wait for theirs."""
        batch, width = tokens.shape
        given = jnp.concatenate(features).reshape(-1, batch, width).astype(state.pending.dtype)
        held = jnp.minimum(state.count, 1)
        waiting = state.pending[0]

        # The token that was waited for comes first; a row that holds no features skips it.
        def shifted(of_row: jax.Array, skipped: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(of_row, skipped, width, axis=-1)

        entered = jax.vmap(shifted, (1, 0), 1)(
            jnp.concatenate([waiting[:, :, None], given], axis=2), 1 - held
        )
        following = jax.vmap(shifted)(jnp.pad(tokens, [(0, 0), (0, 1)]), 1 - held)
        _, cache = self.head.forward(
            params.head,
            following,
            self.head.fuse(params.head, entered.reshape(-1, batch * width)),
            state.cache,
            trees.chain(width - 1),
        )
        some = count > 0
        last = jnp.maximum(count - 1, 0)[None, :, None]
        last_given = jnp.take_along_axis(given, last, axis=2)[:, :, 0]
        return EagleState(
            cache=kv.commit(cache, jnp.where(some, count - 1 + held, 0)),
            pending=state.pending.at[0].set(jnp.where(some[None, :], last_given, waiting)),
            count=jnp.where(some, 1, state.count),
        )

    def take_in(
        self, params: Params, state: EagleState, context: Context, width: int
    ) -> tuple[jax.Array, KVCache]:
        """Enter the features that wait, `width` a row at most.

        Returns:
            The output [D, B] of each row's last entry, and the cache with them committed.
        """
        cache, batch = state.cache, context.length.shape[0]
        slot = cache.length[:, None] + 1 + jnp.arange(width, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(context.tokens, slot, axis=1, mode="clip")
        features = jnp.moveaxis(state.pending[:width], 0, 2).reshape(-1, batch * width)
        output, cache = self.head.forward(
            params.head,
            tokens,
            self.head.fuse(params.head, features),
            cache,
            trees.chain(width - 1),
        )
        last = jnp.maximum(state.count - 1, 0)
        column = jnp.arange(batch, dtype=jnp.int32) * width + last
        return jnp.take(output, column, axis=1), kv.commit(cache, state.count)

    def rooted(self, cache: KVCache) -> KVCache:
        """Return the cache with its last entry, which is the tree's root, in the scratch."""
        return dataclasses.replace(cache, length=jnp.maximum(cache.length - 1, 0))

    def without_guesses(self, state: EagleState, cache: KVCache, true: KVCache) -> EagleState:
        """Return the state after drafting: `cache`, of which only the entries of `true` are kept.

        The next round overwrites the others.
        """
        cache = dataclasses.replace(cache, length=true.length)
        return dataclasses.replace(state, cache=cache, count=jnp.zeros_like(state.count))

    def logits(self, params: Params, output: jax.Array, vocab_size: int) -> jax.Array:
        """Return the [rows, V] float32 logits after outputs [D, rows], over all target tokens."""
        logits = self.head.draft_logits(params.head, output)
        return vocabulary.spread(logits, params.head.vocabulary, vocab_size)

    def deepest(self, cache: KVCache, context: Context) -> jax.Array:
        """Return [B] int32: the deepest draft of use.

        Args:
            cache: as `take_in` returned it.
            context: of the round.

        Returns:
            How far the head still knows positions; 0 for a row whose first token is pending, of
            which there are no features yet.
        """
        ready = (cache.length == context.length - 1) & (context.length > 1)
        return jnp.where(ready, self.head.config.layer.max_context - context.length + 2, 0)

    def absorb(self, state: EagleState, outcome: Outcome) -> EagleState:
        """Put the accepted path's true features by; `propose` entered those before them."""
        batch, nodes = outcome.path.shape
        width = min(nodes, self.most)
        first = jnp.arange(batch, dtype=jnp.int32)[:, None] * nodes
        column = (first + outcome.path[:, :width]).reshape(-1)
        along = [jnp.take(features, column, axis=1) for features in outcome.features]
        stacked = jnp.concatenate(along).reshape(-1, batch, width)
        return dataclasses.replace(
            state,
            pending=state.pending.at[:width].set(
                jnp.moveaxis(stacked, 2, 0).astype(state.pending.dtype)
            ),
            count=outcome.committed,
        )

    def permute_rows(self, state: EagleState, source: jax.Array) -> EagleState:
        """Move rows."""
        return EagleState(
            cache=kv.permute_rows(state.cache, source),
            pending=jnp.take(state.pending, source, axis=2),
            count=jnp.take(state.count, source),
        )
