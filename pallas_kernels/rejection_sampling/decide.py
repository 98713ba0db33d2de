"""From a few numbers a node to accepted drafts and the token after them, for every backend.

Of the logits only single rows are read again: the decided node's, and in a tree drawn from q those
of the nodes that the walk comes to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import (
    Drafts,
    Statistics,
    Transforms,
    node_of,
    of_parents,
    on_path,
    parents_of,
    row_of,
)
from pallas_kernels.rejection_sampling.laws import law_at
from pallas_kernels.rejection_sampling.walk import Walk, walk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """A verification's result.

    Attributes:
        accepted: [B] int32, drafts accepted, n.
        path: [B, T - 1] int32, their nodes in order, then -1.
        final: [B] int32, the correction after a rejection, else the bonus token.
        log_p: [B, T] float32, log p of the n accepted tokens and of the final one, then 0.
        raw_log_p: [B, T] float32, the same before any transform.
        overlap: [B, T - 1] float32, at i <= n the chance that a child of the path's node of depth i
            is accepted (of a chain drawn from q: sum min(p, q)), then 0.
        finite: [B] bool, the logits of the root and of every accepted draft were usable.
    """

    accepted: jax.Array
    path: jax.Array
    final: jax.Array
    log_p: jax.Array
    raw_log_p: jax.Array
    overlap: jax.Array
    finite: jax.Array


class _Decided(NamedTuple):
    """What is accepted.

    Attributes:
        reached: [B, T - 1] bool, accepted drafts.
        tested: [B, T - 1] bool, drafts that can be examined.
        p: [B, T - 1] float32, chance of each draft as a point mass; 0 where it cannot be accepted.
    """

    reached: jax.Array
    tested: jax.Array
    p: jax.Array


def _at_once(statistics: Statistics, drafts: Drafts, coins: jax.Array) -> _Decided:
    """Decide about chains, and about drafts chosen without chance.

    A chain's draft x is accepted where u q(x) < p(x), strict (Leviathan et al. 2023, arXiv
    2211.17192). Of drafts chosen without chance that share a parent, each is tried in turn, on
    what the rejected ones left: u r < p(x), r = 1 - their sum. A token tried before has nothing
    left. So every test is made at once, as if all before it had failed.
    """
    parents = parents_of(drafts)
    place = jnp.arange(drafts.tokens.shape[1], dtype=jnp.int32)
    tested = drafts.valid & of_parents(statistics.usable, drafts) & ~jnp.isnan(statistics.overlap)
    before = (place[None, :] < place[:, None])[None]
    tried = (parents[:, :, None] == parents[:, None, :]) & before & tested[:, None, :]
    again = jnp.any(tried & (drafts.tokens[:, :, None] == drafts.tokens[:, None, :]), axis=-1)
    p = jnp.where(again | ~tested, 0.0, jnp.exp(statistics.log_p))
    left = 1.0 - jnp.sum(jnp.where(tried, p[:, None, :], 0.0), axis=-1)
    passed = tested & (coins * statistics.q * jnp.maximum(left, 0.0) < p)
    first = passed & ~jnp.any(tried & passed[:, None, :], axis=-1)
    reached = jnp.all(first[:, None, :] | ~on_path(drafts)[:, 1:], axis=-1)
    return _Decided(reached, tested, p)


class _Path(NamedTuple):
    """Accepted nodes: [B] how many, the last one, and [B, T - 1] all in order, then -1."""

    accepted: jax.Array
    last: jax.Array
    nodes: jax.Array


def _path_of(reached: jax.Array) -> _Path:
    size = reached.shape[1] + 1
    index = jnp.arange(1, size, dtype=jnp.int32)[None, :]
    nodes = jnp.sort(jnp.where(reached, index, size), axis=-1)
    return _Path(
        accepted=jnp.sum(reached, axis=-1, dtype=jnp.int32),
        last=jnp.max(jnp.where(reached, index, 0), axis=-1, initial=0),
        nodes=jnp.where(nodes < size, nodes, -1),
    )


def _examined(path: _Path) -> jax.Array:
    """Return [B, T - 1] int32: the node that each depth's children hang on, -1 past the last."""
    root = jnp.zeros_like(path.accepted)[:, None]
    return jnp.concatenate([root, path.nodes], axis=1)[:, : path.nodes.shape[1]]


def _overlap(decided: _Decided, drafts: Drafts, statistics: Statistics, path: _Path) -> jax.Array:
    """Return the chance that a child is accepted, by depth, of drafts decided at once."""
    node = _examined(path)
    if drafts.chain_log_q is not None:
        return jnp.where((node >= 0) & decided.tested, statistics.overlap, 0.0)
    children = parents_of(drafts)[:, None, :] == node[:, :, None]
    return jnp.sum(jnp.where(children, decided.p[:, None, :], 0.0), axis=-1)


