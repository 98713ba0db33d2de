"""Drafting a tree of a given shape with an EAGLE head.

Level by level, the head runs over the nodes just chosen alone: those before lie in its cache's
scratch, the root first. The tree's shape is data: another one of as many nodes, levels, nodes a
level and children runs the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import randomness, sampling, trees
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_tree import Draws, law, static_tree
from jspec.drafting.eagle import checked
from jspec.drafting.eagle_state import EagleState, EagleStateDrafter
from jspec.drafting.protocol import Context, Proposal
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.eagle_head import EagleHead
from jspec.randomness import Purpose
from jspec.trees import Topology
from pallas_kernels.dispatch import Kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleTreeParams:
    """What `EagleTreeDrafter` runs with. Levels are counted from the root's children.

    Attributes:
        head: the head's.
        topology: of the T nodes, in the order asked for.
        scratch: of the E nodes that may be run, level after level, as they lie in the cache.
        first: [depth] int32, where among the E each level begins.
        nodes: [depth, C] int32, the nodes of each level; T is padding.
        lanes: [depth, C] int32, place of each one's parent in the level above.
        ranks: [depth, C] int32, place of each one among its siblings.
    """

    head: EagleParams
    topology: Topology
    scratch: Topology
    first: jax.Array
    nodes: jax.Array
    lanes: jax.Array
    ranks: jax.Array


class _Drafted(NamedTuple):
    """The tree so far: [B, T] tokens, which of them there are, and the [B, T, V] laws if drawn."""

    tokens: jax.Array
    valid: jax.Array
    log_q: jax.Array


@dataclasses.dataclass(frozen=True)
class EagleTreeDrafter(EagleStateDrafter[EagleTreeParams]):
    """Drafts a tree; `most` is its number of levels with the root's.

    Attributes:
        drafts: T - 1.
        width: W, most nodes of a level that has children, the root's aside.
        children: most children of a node.
        draws: how children are chosen: the most probable tokens, or drawn from q without
            replacement (Gumbel top-k) or independently. Greedy rows take the most probable ones.
    """

    drafts: int
    width: int
    children: int
    draws: Draws

    @property
    def extra_slots(self) -> int:
        """Those past the tree's T: of the last level that is run as many lanes as of any other."""
        return _run(self.drafts, self.width) - (self.drafts + 1)

    def propose(
        self, params: EagleTreeParams, state: EagleState, context: Context, gamma: int
    ) -> tuple[Proposal, EagleState]:
        """Fill the tree; `gamma` is its number of drafts."""
        if gamma != self.drafts:
            raise ValueError(f"gamma is {gamma}, but the tree has {self.drafts} drafts")
        output, true = self.take_in(params, state, context, self.most)
        batch, size = context.length.shape[0], self.drafts + 1
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        drafted = _Drafted(
            tokens=jnp.broadcast_to(pending, (batch, size)),
            valid=jnp.ones((batch, size), bool),
            log_q=jnp.zeros(
                (batch, size, 0 if self.draws == "top-k" else context.vocab_size), jnp.float32
            ),
        )
        root = jnp.zeros(1, jnp.int32)
        drafted = self._choose(params, context, jnp.int32(0), root, output, drafted)

        def level(
            index: jax.Array, carry: tuple[_Drafted, jax.Array, KVCache]
        ) -> tuple[_Drafted, jax.Array, KVCache]:
            drafted, above, cache = carry
            run = params.nodes[index - 1, : self.width]
            parent = params.lanes[index - 1, : self.width]
            column = jnp.arange(batch, dtype=jnp.int32)[:, None] * self.width + parent[None, :]
            output, cache = self.head.forward(
                params.head,
                jnp.take(drafted.tokens, run, axis=1, mode="clip"),
                jnp.take(above, column.reshape(-1), axis=1),
                cache,
                params.scratch,
                params.first[index - 1],
            )
            return self._choose(params, context, index, run, output, drafted), output, cache

        above = jnp.repeat(output, self.width, axis=1)
        carry = (drafted, above, self.rooted(true))
        drafted, _, cache = jax.lax.fori_loop(1, self.most - 1, level, carry)
        depths = jnp.asarray(params.topology.depths)
        valid = drafted.valid & (depths[None, :] <= self.deepest(true, context)[:, None])
        proposal = Proposal(
            drafted.tokens[:, 1:], params.topology, valid[:, 1:], law(self.draws, drafted.log_q)
        )
        return proposal, self.without_guesses(state, cache, true)

    def _choose(
        self,
        params: EagleTreeParams,
        context: Context,
        level: jax.Array,
        parents: jax.Array,
        output: jax.Array,
        drafted: _Drafted,
    ) -> _Drafted:
        """Choose the children of F nodes `parents` of a level, whose outputs [D, B * F] are known.

        Every one of the level below is given its token at once: what is padding is dropped.
        """
        batch, count, vocab = context.length.shape[0], parents.shape[0], context.vocab_size
        greedy = sampling.is_greedy(context.sampling)
        logits = self.logits(params, output, vocab).reshape(batch, count, vocab)
        ways = trees.paths(drafted.tokens[:, 1:], params.topology)
        logits = context.edit(logits, jnp.take(ways, parents, axis=1, mode="clip"))
        nodes, lanes, ranks = (
            jax.lax.dynamic_index_in_dim(array, level, axis=0, keepdims=False)
            for array in (params.nodes, params.lanes, params.ranks)
        )

        def ranked(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
            best, ids = jax.lax.top_k(scores, min(self.children, vocab))
            return ids[:, lanes, ranks], best[:, lanes, ranks]

        log_q = drafted.log_q
        if self.draws == "top-k":
            chosen, score = ranked(logits)
        else:
            log_level = sampling.log_probs(logits, context.sampling)
            # Where the row's edits forbid all that the head knows, there are no children.
            log_level = jnp.where(sampling.usable(logits)[..., None], log_level, -jnp.inf)
            log_q = log_q.at[:, parents].set(log_level, mode="drop")
            drawing = parents if self.draws == "without-replacement" else nodes
            of_row = jnp.broadcast_to(drawing[None, :], (batch, drawing.shape[0]))
            keys = randomness.node_keys(context.keys, of_row, Purpose.DRAFT).reshape(-1)
            if self.draws == "without-replacement":
                # The order of q with a node's noise is a draw of its children.
                noise = randomness.gumbels(keys, vocab).reshape(batch, count, vocab)
                chosen, score = ranked(jnp.where(greedy[:, None, None], logits, log_level + noise))
            else:
                # Each child draws from its parent's q with a key of its own.
                own = jnp.take(log_level, lanes, axis=1)
                chosen = sampling.draw(own.reshape(-1, vocab), keys).reshape(of_row.shape)
                score = jnp.take_along_axis(own, chosen[..., None], axis=-1)[..., 0]
                best, best_score = ranked(logits)
                chosen = jnp.where(greedy[:, None], best, chosen)
                score = jnp.where(greedy[:, None], best_score, score)
        return _Drafted(
            tokens=drafted.tokens.at[:, nodes].set(chosen, mode="drop"),
            valid=drafted.valid.at[:, nodes].set(score > -jnp.inf, mode="drop"),
            log_q=log_q,
        )


def _run(drafts: int, width: int) -> int:
    """Return E, room for all nodes but a last level's, and for `width` from where a level begins.

    A level that is run begins two nodes before the last at the latest.
    """
    return max(drafts + 1, drafts - 1 + width)


def _levels(topology: Topology) -> list[list[int]]:
    """Return the nodes of each level below the root."""
    depths = np.asarray(topology.depths)
    deepest = int(depths.max())
    return [np.flatnonzero(depths == depth).tolist() for depth in range(1, deepest + 1)]


def _params(
    head: EagleParams,
    parents: Sequence[int],
    topology: Topology,
    ranks: np.ndarray,
    levels: list[list[int]],
    width: int,
) -> EagleTreeParams:
    """Return what a tree's drafter runs with; `topology` and `ranks` are `static_tree`'s."""
    size = len(parents)
    most = max(map(len, levels))
    shape = (len(levels), most)
    nodes, lanes = np.full(shape, size, np.int32), np.zeros(shape, np.int32)
    of_level, first = np.zeros(shape, np.int32), np.zeros(len(levels), np.int32)
    place = {0: 0}
    above = [0]
    for index, level in enumerate(levels):
        first[index] = len(place)
        place |= {node: len(place) + lane for lane, node in enumerate(level)}
        nodes[index, : len(level)] = level
        lanes[index, : len(level)] = [above.index(parents[node]) for node in level]
        of_level[index, : len(level)] = ranks[level]
        above = level
    scratch = [0] * _run(size - 1, width)
    scratch[0] = -1
    for node, slot in place.items():
        if node > 0:
            scratch[slot] = place[parents[node]]
    run = jax.tree.map(jnp.asarray, trees.from_parents(tuple(scratch)))
    # As `static_tree` does: the program of every tree of its sizes.
    run = dataclasses.replace(run, is_chain=False)
    arrays = map(jnp.asarray, (first, nodes, lanes, of_level))
    return EagleTreeParams(head, topology, run, *arrays)


def eagle_tree(
    target_config: ModelConfig,
    config: EagleConfig,
    params: EagleParams,
    parents: Sequence[int],
    draws: Draws = "without-replacement",
    kernels: Kernels = kv.DEFAULT_KERNELS,
) -> BoundDrafter:
    """Return a drafter that drafts a tree with an EAGLE head.

    Args:
        target_config: of the target that it was trained for.
        config: of the head.
        params: of the head; embedding and head may be the target's arrays.
        parents: the tree, as for `trees.from_parents`.
        draws: how children are chosen.
        kernels: what its programs ask for.

    Raises:
        InputError: the head does not fit the target, or the tree is none, has no drafts or more
            children of a node than the head has tokens.
    """
    head = EagleHead(checked(target_config, config), kernels)
    topology, places = static_tree(parents, config.layer.vocab_size, draws)
    levels, ranks = _levels(topology), np.asarray(places)
    width = max([len(level) for level in levels[:-1]], default=1)
    children = int(ranks.max()) + 1
    drafts = len(parents) - 1
    return BoundDrafter(
        f"{config.kind}-tree-{drafts}",
        EagleTreeDrafter(head, len(levels) + 1, drafts, width, children, draws),
        _params(params, parents, topology, ranks, levels, width),
        drafts=drafts,
    )
