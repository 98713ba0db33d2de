"""Drafting a tree with a smaller language model of its own cache.

Level by level, the draft model runs over all nodes of the tree and gives the children of the level
just filled. The topology is data: another one of the same size runs the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import randomness, sampling, tree_shapes, trees
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import pruned
from jspec.drafting.protocol import (
    MOST_NODES,
    Context,
    Dense,
    Law,
    PointMass,
    Proposal,
    WithoutReplacement,
)
from jspec.drafting.tree_cache import TreeCacheDrafter, TreeCacheState
from jspec.drafting.vocabulary import Vocabulary, spread
from jspec.errors import InputError, is_list, require
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from jspec.randomness import Purpose
from jspec.trees import Topology
from pallas_kernels.dispatch import Kernels

Draws = Literal["top-k", "without-replacement", "independent"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTreeParams:
    """What `DraftTreeDrafter` runs with.

    Attributes:
        model: the draft model's.
        topology: of T nodes.
        ranks: [T] int32, place of each node among its siblings.
        vocabulary: [Vd] int32, rising, the tokens that it can propose; None where these are all.
    """

    model: TransformerParams
    topology: Topology
    ranks: jax.Array
    vocabulary: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DraftTreeDrafter(TreeCacheDrafter[DraftTreeParams]):
    """Drafts a tree from a language model with a cache of its own.

    Attributes:
        draws: how children are chosen: the most probable tokens, or drawn from q without
            replacement (Gumbel top-k) or independently. Greedy rows take the most probable ones.
    """

    draws: Draws

    def propose(
        self, params: DraftTreeParams, state: TreeCacheState, context: Context, gamma: int
    ) -> tuple[Proposal, TreeCacheState]:
        """Fill the tree; `gamma` is its number of drafts."""
        topology, size = params.topology, params.topology.size
        if gamma != size - 1:
            raise ValueError(f"gamma is {gamma}, but the tree has {size - 1} drafts")
        cache = self.catch_up(params, state.cache, context)
        depths, parents = jnp.asarray(topology.depths), jnp.asarray(topology.parents)
        greedy = sampling.is_greedy(context.sampling)
        batch, vocab = context.length.shape[0], context.vocab_size
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        node = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        drawn = self.draws != "top-k"
        keys = randomness.node_keys(context.keys, node, Purpose.DRAFT).reshape(-1)
        if self.draws == "without-replacement":
            # The order of q with a node's noise is a draw of its children, the same at every level.
            noise = randomness.gumbels(keys, vocab).reshape(batch, size, vocab)

        def fill(
            level: jax.Array, carry: tuple[jax.Array, jax.Array, KVCache, jax.Array]
        ) -> tuple[jax.Array, jax.Array, KVCache, jax.Array]:
            tokens, valid, cache, log_q = carry
            hidden, cache, _ = self.model.forward(params.model, tokens, cache, topology)
            logits = self.model.logits(params.model, hidden)
            logits = spread(logits, params.vocabulary, vocab)
            logits = context.edit(
                logits.reshape(batch, size, vocab), trees.paths(tokens[:, 1:], topology)
            )
            scores = logits
            if drawn:
                log_level = sampling.log_probs(logits, context.sampling)
                # Where the row's edits forbid all that the drafter knows, there are no children.
                log_level = jnp.where(sampling.usable(logits)[..., None], log_level, -jnp.inf)
                log_q = jnp.where((depths == level)[None, :, None], log_level, log_q)
            if self.draws == "without-replacement":
                scores = jnp.where(greedy[:, None, None], logits, log_q + noise)
            if self.draws == "independent":
                # Each child draws from its parent's q with a key of its own.
                chosen, score = self._independent(log_q, parents, keys)
                best, best_score = self._ranked(logits, params)
                chosen = jnp.where(greedy[:, None], best, chosen)
                score = jnp.where(greedy[:, None], best_score, score)
            else:
                chosen, score = self._ranked(scores, params)
            below = (depths == level + 1)[None, :]
            tokens = jnp.where(below, chosen, tokens)
            valid = jnp.where(below, score > -jnp.inf, valid)
            return tokens, valid, cache, log_q

        start = (
            jnp.broadcast_to(pending, (batch, size)),
            jnp.ones((batch, size), bool),
            cache,
            jnp.zeros((batch, size, vocab if drawn else 0), jnp.float32),
        )
        levels = jnp.max(depths)
        tokens, valid, cache, log_q = jax.lax.fori_loop(0, levels, fill, start)
        # The tokens of the last level were chosen but never run.
        slots = jnp.where(depths[None, :] < levels, node, -1)
        valid &= depths[None, :] <= self.reach(context)[:, None]
        proposal = Proposal(tokens[:, 1:], topology, valid[:, 1:], law(self.draws, log_q))
        return proposal, TreeCacheState(cache, slots)

    def _independent(
        self, log_q: jax.Array, parents: jax.Array, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        own = jnp.take(log_q, jnp.maximum(parents, 0), axis=1)
        batch, size, vocab = own.shape
        tokens = sampling.draw(own.reshape(-1, vocab), keys).reshape(batch, size)
        return tokens, jnp.take_along_axis(own, tokens[..., None], axis=-1)[..., 0]

    def _ranked(self, scores: jax.Array, params: DraftTreeParams) -> tuple[jax.Array, jax.Array]:
        """Return, for each node, the token of its rank among its parent's scores, and the score."""
        # As many as any tree of this size could want, so that all of them run one program.
        most = min(params.topology.size - 1, scores.shape[-1])
        best, ids = jax.lax.top_k(scores, most)
        parents = jnp.maximum(jnp.asarray(params.topology.parents), 0)
        return ids[:, parents, params.ranks], best[:, parents, params.ranks]


