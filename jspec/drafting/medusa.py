"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774): a chain, or a static tree.

The heads read one feature of the target, the one that its own head chose the pending token from:
token n - 2's, where n - 1 is the pending token. Head k (from 0) predicts token n + k. They know
nothing of each other's choices, so one small pass drafts everything, and all nodes of a level have
the same candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec import trees
from jspec.drafting import BoundDrafter, chain_draws
from jspec.drafting.chain_draws import Drafted
from jspec.drafting.draft_tree import static_tree
from jspec.drafting.protocol import Context, Outcome, PointMass, Proposal
from jspec.drafting.vocabulary import spread
from jspec.errors import require
from jspec.models import medusa as model
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.trees import Topology


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MedusaState:
    """What is kept of the target.

    Attributes:
        feature: [B, D] float32, at the last token taken in: the one before the pending token.
        length: [B] int32, tokens taken in; where it is 0 there is no feature.
    """

    feature: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class MedusaHeads:
    """Everything of `protocol.Drafter` but `propose`.

    Attributes:
        config: of the heads.
    """

    config: MedusaConfig

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's normed output."""
        return self.config.feature_layers

    @property
    def hidden_size(self) -> int:
        """D, the target's."""
        return self.config.hidden_size

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> MedusaState:
        """Return the state of rows of which nothing is known."""
        feature = jnp.zeros((batch, self.config.hidden_size), jnp.float32)
        return MedusaState(feature, jnp.zeros(batch, jnp.int32))

    def synced(self, state: MedusaState, length: jax.Array) -> jax.Array:
        """Return how many tokens were taken in."""
        return state.length

    def extend(
        self,
        params: object,
        state: MedusaState,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> MedusaState:
        """Keep the last token's feature."""
        batch, width = tokens.shape
        (feature,) = features
        by_token = feature.T.reshape(batch, width, -1)
        return _replaced(state, by_token, jnp.maximum(count - 1, 0), count, state.length + count)

    def absorb(self, state: MedusaState, outcome: Outcome) -> MedusaState:
        """Keep the feature of the last accepted node, whose successor is the new pending token."""
        (feature,) = outcome.features
        batch = outcome.length.shape[0]
        by_node = feature.T.reshape(batch, -1, feature.shape[0])
        last = jnp.maximum(outcome.committed - 1, 0)
        node = jnp.take_along_axis(outcome.path, last[:, None], axis=1)[:, 0]
        return _replaced(state, by_node, node, outcome.committed, outcome.length - 1)

    def permute_rows(self, state: MedusaState, source: jax.Array) -> MedusaState:
        """Move rows."""
        return jax.tree.map(lambda leaf: jnp.take(leaf, source, axis=0), state)

    def ready(self, state: MedusaState, context: Context) -> jax.Array:
        """Return [B] bool: the feature is there; a row whose first token is pending has none."""
        return (state.length == context.length - 1) & (state.length > 0)

    def heads(self, params: MedusaParams, state: MedusaState) -> jax.Array:
        """Return [B, K, Vd] float32 logits of all heads."""
        feature = state.feature.T.astype(params.biases.dtype)
        return jnp.swapaxes(model.forward(params, feature), 0, 1)


def _replaced(
    state: MedusaState, features: jax.Array, place: jax.Array, count: jax.Array, length: jax.Array
) -> MedusaState:
    """Take features[b, place[b]] and the length where `count` is positive."""
    new = jnp.take_along_axis(features, place[:, None, None], axis=1)[:, 0]
    some = count > 0
    return MedusaState(
        feature=jnp.where(some[:, None], new.astype(state.feature.dtype), state.feature),
        length=jnp.where(some, length, state.length),
    )


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(MedusaHeads):
    """Drafts a chain, each draft drawn from its own head's distribution, whatever came before it.

    At a positive temperature drafts so drawn don't fit each other well; a tree does better.

    Attributes:
        min_confidence: below it a chain ends; see `chain_draws`.
    """

    min_confidence: float = 0.0

    def propose(
        self, params: MedusaParams, state: MedusaState, context: Context, gamma: int
    ) -> tuple[Proposal, MedusaState]:
        """Draw `gamma` drafts a row under the row's own transforms; at most K."""
        if gamma > self.config.heads:
            raise ValueError(f"gamma is {gamma}, but there are {self.config.heads} heads")
        logits = self.heads(params, state)

        def step(index: jax.Array, carry: tuple[Drafted, None]) -> tuple[Drafted, None]:
            own = jax.lax.dynamic_index_in_dim(logits, index, axis=1, keepdims=False)
            own = spread(own, params.vocabulary, context.vocab_size)
            drafted = chain_draws.choose(context, index, own, carry[0], self.min_confidence)
            return drafted, None

        start = (chain_draws.nothing(context, gamma), None)
        drafted, _ = chain_draws.go_on(0, gamma, step, start)
        return drafted.proposal(jnp.where(self.ready(state, context), gamma, 0)), state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MedusaTreeParams:
    """What `MedusaTreeDrafter` runs with.

    Attributes:
        model: the heads'.
        topology: of T nodes.
        ranks: [T] int32, place of each node among its siblings.
    """

    model: MedusaParams
    topology: Topology
    ranks: jax.Array


@dataclasses.dataclass(frozen=True)
class MedusaTreeDrafter(MedusaHeads):
    """Drafts a static tree whose nodes of depth k + 1 are the best tokens of head k."""

    def propose(
        self, params: MedusaTreeParams, state: MedusaState, context: Context, gamma: int
    ) -> tuple[Proposal, MedusaState]:
        """Fill the tree; `gamma` is its number of drafts."""
        topology, size = params.topology, params.topology.size
        if gamma != size - 1:
            raise ValueError(f"gamma is {gamma}, but the tree has {size - 1} drafts")
        logits = self.heads(params.model, state)
        if jax.tree.leaves(context.sampling.edits):
            tokens, valid = self._edited(params, logits, context)
        else:
            # A level's nodes have the same candidates.
            ids, scores = self._ranked(logits, params)
            vocabulary = params.model.vocabulary
            tokens = ids if vocabulary is None else jnp.take(vocabulary, ids)
            valid = (scores > -jnp.inf) & (tokens < context.vocab_size)
        valid &= self.ready(state, context)[:, None]
        return Proposal(tokens[:, 1:], topology, valid[:, 1:], PointMass()), state

    def _ranked(self, scores: jax.Array, params: MedusaTreeParams) -> tuple[jax.Array, jax.Array]:
        """Return each node's token, by its rank in scores [B, K, V] of its head, and its score."""
        # As many as any tree of this size could want, so that all of them run one program.
        best, ids = jax.lax.top_k(scores, min(params.topology.size - 1, scores.shape[-1]))
        head = jnp.maximum(jnp.asarray(params.topology.depths) - 1, 0)
        return ids[:, head, params.ranks], best[:, head, params.ranks]

    def _edited(
        self, params: MedusaTreeParams, logits: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Return [B, T] tokens and validity where what is allowed depends on the way to a node."""
        topology = params.topology
        depths = jnp.asarray(topology.depths)
        parents = jnp.maximum(jnp.asarray(topology.parents), 0)
        batch, heads, _ = logits.shape
        after = jnp.take(logits, jnp.minimum(depths, heads - 1), axis=1)
        after = spread(after, params.model.vocabulary, context.vocab_size)
        most = min(topology.size - 1, context.vocab_size)

        def fill(
            level: jax.Array, carry: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            tokens, valid = carry
            edited = context.edit(after, trees.paths(tokens[:, 1:], topology))
            best, ids = jax.lax.top_k(edited, most)
            below = (depths == level + 1)[None, :]
            tokens = jnp.where(below, ids[:, parents, params.ranks], tokens)
            return tokens, jnp.where(below, best[:, parents, params.ranks] > -jnp.inf, valid)

        start = (
            jnp.zeros((batch, topology.size), jnp.int32),
            jnp.ones((batch, topology.size), bool),
        )
        return jax.lax.fori_loop(0, jnp.max(depths), fill, start)


def medusa(config: MedusaConfig, params: MedusaParams, min_confidence: float = 0.0) -> BoundDrafter:
    """Return a drafter that drafts a chain of at most K tokens from K Medusa heads.

    Args:
        config: of the heads.
        params: of the heads.
        min_confidence: the chain ends before the first draft that its head is less sure of.

    Raises:
        InputError: `min_confidence` is no probability.
    """
    chain_draws.check_confidence(min_confidence)
    name, drafter = f"medusa-{config.heads}", MedusaDrafter(config, min_confidence)
    return BoundDrafter(name, drafter, params, most_drafts=config.heads)


def medusa_tree(config: MedusaConfig, params: MedusaParams, parents: Sequence[int]) -> BoundDrafter:
    """Return a drafter that drafts a tree from Medusa heads: the most probable tokens of each.

    Args:
        config: of the heads.
        params: of the heads.
        parents: the tree, as for `trees.from_parents`; no deeper than there are heads.

    Raises:
        InputError: the tree is none, has no drafts, or wants more heads or tokens than there are.
    """
    topology, ranks = static_tree(parents, config.vocab_size)
    depth = int(np.max(np.asarray(topology.depths)))
    require(
        depth <= config.heads,
        "parents",
        tuple(parents),
        f"is {depth} drafts deep, but there are {config.heads} heads",
        "give a shallower tree",
    )
    drafts = topology.size - 1
    return BoundDrafter(
        f"medusa-tree-{drafts}",
        MedusaTreeDrafter(config),
        MedusaTreeParams(params, topology, ranks),
        drafts=drafts,
    )
