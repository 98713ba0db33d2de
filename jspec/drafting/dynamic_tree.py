"""Drafting a tree that grows where the draft model is confident (EAGLE-2, arXiv 2406.16858).

Level by level, the draft model runs over the nodes chosen for expansion; of all children found, the
most valuable ones make the row's tree (`jspec.drafting.expansion`). Every row has its own, and none
needs another program.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter, expansion
from jspec.drafting.draft_model import fit_vocabulary
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.drafting.tree_cache import TreeCacheDrafter, TreeCacheState
from jspec.errors import require, require_integer
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from pallas_kernels.dispatch import Kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicTreeParams:
    """What `DynamicTreeDrafter` runs with.

    Attributes:
        model: the draft model's.
    """

    model: TransformerParams


class _Growth(NamedTuple):
    """A tree being grown: E nodes that are run, P candidates, W nodes to expand next.

    Attributes:
        cache: whose scratch holds the E nodes.
        tokens: [B, E] int32.
        parents: [B, E] int32, among the E; what is not filled yet hangs from the root.
        candidates: [B, P] int32, tokens.
        values: [B, P] float32; -inf where there is none yet.
        above: [B, P] int32, the candidate that is the parent; -1 is the root.
        slots: [B, P] int32, which of the E nodes the candidate is; -1 if it is not run.
        next_values: [B, W] float32.
        next_candidates: [B, W] int32, -1 for the root.
    """

    cache: KVCache
    tokens: jax.Array
    parents: jax.Array
    candidates: jax.Array
    values: jax.Array
    above: jax.Array
    slots: jax.Array
    next_values: jax.Array
    next_candidates: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicTreeDrafter(TreeCacheDrafter[DynamicTreeParams]):
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
        return 1 + (self.depth - 1) * self.width

    def propose(
        self, params: DynamicTreeParams, state: TreeCacheState, context: Context, gamma: int
    ) -> tuple[Proposal, TreeCacheState]:
        """Grow the tree; `gamma` is its number of drafts."""
        if gamma != self.nodes:
            raise ValueError(f"gamma is {gamma}, but the tree has {self.nodes} drafts")
        grown = jax.lax.fori_loop(
            0,
            self.depth,
            lambda level, growth: self._grow(params, context, level, growth),
            self._start(self.catch_up(params, state.cache, context), context),
        )
        # Deeper drafts are of no use to the row, or beyond the draft model's own context.
        level = 1 + jnp.arange(grown.values.shape[1], dtype=jnp.int32) // self.width**2
        useful = level[None, :] <= jnp.minimum(context.room, self.reach(context))[:, None]
        values = jnp.where(useful, grown.values, -jnp.inf)
        kept = expansion.rerank(values, grown.above, self.nodes)
        slots = jnp.take_along_axis(grown.slots, kept.places, axis=1)
        proposal = Proposal(
            tokens=jnp.take_along_axis(grown.candidates, kept.places, axis=1),
            topology=trees.from_parent_rows(kept.parents),
            valid=kept.valid,
            law=PointMass(),
        )
        return proposal, TreeCacheState(grown.cache, jnp.pad(slots, [(0, 0), (1, 0)]))

    def _start(self, cache: KVCache, context: Context) -> _Growth:
        """Return the root alone, which is to be expanded."""
        batch = context.length.shape[0]
        pool = (batch, self.depth * self.width**2)
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        node = jnp.arange(self.scratch, dtype=jnp.int32)
        first = jnp.arange(self.width, dtype=jnp.int32) == 0
        return _Growth(
            cache=cache,
            tokens=jnp.broadcast_to(pending, (batch, self.scratch)),
            parents=jnp.broadcast_to(jnp.where(node == 0, -1, 0), (batch, self.scratch)),
            candidates=jnp.zeros(pool, jnp.int32),
            values=jnp.full(pool, -jnp.inf, jnp.float32),
            above=jnp.full(pool, -1, jnp.int32),
            slots=jnp.full(pool, -1, jnp.int32),
            next_values=jnp.broadcast_to(
                jnp.where(first, jnp.float32(0), -jnp.inf), (batch, self.width)
            ),
            next_candidates=jnp.full((batch, self.width), -1, jnp.int32),
        )

    def _grow(
        self, params: DynamicTreeParams, context: Context, level: jax.Array, growth: _Growth
    ) -> _Growth:
        """Expand the nodes chosen for it and choose those of the level below."""
        width, expanded = self.width, self.scratch
        batch = context.length.shape[0]
        lane = jnp.arange(width, dtype=jnp.int32)
        place = jnp.where(level == 0, 0, 1 + (level - 1) * width + lane)  # among the E
        log_confidence, cache = self._log_confidence(params, context, growth, place)
        found = expansion.children(growth.next_values, log_confidence, width)
        chosen_values, chosen = jax.lax.top_k(found.values, width)

        # The last level's nodes have no place among the E: what is past the end is dropped.
        below = 1 + level * width + lane
        row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], chosen.shape)
        first = level * width * width
        at = first + chosen

        def put(array: jax.Array, values: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(array, values, first, axis=1)

        return _Growth(
            cache=cache,
            tokens=growth.tokens.at[row, below].set(
                jnp.take_along_axis(found.tokens, chosen, axis=1), mode="drop"
            ),
            parents=growth.parents.at[row, below].set(
                jnp.take(place, jnp.take(found.parents, chosen)), mode="drop"
            ),
            candidates=put(growth.candidates, found.tokens),
            values=put(growth.values, found.values),
            above=put(growth.above, jnp.take(growth.next_candidates, found.parents, axis=1)),
            slots=growth.slots.at[row, at].set(
                jnp.broadcast_to(jnp.where(below < expanded, below, -1), chosen.shape)
            ),
            next_values=chosen_values,
            next_candidates=at,
        )

    def _log_confidence(
        self, params: DynamicTreeParams, context: Context, growth: _Growth, place: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Return [B, W, V] log probabilities after the nodes `place` [W] of the E, and the cache.

        All E are run anew: their entries lie in the scratch, of which a pass sees its own alone.
        """
        topology = trees.from_parent_rows(growth.parents)
        hidden, cache, _ = self.model.forward(params.model, growth.tokens, growth.cache, topology)
        batch, size = growth.tokens.shape
        column = jnp.arange(batch, dtype=jnp.int32)[:, None] * size + place[None, :]
        logits = self.model.logits(params.model, jnp.take(hidden, column.reshape(-1), axis=1))
        logits = fit_vocabulary(logits, context.vocab_size)
        logits = context.edit(
            logits.reshape(batch, self.width, context.vocab_size),
            jnp.take(trees.paths(growth.tokens[:, 1:], topology), place, axis=1),
        )
        return jax.nn.log_softmax(logits, axis=-1), cache


