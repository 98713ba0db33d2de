"""The walk down a tree of drafts drawn from q: one candidate after another, a step of all rows.

It holds the law that is left at each row's node, [B, V], and q there; never those of all nodes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import Drafts, Statistics, Transforms
from pallas_kernels.rejection_sampling.laws import law_at, node_of
from pallas_kernels.rejection_sampling.reference import usable


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


def residual(r: jax.Array, q: jax.Array) -> jax.Array:
    """Return norm(max(r - q, 0)), [B, V], unless rounding has left none: then r equals q."""
    rest = jnp.maximum(r - q, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), r)


def without(q: jax.Array, token: jax.Array) -> jax.Array:
    """Return q, [B, V], given that it is not the token ([B]); 0 where nothing else is left."""
    column = jnp.arange(q.shape[-1], dtype=jnp.int32)[None, :]
    left = jnp.where(column == token[:, None], 0.0, q)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 0.0)


def walk(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    statistics: Statistics,
    coins: jax.Array,
) -> Walk:
    """Walk until no row has a candidate left. A greedy row's walk does not begin.

    Candidates drawn independently (SpecInfer, Miao et al., arXiv 2305.09781): accept with
    min(1, r(x) / q(x)), on rejection r <- norm(max(r - q, 0)). Drawn without replacement (Sequoia,
    Chen et al., arXiv 2402.12374): the same, and then q(x) <- 0, q renormalised.

    Args:
        logits: [B, T, V] float32 or bfloat16, raw.
        transforms: of the rows.
        drafts: of a tree, with `log_q`.
        statistics: of the logits.
        coins: [B, T - 1] float32 in [0, 1), of the drafts.
    """
    if drafts.log_q is None:
        raise ValueError("only drafts drawn from a law are walked through")
    log_q = drafts.log_q
    batch, size, _ = logits.shape
    node = jnp.arange(size, dtype=jnp.int32)[None, :]
    parents = jnp.broadcast_to(jnp.asarray(drafts.parents), (batch, size))
    by_node = [(0, 0), (1, 0)]
    valid = jnp.pad(drafts.valid, by_node) & (transforms.temperature > 0)[:, None]
    tokens, coins = jnp.pad(drafts.tokens, by_node), jnp.pad(coins, by_node)

    def enter(place: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return p and q of each row's node, and whether its children can be decided about."""
        own = node_of(log_q, jnp.minimum(place, log_q.shape[1] - 1))
        known = node_of(statistics.usable, place) & usable(own)
        p = jnp.exp(law_at(logits, transforms, drafts, statistics, place))
        return p, jnp.exp(own), known

    def next_child(parent: jax.Array, after: jax.Array) -> jax.Array:
        """Return the first valid child past the node `after`, 0 if there is none."""
        fits = (parents == parent[:, None]) & valid & (node > after[:, None])
        first = jnp.min(jnp.where(fits, node, size), axis=1)
        return jnp.where(first < size, first, 0)

    def step(state: Walk) -> Walk:
        active = state.candidate > 0
        token = node_of(tokens, state.candidate)
        q_token = node_of(state.q, token)
        # A candidate that q has no more of was not drawn from it.
        accept = active & (q_token > 0)
        accept &= node_of(coins, state.candidate) * q_token < node_of(state.r, token)
        reject = (active & ~accept)[:, None]
        chance = jnp.sum(jnp.minimum(state.r, state.q), axis=-1)
        place = jnp.where(accept, state.candidate, state.node)
        p, own, known = enter(place)
        entered = accept[:, None]
        q = state.q if drafts.drawn == "with replacement" else without(state.q, token)
        following = next_child(place, jnp.where(accept, place, state.candidate))
        here = (node == state.node[:, None]) & active[:, None]
        return Walk(
            node=place,
            candidate=jnp.where(active & (known | ~accept), following, 0),
            r=jnp.where(entered, p, jnp.where(reject, residual(state.r, state.q), state.r)),
            q=jnp.where(entered, own, jnp.where(reject, q, state.q)),
            wins=state.wins | ((node == state.candidate[:, None]) & entered),
            missed=jnp.where(here, state.missed * (1.0 - chance[:, None]), state.missed),
        )

    root = jnp.zeros(batch, jnp.int32)
    p, own, known = enter(root)
    start = Walk(
        node=root,
        candidate=jnp.where(known, next_child(root, root), 0),
        r=p,
        q=own,
        wins=jnp.zeros((batch, size), bool),
        missed=jnp.ones((batch, size), jnp.float32),
    )
    return jax.lax.while_loop(lambda state: jnp.any(state.candidate > 0), step, start)
