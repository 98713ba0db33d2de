"""What a drafter is: pure functions over its own parameters and state.

The loop never asks which drafter it runs. A new one is a frozen (hashable) dataclass with these
methods, in one file; docs/writing_a_drafter.md shows a whole one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike

from jspec import edits
from jspec.sampling import RowSampling
from jspec.trees import Topology

# What one round verifies at most, the pending token among them (`SpeculationConfig.gamma`).
MOST_NODES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PointMass:
    """Drafts chosen without chance: q is 1 at the draft."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """Drafts drawn, independently, from a distribution over the target's whole vocabulary.

    Attributes:
        log_q: [B, P, V] float32, for each node the very distribution that its children were drawn
            from, after the row's transforms; a greedy row's is a point mass. Of a chain P is K, in
            a tree nodes at or past P have no children.
    """

    log_q: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithoutReplacement:
    """Siblings drawn one after another without replacement, as by Gumbel top-k; else as `Dense`.

    Attributes:
        log_q: [B, P, V] float32, what a node's first child was drawn from.
    """

    log_q: jax.Array


Law = PointMass | Dense | WithoutReplacement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """One round's drafts: nodes 1 .. K of a topology whose root is the row's pending token.

    Attributes:
        tokens: [B, K] int32.
        topology: of K + 1 nodes.
            Siblings are examined in the order of their indices.
        valid: [B, K] bool; an invalid node is neither proposed nor accepted, and its descendants
            are invalid too.
        law: how the drafts were chosen.
    """

    tokens: jax.Array
    topology: Topology
    valid: jax.Array
    law: Law


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a drafter may look at when it proposes.

    Attributes:
        tokens: [B, S] int32, prompt and committed tokens.
        length: [B] int32, committed tokens of each row; the last one is the pending token, which
            no model has seen yet.
        room: [B] int32, deepest draft that can still be of use to the row; the loop drops deeper
            ones.
        sampling: the rows' parameters; drafts that are drawn use the same transforms.
        keys: [B] typed round keys; fold in node index and `Purpose.DRAFT`.
        vocab_size: V of the target.
    """

    tokens: jax.Array
    length: jax.Array
    room: jax.Array
    sampling: RowSampling
    keys: jax.Array
    vocab_size: int = dataclasses.field(metadata={"static": True})

    def edit(self, logits: jax.Array, paths: jax.Array) -> jax.Array:
        """Apply bias, penalties and forbidden tokens to a drafter's own logits.

        Without it drafts are still exact, but the target accepts fewer of them.

        Args:
            logits: [B, K, V] float32, of the tokens after K nodes.
            paths: [B, K, J] int32, the drafts on the way to each node in order, then -1;
                `jspec.trees.paths` gives a tree's.
        """
        return edits.apply(self.sampling.edits, logits, self.tokens, self.length, paths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the round's drafts.

    Attributes:
        length: [B] int32, committed tokens after the round, its new pending token included.
        committed: [B] int32, tokens that the round committed.
        path: [B, K + 1] int32, node of each committed token's predecessor: the accepted path from
            the root.
        features: the target's features at the K + 1 nodes, [D, B * (K + 1)] each, one array for
            each of the drafter's `feature_layers`.
    """

    length: jax.Array
    committed: jax.Array
    path: jax.Array
    features: tuple[jax.Array, ...]


class Drafter(Protocol):
    """Proposes tokens. Hashable: a static argument of jitted programs."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose output `extend` and `absorb` are given.

        The target's number of layers stands for its normed output, which its head reads.
        """
        ...

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> Any:
        """Return the state of `batch` empty rows, `capacity` tokens each: any pytree."""
        ...

    def synced(self, state: Any, length: jax.Array) -> jax.Array:
        """Return [B] int32: how many committed tokens of each row the state has taken in.

        A drafter that keeps nothing returns `length`.
        """
        ...

    def extend(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> Any:
        """Take in the next committed tokens: prefill, and catching up after rounds without drafts.

        Args:
            params: the drafter's parameters.
            state: of B rows.
            tokens: [B, W] int32, those that follow the state's synced ones.
            count: [B] int32, how many of the W are real; the rest is padding.
            features: the target's at these tokens, as in `Outcome`.
        """
        ...

    def propose(
        self, params: Any, state: Any, context: Context, gamma: int
    ) -> tuple[Proposal, Any]:
        """Return `gamma` drafts a row (static, at least 1) and the new state."""
        ...

    def absorb(self, state: Any, outcome: Outcome) -> Any:
        """Roll the state back to what was accepted. Called only after rounds that drafted."""
        ...

    def permute_rows(self, state: Any, source: jax.Array) -> Any:
        """Return the state whose row b is the old row source[b] ([B] int32)."""
        ...