def dynamic_draft_tree(
    config: ModelConfig,
    params: TransformerParams,
    nodes: int = 15,
    depth: int = 5,
    width: int = 4,
    kernels: Kernels = kv.DEFAULT_KERNELS,
) -> BoundDrafter:
    """Return a drafter that drafts each row's most valuable tree from a language model.

    Args:
        config: of the draft model, which has the target's tokenizer.
        params: of the draft model.
        nodes: drafts a round.
        depth: deepest draft; the draft model runs as often.
        width: nodes of a level that are expanded, and children that each of them may get.
        kernels: what its programs ask for.

    Raises:
        InputError: a size is no integer or out of its range, or depth and width give fewer nodes.
    """
    for field, value in (("nodes", nodes), ("depth", depth), ("width", width)):
        require_integer(field, value)
        require(1 <= value <= 127, field, value, "is outside 1..127", "give a smaller tree")
    require(
        width <= config.vocab_size,
        "width",
        width,
        f"is above the draft model's {config.vocab_size} tokens",
        "give a narrower tree",
    )
    most = width + (depth - 1) * width**2
    require(
        nodes <= most,
        "nodes",
        nodes,
        f"is more than the {most} that depth {depth} and width {width} can give",
        "give fewer nodes, or a deeper or wider tree",
    )
    return BoundDrafter(
        f"dynamic-tree-{nodes}",
        DynamicTreeDrafter(Transformer(config, kernels), nodes, depth, width),
        DynamicTreeParams(params),
        drafts=nodes,
    )
