"""Drafting a tree that grows where an EAGLE head is confident: EAGLE-2 (arXiv 2406.16858).

Level by level, the head runs over the nodes just chosen for expansion alone: those before lie in
its cache's scratch, the root first.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, growth
from jspec.drafting.eagle import EagleChainParams, checked
from jspec.drafting.eagle_state import EagleState, EagleStateDrafter
from jspec.drafting.growth import Growth, Sizes
from jspec.drafting.protocol import Context, Proposal
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.eagle_head import EagleHead
from pallas_kernels.dispatch import Kernels


@dataclasses.dataclass(frozen=True)
class EagleDynamicTreeDrafter(EagleStateDrafter[EagleChainParams]):
    """Drafts each row's most valuable tree.

    Attributes:
        sizes: of the trees.
    """

    sizes: Sizes

    @property
    def extra_slots(self) -> int:
        """Those of nodes that are run beyond as many as are kept."""
        return self.sizes.run - (self.sizes.nodes + 1)

    def propose(
        self, params: EagleChainParams, state: EagleState, context: Context, gamma: int
    ) -> tuple[Proposal, EagleState]:
        """Grow the tree; `gamma` is its number of drafts."""
        sizes = self.sizes
        if gamma != sizes.nodes:
            raise ValueError(f"gamma is {gamma}, but the tree has {sizes.nodes} drafts")
        output, true = self.take_in(params, state, context, self.most)
        batch = context.length.shape[0]

        def expand(level: jax.Array, places: jax.Array, output: jax.Array, grown: Growth) -> Growth:
            logits = self.logits(params, output, context.vocab_size)
            confidence = grown.confidence(context, logits, grown.topology(), places)
            return growth.grow(sizes, grown, level, places, confidence)

        def step(
            level: jax.Array, carry: tuple[Growth, jax.Array, KVCache]
        ) -> tuple[Growth, jax.Array, KVCache]:
            grown, above, cache = carry
            places = sizes.places(level)
            # All lanes above the first level hold the root's output.
            lane = jnp.take(grown.parents, places, axis=1) - sizes.places(level - 1)[0]
            lane = jnp.clip(lane, 0, sizes.width - 1)
            column = jnp.arange(batch, dtype=jnp.int32)[:, None] * sizes.width + lane
            output, cache = self.head.forward(
                params.head,
                jnp.take(grown.tokens, places, axis=1),
                jnp.take(above, column.reshape(-1), axis=1),
                cache,
                grown.topology(),
                places[0],
            )
            return expand(level, places, output, grown), output, cache

        root = jnp.zeros(1, jnp.int32)
        grown = expand(jnp.int32(0), root, output, growth.start(sizes, context))
        above = jnp.repeat(output, sizes.width, axis=1)
        carry = (grown, above, self.rooted(true))
        grown, _, cache = jax.lax.fori_loop(1, sizes.depth, step, carry)
        deepest = jnp.minimum(context.room, self.deepest(true, context))
        proposal, _ = growth.tree(sizes, grown, deepest)
        return proposal, self.without_guesses(state, cache, true)


def eagle_dynamic_tree(
    target_config: ModelConfig,
    config: EagleConfig,
    params: EagleParams,
    nodes: int = 15,
    depth: int = 5,
    width: int = 4,
    kernels: Kernels = kv.DEFAULT_KERNELS,
) -> BoundDrafter:
    """Return a drafter that drafts each row's most valuable tree with an EAGLE head.

    Args:
        target_config: of the target that it was trained for.
        config: of the head.
        params: of the head; embedding and head may be the target's arrays.
        nodes: drafts a round.
        depth: deepest draft; the head runs as often.
        width: nodes of a level that are expanded, and children that each of them may get.
        kernels: what its programs ask for.

    Raises:
        InputError: the head does not fit the target; a size is no integer or out of its range, or
            depth and width give fewer nodes.
    """
    head = EagleHead(checked(target_config, config), kernels)
    sizes = growth.checked(nodes, depth, width, config.layer.vocab_size)
    return BoundDrafter(
        f"{config.kind}-dynamic-tree-{nodes}",
        EagleDynamicTreeDrafter(head, depth + 1, sizes),
        EagleChainParams(params),
        drafts=nodes,
    )
