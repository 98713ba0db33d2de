"""Drafting a tree that grows where the draft model is confident (EAGLE-2, arXiv 2406.16858).

Level by level, the draft model runs over the nodes chosen for expansion (`jspec.drafting.growth`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, growth
from jspec.drafting.draft_model import DraftParams, pruned
from jspec.drafting.growth import Growth, Sizes
from jspec.drafting.protocol import Context, Proposal
from jspec.drafting.tree_cache import TreeCacheDrafter, TreeCacheState
from jspec.drafting.vocabulary import Vocabulary, spread
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from pallas_kernels.dispatch import Kernels


@dataclasses.dataclass(frozen=True)
class DynamicTreeDrafter(TreeCacheDrafter[DraftParams]):
    """Drafts each row's most valuable tree from a language model with a cache of its own.

    Attributes:
        depth: levels.
        width: nodes of a level that are expanded, and children of each.
    """

    depth: int
    width: int

    @property
    def scratch(self) -> int:
        """E, nodes that are run: the root and `width` of each level but the last."""
        return self.sizes.run

    @property
    def sizes(self) -> Sizes:
        """Of its trees."""
        return Sizes(self.nodes, self.depth, self.width)

    def propose(
        self, params: DraftParams, state: TreeCacheState, context: Context, gamma: int
    ) -> tuple[Proposal, TreeCacheState]:
        """Grow the tree; `gamma` is its number of drafts."""
        if gamma != self.nodes:
            raise ValueError(f"gamma is {gamma}, but the tree has {self.nodes} drafts")
        sizes = self.sizes

        def grow(level: jax.Array, carry: tuple[Growth, KVCache]) -> tuple[Growth, KVCache]:
            grown, cache = carry
            places = jnp.where(level == 0, 0, sizes.places(level))
            log_confidence, cache = self._log_confidence(params, context, grown, cache, places)
            return growth.grow(sizes, grown, level, places, log_confidence), cache

        cache = self.catch_up(params, state.cache, context)
        start = (growth.start(sizes, context), cache)
        grown, cache = jax.lax.fori_loop(0, self.depth, grow, start)
        # Deeper drafts are of no use to the row, or beyond the draft model's own context.
        deepest = jnp.minimum(context.room, self.reach(context))
        proposal, slots = growth.tree(sizes, grown, deepest)
        return proposal, TreeCacheState(cache, slots)

    def _log_confidence(
        self,
        params: DraftParams,
        context: Context,
        grown: Growth,
        cache: KVCache,
        places: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Return [B, W, V] log probabilities after the nodes `places` [W] of the E, and the cache.

        All E are run anew: their entries lie in the scratch, of which a pass sees its own alone.
        """
        topology = grown.topology()
        hidden, cache, _ = self.model.forward(params.model, grown.tokens, cache, topology)
        batch, size = grown.tokens.shape
        column = jnp.arange(batch, dtype=jnp.int32)[:, None] * size + places[None, :]
        logits = self.model.logits(params.model, jnp.take(hidden, column.reshape(-1), axis=1))
        logits = spread(logits, params.vocabulary, context.vocab_size)
        return grown.confidence(context, logits, topology, places), cache


def dynamic_draft_tree(
    config: ModelConfig,
    params: TransformerParams,
    nodes: int = 15,
    depth: int = 5,
    width: int = 4,
    kernels: Kernels = kv.DEFAULT_KERNELS,
    vocabulary: Vocabulary | None = None,
) -> BoundDrafter:
    """Return a drafter that drafts each row's most valuable tree from a language model.

    Args:
        config: of the draft model, which has the target's tokenizer.
        params: of the draft model.
        nodes: drafts a round.
        depth: deepest draft; the draft model runs as often.
        width: nodes of a level that are expanded, and children that each of them may get.
        kernels: what its programs ask for.
        vocabulary: the only tokens that it proposes; None for all.

    Raises:
        InputError: a size is no integer or out of its range, or depth and width give fewer nodes;
            `vocabulary` is none of the model's tokens, or smaller than `width`.
    """
    config, drafting = pruned(config, params, vocabulary)
    growth.checked(nodes, depth, width, drafting.known(config))
    return BoundDrafter(
        f"dynamic-tree-{nodes}",
        DynamicTreeDrafter(Transformer(config, kernels), nodes, depth, width),
        drafting,
        drafts=nodes,
    )