def decide(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    statistics: Statistics,
    coins: jax.Array,
    noise: Callable[[jax.Array], jax.Array],
) -> Outcome:
    """Accept drafts and draw the token that follows.

    Args:
        logits: [B, T, V] float32 or bfloat16, raw.
        transforms: of the rows.
        drafts: of the round.
        statistics: of the logits.
        coins: [B, T - 1] float32 in [0, 1), of the drafts.
        noise: from the decided node [B] int32 to standard Gumbel noise [B, V] float32 of its own.
    """
    batch, nodes, _ = logits.shape
    greedy = transforms.temperature == 0
    decided = _at_once(statistics, drafts, coins)
    at_once = _path_of(decided.reached)
    by_depth = _overlap(decided, drafts, statistics, at_once)

    def best() -> tuple[_Path, jax.Array, jax.Array, jax.Array]:
        token = node_of(statistics.best, at_once.last)
        return at_once, by_depth, token, jnp.zeros(batch, jnp.float32)

    def draw() -> tuple[_Path, jax.Array, jax.Array, jax.Array]:
        if drafts.log_q is None or drafts.drawn == "chain":
            path, overlap = at_once, by_depth
            log_p = law_at(logits, transforms, drafts, statistics, path.last)
            log_rest = _residual(log_p, drafts, decided.tested, path.last)
        else:
            walked = _walk(logits, transforms, drafts, statistics, coins)
            # Of a greedy row's candidates only the argmax can be accepted, whatever their q.
            path = _path_of(jnp.where(greedy[:, None], decided.reached, walked.wins[:, 1:]))
            node = _examined(path)
            missed = jnp.take_along_axis(walked.missed, jnp.maximum(node, 0), axis=1)
            overlap = jnp.where(node >= 0, 1.0 - missed, 0.0)
            overlap = jnp.where(greedy[:, None], by_depth, overlap)
            log_p = law_at(logits, transforms, drafts, statistics, path.last)
            log_rest = jnp.log(walked.r)
        token = jnp.argmax(log_rest + noise(path.last), axis=-1).astype(jnp.int32)
        token = jnp.where(greedy, node_of(statistics.best, path.last), token)
        return path, overlap, token, jnp.where(greedy, 0.0, node_of(log_p, token))

    path, overlap, final, final_log_p = jax.lax.cond(jnp.all(greedy), best, draw)
    row = jnp.arange(batch, dtype=jnp.int32)
    final_logit = logits[row, path.last, final].astype(jnp.float32)
    final_raw_log_p = final_logit - node_of(statistics.raw_total, path.last)

    def along(of_drafts: jax.Array, of_final: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(of_drafts, jnp.maximum(path.nodes - 1, 0), axis=1)
        taken = jnp.concatenate([taken, jnp.zeros((batch, 1), taken.dtype)], axis=1)
        step = jnp.arange(nodes, dtype=jnp.int32)[None, :]
        n = path.accepted[:, None]
        return jnp.where(step < n, taken, jnp.where(step == n, of_final[:, None], 0.0))

    fine = jnp.take_along_axis(statistics.usable, jnp.maximum(path.nodes, 0), axis=1)
    return Outcome(
        accepted=path.accepted,
        path=path.nodes,
        final=final,
        log_p=along(statistics.log_p, final_log_p),
        raw_log_p=along(statistics.raw_log_p, final_raw_log_p),
        overlap=overlap,
        # Past the path it is the root that is asked again.
        finite=statistics.usable[:, 0] & jnp.all(fine, axis=-1),
    )


def _walk(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    statistics: Statistics,
    coins: jax.Array,
) -> Walk:
    """Walk down trees drawn from q; a greedy row's walk does not begin."""
    log_q = drafts.log_q
    assert log_q is not None
    last = log_q.shape[1] - 1

    def enter(node: jax.Array) -> tuple[jax.Array, jax.Array]:
        p = jnp.exp(law_at(logits, transforms, drafts, statistics, node))
        return p, jnp.exp(row_of(log_q, jnp.minimum(node, last)))

    drawn = drafts.valid & of_parents(statistics.usable, drafts)
    drawn &= (transforms.temperature > 0)[:, None]
    parents = jnp.asarray(drafts.parents)
    parents = parents if drafts.own_trees else parents[None]
    return walk(enter, parents, drafts.tokens, drawn, coins, drafts.drawn == "with replacement")


def _residual(log_p: jax.Array, drafts: Drafts, tested: jax.Array, node: jax.Array) -> jax.Array:
    """Return the log of the law after the rejected drafts, up to a constant, [B, V].

    p itself where nothing was rejected or nothing is left.
    """
    size = drafts.tokens.shape[1]
    if size == 0:
        return log_p
    # The walk ended at the node, so all of its children that were tested failed.
    failed = (parents_of(drafts) == node[:, None]) & tested
    if drafts.chain_log_q is not None:
        q = jnp.exp(row_of(drafts.chain_log_q, jnp.minimum(node, size - 1)))
        log_rest = jnp.log(jnp.maximum(jnp.exp(log_p) - q, 0.0))
    else:
        row = jax.lax.broadcasted_iota(jnp.int32, failed.shape, 0)
        token = jnp.where(failed, drafts.tokens, log_p.shape[1])
        log_rest = log_p.at[row, token].set(-jnp.inf, mode="drop")
    cut = jnp.any(failed, axis=-1) & (jnp.max(log_rest, axis=-1) > -jnp.inf)
    return jnp.where(cut[:, None], log_rest, log_p)
