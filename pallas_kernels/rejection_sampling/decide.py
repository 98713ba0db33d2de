"""From a few numbers a node to accepted drafts and the token after them, for every backend.

Only one row of logits a batch row, the decided node's, is read again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import Drafts, Statistics, Transforms, on_path
from pallas_kernels.rejection_sampling.transforms import edit

# Relative; some eight units in the last place of a float32.
ROUNDING = 1e-6


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
        overlap: [B, T - 1] float32, sum min(p, q) at each valid draft's parent, else 0; meaningful
            where the parent was reached.
        finite: [B] bool, the logits of the root and of every accepted draft were usable.
    """

    accepted: jax.Array
    path: jax.Array
    final: jax.Array
    log_p: jax.Array
    raw_log_p: jax.Array
    overlap: jax.Array
    finite: jax.Array


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return array[b, index[b]] for [B, K, ...] and [B]."""
    shape = (-1,) + (1,) * (array.ndim - 1)
    return jnp.take_along_axis(array, index.reshape(shape), axis=1)[:, 0]


def _of_parents(array: jax.Array, parents: jax.Array) -> jax.Array:
    """Return array[b, parents[j]] of every draft j: [B, T] to [B, T - 1]."""
    return jnp.take(array, parents[1:], axis=1)


def _walk(statistics: Statistics, drafts: Drafts, coins: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the drafts accepted and those that can be tested, [B, T - 1] bool each.

    A chain's draft x is accepted where u q(x) < p(x), strict (Leviathan et al. 2023, arXiv
    2211.17192). Of drafts chosen without chance that share a parent, each is tried in turn, on
    what the rejected ones left: u r < p(x), r = 1 - their sum. A token tried before has nothing
    left. So every test is made at once, as if all before it had failed.
    """
    parents = jnp.asarray(drafts.parents)[1:]
    size = drafts.tokens.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    valid = drafts.valid & _of_parents(statistics.usable, jnp.asarray(drafts.parents))
    valid &= ~jnp.isnan(statistics.overlap)
    earlier = (parents[:, None] == parents[None, :]) & (place[None, :] < place[:, None])
    tried = earlier[None] & valid[:, None, :]
    again = jnp.any(tried & (drafts.tokens[:, :, None] == drafts.tokens[:, None, :]), axis=-1)
    p = jnp.where(again, 0.0, jnp.exp(statistics.log_p))
    left = 1.0 - jnp.sum(jnp.where(tried, p[:, None, :], 0.0), axis=-1)
    passed = valid & (coins * statistics.q * jnp.maximum(left, 0.0) < p)
    first = passed & ~jnp.any(tried & passed[:, None, :], axis=-1)
    path = on_path(drafts)[None, 1:]
    reached = jnp.all(first[:, None, :] | ~path, axis=-1)
    return reached, valid


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
    reached, tested = _walk(statistics, drafts, coins)
    accepted = jnp.sum(reached, axis=-1, dtype=jnp.int32)
    index = jnp.arange(1, nodes, dtype=jnp.int32)[None, :]
    node = jnp.max(jnp.where(reached, index, 0), axis=-1, initial=0)
    path = jnp.sort(jnp.where(reached, index, nodes), axis=-1)
    path = jnp.where(path < nodes, path, -1)
    greedy = transforms.temperature == 0
    best = _at(statistics.best, node)

    def draw() -> tuple[jax.Array, jax.Array]:
        log_p = _row(logits, transforms, drafts, statistics, node)
        log_rest = _residual(log_p, drafts, tested, node)
        drawn = jnp.argmax(log_rest + noise(node), axis=-1).astype(jnp.int32)
        drawn = jnp.where(greedy, best, drawn)
        return drawn, jnp.where(greedy, 0.0, _at(log_p, drawn))

    final, final_log_p = jax.lax.cond(
        jnp.all(greedy), lambda: (best, jnp.zeros(batch, jnp.float32)), draw
    )
    row = jnp.arange(batch, dtype=jnp.int32)
    final_logit = logits[row, node, final].astype(jnp.float32)
    final_raw_log_p = final_logit - _at(statistics.raw_total, node)

    def along(of_drafts: jax.Array, of_final: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(of_drafts, jnp.maximum(path - 1, 0), axis=1)
        taken = jnp.concatenate([taken, jnp.zeros((batch, 1), taken.dtype)], axis=1)
        step = jnp.arange(nodes, dtype=jnp.int32)[None, :]
        n = accepted[:, None]
        return jnp.where(step < n, taken, jnp.where(step == n, of_final[:, None], 0.0))

    usable = statistics.usable
    return Outcome(
        accepted=accepted,
        path=path,
        final=final,
        log_p=along(statistics.log_p, final_log_p),
        raw_log_p=along(statistics.raw_log_p, final_raw_log_p),
        overlap=jnp.where(drafts.valid, statistics.overlap, 0.0),
        finite=usable[:, 0] & jnp.all(usable[:, 1:] | ~reached, axis=-1),
    )


def _of_node(transforms: Transforms, node: jax.Array) -> Transforms:
    """Return the transforms of one node a row."""

    def one(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else _at(array, node)[:, None]

    return dataclasses.replace(
        transforms, forbidden=one(transforms.forbidden), allowed=one(transforms.allowed)
    )


def _own_path(drafts: Drafts, node: jax.Array) -> jax.Array:
    """Return [B, 1, T - 1] int32: drafts on the way to each row's node, -1 elsewhere."""
    mask = jnp.take(on_path(drafts), node, axis=0)
    return jnp.where(mask, drafts.tokens, -1)[:, None]


def _row(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    statistics: Statistics,
    node: jax.Array,
) -> jax.Array:
    """Return log p of each row's node, [B, V]; what it says of a greedy row is not used."""
    row = _at(logits, node).astype(jnp.float32)[:, None]
    row = edit(row, _of_node(transforms, node), _own_path(drafts, node))[:, 0]
    temperature = jnp.where(transforms.temperature == 0, 1.0, transforms.temperature)
    highest, threshold = _at(statistics.highest, node), _at(statistics.threshold, node)
    scores = (row - highest[:, None]) / temperature[:, None]
    # Another program may round these scores otherwise than the one that found the threshold; the
    # last token kept, which may be the only one, must not be lost to that.
    slack = ROUNDING * (jnp.abs(highest) / temperature + jnp.abs(threshold))
    kept = scores >= (threshold - slack)[:, None]
    return jnp.where(kept, scores - _at(statistics.log_total, node)[:, None], -jnp.inf)


def _residual(log_p: jax.Array, drafts: Drafts, tested: jax.Array, node: jax.Array) -> jax.Array:
    """Return the log of the law after the rejected drafts, up to a constant, [B, V].

    p itself where nothing was rejected or nothing is left.
    """
    size = drafts.tokens.shape[1]
    if size == 0:
        return log_p
    parents = jnp.asarray(drafts.parents)[1:]
    # The walk ended at the node, so all of its children that were tested failed.
    failed = (parents[None, :] == node[:, None]) & tested
    if drafts.log_q is not None:
        child = jnp.minimum(node, size - 1)
        q = jnp.exp(_at(drafts.log_q, child))
        log_rest = jnp.log(jnp.maximum(jnp.exp(log_p) - q, 0.0))
    else:
        row = jax.lax.broadcasted_iota(jnp.int32, failed.shape, 0)
        token = jnp.where(failed, drafts.tokens, log_p.shape[1])
        log_rest = log_p.at[row, token].set(-jnp.inf, mode="drop")
    cut = jnp.any(failed, axis=-1) & (jnp.max(log_rest, axis=-1) > -jnp.inf)
    return jnp.where(cut[:, None], log_rest, log_p)