def law(draws: Draws, log_q: jax.Array) -> Law:
    """Return how a tree's children were chosen; `log_q` [B, T, V] is read where they were drawn."""
    if draws == "top-k":
        return PointMass()
    return Dense(log_q) if draws == "independent" else WithoutReplacement(log_q)


def static_tree(
    parents: Sequence[int], vocab_size: int, draws: Draws = "top-k"
) -> tuple[Topology, jax.Array]:
    """Return a static tree as drafters take it, and the [T] place of each node among its siblings.

    Args:
        parents: the tree, as for `trees.from_parents`.
        vocab_size: tokens that a drafter can choose among.
        draws: how children are chosen.

    Raises:
        InputError: the tree is none, has no drafts, or a node has more children than tokens; or
            `draws` is no choice.
    """
    require(is_list(parents), "parents", parents, "is no list", "give -1, then earlier nodes")
    require(
        len(parents) <= MOST_NODES,
        "parents",
        f"<{len(parents)} nodes>",
        f"has more than {MOST_NODES} nodes",
        "give a smaller tree",
    )
    try:
        topology = trees.from_parents(tuple(parents))
    except ValueError as error:
        raise InputError(
            "parents", tuple(parents), f"is no tree ({error})", "give -1, then earlier nodes"
        ) from None
    require(len(parents) > 1, "parents", tuple(parents), "has no drafts", "give a larger tree")
    require(
        draws in get_args(Draws), "draws", draws, "is not a choice", f"use one of {get_args(Draws)}"
    )
    ranks = tree_shapes.ranks(parents)
    require(
        max(ranks) < vocab_size,
        "parents",
        tuple(parents),
        f"has a node of {max(ranks) + 1} children, of only {vocab_size} tokens",
        "give a narrower tree",
    )
    # A tree that happens to be a chain is verified as a tree's drafts ask for, and by the program
    # of every tree of its size.
    topology = dataclasses.replace(jax.tree.map(jnp.asarray, topology), is_chain=False)
    return topology, jnp.asarray(np.array(ranks, np.int32))


def draft_tree(
    config: ModelConfig,
    params: TransformerParams,
    parents: Sequence[int],
    draws: Draws = "without-replacement",
    kernels: Kernels = kv.DEFAULT_KERNELS,
    vocabulary: Vocabulary | None = None,
) -> BoundDrafter:
    """Return a drafter that drafts a tree from a language model of the target's tokenizer.

    Args:
        config: of the draft model.
        params: of the draft model.
        parents: the tree, as for `trees.from_parents`.
        draws: how children are chosen.
        kernels: what its programs ask for.
        vocabulary: the only tokens that it proposes; None for all.

    Raises:
        InputError: the tree is none, has no drafts, or more children of a node than the drafter
            can propose; or `vocabulary` is none of the model's tokens.
    """
    config, drafting = pruned(config, params, vocabulary)
    topology, ranks = static_tree(parents, drafting.known(config), draws)
    return BoundDrafter(
        f"draft-tree-{len(parents) - 1}",
        DraftTreeDrafter(Transformer(config, kernels), len(parents) - 1, draws),
        DraftTreeParams(drafting.model, topology, ranks, drafting.vocabulary),
        drafts=len(parents) - 1,
    )
