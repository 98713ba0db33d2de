"""The walk down a tree of drafts drawn from q: one candidate after another, a step of all rows.

It holds the law that is left at each row's node, [B, V], and q there; never those of all nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import node_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walk:
    """Where each row's walk is.

    Attributes:
        node: [B] int32, the deepest accepted node.
        candidate: [B] int32, its child under examination; 0 where there is none left.
        r: [B, V] float32, what is left of p there.
        q: [B, V] float32, what the candidate was drawn from.
        wins: [B, T] bool, accepted nodes.
        missed: [B, T] float32, by node, the chance that no child examined so far is accepted.
    """

    node: jax.Array
    candidate: jax.Array
    r: jax.Array
    q: jax.Array
    wins: jax.Array
    missed: jax.Array


def _residual(r: jax.Array, q: jax.Array) -> jax.Array:
    """Return norm(max(r - q, 0)), [B, V], unless rounding has left none: then r equals q."""
    rest = jnp.maximum(r - q, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), r)


def _without(q: jax.Array, token: jax.Array) -> jax.Array:
    """Return q, [B, V], given that it is not the token ([B]); 0 where nothing else is left."""
    column = jnp.arange(q.shape[-1], dtype=jnp.int32)[None, :]
    left = jnp.where(column == token[:, None], 0.0, q)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 0.0)


def walk(
    enter: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    parents: jax.Array,
    tokens: jax.Array,
    examinable: jax.Array,
    coins: jax.Array,
    replaced: bool,
) -> Walk:
    """Walk until no row has a candidate left.

    Candidates drawn independently (SpecInfer, Miao et al., arXiv 2305.09781): accept with
    min(1, r(x) / q(x)), on rejection r <- norm(max(r - q, 0)). Drawn without replacement (Sequoia,
    Chen et al., arXiv 2402.12374): the same, and then q(x) <- 0, q renormalised.

    Args:
        enter: from each row's node [B] int32 to p there and what its first child was drawn from,
            [B, V] float32 each. Where that is no distribution nothing can be decided about the
            node's children.
        parents: [R, T] int32, R the batch or 1 where all rows share a tree.
        tokens: [B, T - 1] int32.
        examinable: [B, T - 1] bool, drafts that can be decided about.
        coins: [B, T - 1] float32 in [0, 1), of the drafts.
        replaced: static; drawn independently, else without replacement.
    """
    batch, size = tokens.shape[0], tokens.shape[1] + 1
    node = jnp.arange(size, dtype=jnp.int32)[None, :]
    by_node = [(0, 0), (1, 0)]
    examinable, tokens, coins = (jnp.pad(a, by_node) for a in (examinable, tokens, coins))

    def next_child(parent: jax.Array, after: jax.Array) -> jax.Array:
        """Return the first candidate past the node `after`, 0 if there is none."""
        fits = (parents == parent[:, None]) & examinable & (node > after[:, None])
        first = jnp.min(jnp.where(fits, node, size), axis=1)
        return jnp.where(first < size, first, 0)

    def first_child(parent: jax.Array, q: jax.Array) -> jax.Array:
        known = jnp.all(q < jnp.inf, axis=-1) & jnp.any(q > 0, axis=-1)
        return jnp.where(known, next_child(parent, parent), 0)

    def step(state: Walk) -> Walk:
        active = state.candidate > 0
        token = node_of(tokens, state.candidate)
        q_token = node_of(state.q, token)
        # A candidate that q has no more of was not drawn from it.
        accept = active & (q_token > 0)
        accept &= node_of(coins, state.candidate) * q_token < node_of(state.r, token)
        entered, rejected = accept[:, None], (active & ~accept)[:, None]
        q = state.q if replaced else _without(state.q, token)
        chance = jnp.sum(jnp.minimum(state.r, state.q), axis=-1)
        here = (node == state.node[:, None]) & active[:, None]
        place = jnp.where(accept, state.candidate, state.node)
        p_there, q_there = enter(place)
        following = next_child(place, state.candidate)
        following = jnp.where(accept, first_child(place, q_there), following)
        return Walk(
            node=place,
            candidate=jnp.where(active, following, 0),
            r=jnp.where(
                entered, p_there, jnp.where(rejected, _residual(state.r, state.q), state.r)
            ),
            q=jnp.where(entered, q_there, jnp.where(rejected, q, state.q)),
            wins=state.wins | ((node == state.candidate[:, None]) & entered),
            missed=jnp.where(here, state.missed * (1.0 - chance[:, None]), state.missed),
        )

    root = jnp.zeros(batch, jnp.int32)
    p_root, q_root = enter(root)
    start = Walk(
        node=root,
        candidate=first_child(root, q_root),
        r=p_root,
        q=q_root,
        wins=jnp.zeros((batch, size), bool),
        missed=jnp.ones((batch, size), jnp.float32),
    )
    return jax.lax.while_loop(lambda state: jnp.any(state.candidate > 0), step, start)
