"""What drafters share that draft a tree with a language model of their own cache.

The nodes of a tree that were run have entries in the cache's scratch, by slots of the drafter's
choosing. Acceptance gathers the accepted path's entries from there; a node that was chosen but
never run has none and is caught up with when the next round begins, so the cache has no hole.
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
from jspec.drafting.protocol import Context, Outcome
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer


class DraftModelParams(Protocol):
    """Parameters of a drafter with a model."""

    @property
    def model(self) -> TransformerParams:
        """The draft model's."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TreeCacheState:
    """State of a `TreeCacheDrafter`.

    Attributes:
        cache: of the committed tokens short of the pending one, at most.
        slots: [B, T] int32, place in the cache's scratch of each node of the last tree; -1 for
            those that never ran.
    """

    cache: KVCache
    slots: jax.Array


Params = TypeVar("Params", bound=DraftModelParams, contravariant=True)


@dataclasses.dataclass(frozen=True)
class TreeCacheDrafter(Generic[Params]):
    """Everything of `protocol.Drafter` but `propose`, which starts from `catch_up`.

    Attributes:
        model: the draft model.
        nodes: T - 1, drafts a round.
    """

    model: Transformer
    nodes: int

    @property
    def scratch(self) -> int:
        """Entries past a row's length that a round writes: the tree's nodes, if nothing else."""
        return self.nodes + 1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """It has features of its own."""
        return ()

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> TreeCacheState:
        """Return an empty cache."""
        missing = self.scratch - (self.nodes + 1)
        if missing > 0:  # the loop's capacity has room for the tree's nodes alone
            capacity = kv.whole_blocks(capacity + missing)
        cache = self.model.init_cache(batch, capacity, dtype)
        return TreeCacheState(cache, jnp.zeros((batch, self.nodes + 1), jnp.int32))

    def synced(self, state: TreeCacheState, length: jax.Array) -> jax.Array:
        """Return the cache's own length."""
        return state.cache.length

    def extend(
        self,
        params: Params,
        state: TreeCacheState,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> TreeCacheState:
        """Run the tokens through the draft model."""
        chain = trees.chain(tokens.shape[1] - 1)
        _, cache, _ = self.model.forward(params.model, tokens, state.cache, chain)
        return dataclasses.replace(state, cache=kv.commit(cache, count))

    def catch_up(self, params: Params, cache: KVCache, context: Context) -> KVCache:
        """Run the committed tokens that the cache lacks short of the pending one, one at most.

        It lacks one after a round that accepted a node that never ran.
        """

        def step(cache: KVCache) -> KVCache:
            behind = context.length - 1 - cache.length
            slot = jnp.minimum(cache.length, context.length - 1)[:, None]
            token = jnp.take_along_axis(context.tokens, slot, axis=1)
            _, cache, _ = self.model.forward(params.model, token, cache, trees.chain(0))
            return kv.commit(cache, jnp.minimum(behind, 1))

        def lacks(cache: KVCache) -> jax.Array:
            return jnp.any(cache.length < context.length - 1)

        return jax.lax.while_loop(lacks, step, cache)

    def absorb(self, state: TreeCacheState, outcome: Outcome) -> TreeCacheState:
        """Keep the accepted path, short of the new pending token and of a node that never ran."""
        slots = jnp.take_along_axis(state.slots, outcome.path, axis=1)
        ran = jnp.sum(jnp.cumprod(slots >= 0, axis=1, dtype=jnp.int32), axis=1)
        path = jnp.maximum(slots, 0)
        cache = kv.gather_path(state.cache, path, self.model.kernels, self.scratch)
        kept = jnp.minimum(outcome.committed, ran)
        return dataclasses.replace(state, cache=kv.commit(cache, kept))

    def permute_rows(self, state: TreeCacheState, source: jax.Array) -> TreeCacheState:
        """Move rows."""
        return jax.tree.map(lambda leaf: jnp.take(leaf, source, axis=0), state)

    def reach(self, context: Context) -> jax.Array:
        """Return [B] int32: the deepest draft whose position the draft model still knows."""
        return self.model.config.max_context - context.length + 1
