"""Verification of token trees: which path to accept, and the token that follows it.

A node's children are its candidates in the order of their indices, and one
is examined only after all before it were rejected. These rules are lossless:

- deterministic candidates (point masses: n-gram, top-k): accept x with r(x), then r(x) <- 0;
- candidates drawn independently from q (SpecInfer, Miao et al., arXiv 2305.09781): accept with
  min(1, r(x) / q(x)), on rejection r <- norm(max(r - q, 0));
- candidates drawn without replacement (recursive rejection sampling, Sequoia, Chen et al.,
  arXiv 2402.12374): the same, and after a rejection q(x) <- 0, q renormalised.

r starts as p of the node, and the last r gives the token after the path. Besides there is typical
acceptance (`jspec.typical_acceptance`), which is lossy.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import randomness, sampling, typical_acceptance
from jspec.config import TypicalAcceptance, Verification
from jspec.drafting.protocol import Dense, Proposal, WithoutReplacement
from jspec.randomness import Purpose
from jspec.sampling import RowSampling
from jspec.trees import Topology
from jspec.verification import Verdict
from pallas_kernels.rejection_sampling.inputs import row_of
from pallas_kernels.rejection_sampling.walk import walk
from pallas_kernels.tree_attention.reference import unpack_ancestors


class _Links(NamedTuple):
    """Topologies as the walk reads them; R is the batch, or 1 where all rows share one.

    Attributes:
        parents: [R, T], 0 for the root too.
        depths: [R, T].
        on_path: [R, T, T] bool, [r, t, a]: a is t or an ancestor of it, and no root.
        earlier: [R, T, T] bool, [r, t, s]: s is a sibling examined before t.
    """

    parents: jax.Array
    depths: jax.Array
    on_path: jax.Array
    earlier: jax.Array


def _links(topology: Topology) -> _Links:
    size, rows = topology.size, topology.by_row()
    node = jnp.arange(size, dtype=jnp.int32)
    parents = jnp.asarray(rows.parents)
    draft = node > 0
    before = draft[:, None] & draft[None, :] & (node[None, :] < node[:, None])
    return _Links(
        parents=jnp.maximum(parents, 0),
        depths=jnp.asarray(rows.depths),
        on_path=unpack_ancestors(jnp.asarray(rows.ancestors), size) & draft[None, None, :],
        earlier=(parents[:, :, None] == parents[:, None, :]) & before[None],
    )


class TreeDecision(NamedTuple):
    """What is accepted.

    Attributes:
        accepted: [B] int32, drafts on the path.
        path: [B, T] int32, path[:, i] the node of depth i on it, 0 past its end.
        log_rest: [B, V] float32, law of the token after it, up to a constant.
        overlap: [B, T - 1] float32, at depth i the chance that a child of path[:, i] is accepted.
    """

    accepted: jax.Array
    path: jax.Array
    log_rest: jax.Array
    overlap: jax.Array


def _gather(values: jax.Array, nodes: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return values[b, nodes[b, k], tokens[b, k]] of [B, T, V]."""
    row = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 0)
    return values[row, jnp.broadcast_to(nodes, tokens.shape), tokens]


def _of_nodes(values: jax.Array, nodes: jax.Array) -> jax.Array:
    """Return values[b, nodes[b, k]] of [B, T]; `nodes` [R, K]."""
    nodes = jnp.broadcast_to(nodes, (values.shape[0], nodes.shape[1]))
    return jnp.take_along_axis(values, nodes, axis=1)


def _follow(wins: jax.Array, links: _Links) -> tuple[jax.Array, jax.Array]:
    """Return the accepted count [B] and path [B, T] where at most one child of a node wins."""
    won = jnp.pad(wins, [(0, 0), (1, 0)], constant_values=True)
    reached = jnp.all(~links.on_path | won[:, None, :], axis=-1)
    node = jnp.arange(won.shape[1], dtype=jnp.int32)  # and every depth
    at = reached[:, None, :] & (links.depths[:, None, :] == node[None, :, None])
    path = jnp.sum(jnp.where(at, node[None, None, :], 0), axis=-1, dtype=jnp.int32)
    return jnp.sum(reached, axis=-1, dtype=jnp.int32) - 1, path


def _first_of_siblings(wins: jax.Array, links: _Links) -> jax.Array:
    """Keep the first winner ([B, T - 1]) among siblings."""
    before = links.earlier[:, 1:, 1:] & wins[:, None, :]
    return wins & ~jnp.any(before, axis=-1)


def greedy(logits: jax.Array, proposal: Proposal) -> tuple[TreeDecision, jax.Array]:
    """Follow the children that are the argmax; the law of every rule at temperature 0.

    Returns:
        The decision, whose `log_rest` is [B, 0], and the [B] int32 token after the path.
    """
    links = _links(proposal.topology)
    best = sampling.best(logits)
    parents = links.parents[:, 1:]
    match = (proposal.tokens == _of_nodes(best, parents)) & proposal.valid
    accepted, path = _follow(_first_of_siblings(match, links), links)
    last = jnp.take_along_axis(path, accepted[:, None], axis=1)
    final = jnp.take_along_axis(best, last, axis=1)[:, 0]
    hit = jnp.any(match[:, None, :] & (parents[:, None, :] == path[:, :-1, None]), axis=-1)
    return TreeDecision(accepted, path, logits[:, 0, :0], hit.astype(jnp.float32)), final


def deterministic(log_p: jax.Array, proposal: Proposal, coins: jax.Array) -> TreeDecision:
    """Decide about candidates chosen without chance.

    Args:
        log_p: [B, T, V] float32.
        proposal: T - 1 candidates, point masses.
        coins: [B, T - 1] float32 in [0, 1).
    """
    links = _links(proposal.topology)
    parents = links.parents[:, 1:]
    earlier = links.earlier[:, 1:, 1:]
    tokens, valid = proposal.tokens, proposal.valid
    same = tokens[:, :, None] == tokens[:, None, :]
    repeated = jnp.any(same & earlier & valid[:, None, :], axis=-1)
    p = jnp.exp(_gather(log_p, parents, tokens))
    p = jnp.where(valid & ~repeated, p, 0.0)
    # What the siblings before have taken; none of it can be rounded away when summed in order.
    taken = jnp.sum(jnp.where(earlier, p[:, None, :], 0.0), axis=-1)
    wins = _first_of_siblings(coins * (1.0 - taken) < p, links)
    accepted, path = _follow(wins, links)
    last = jnp.take_along_axis(path, accepted[:, None], axis=1)[:, 0]
    own = row_of(log_p, last)
    rejected = (parents == last[:, None]) & valid
    row = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 0)
    gone = jnp.where(rejected, tokens, own.shape[-1])
    rest = own.at[row, gone].set(-jnp.inf, mode="drop")
    empty = jnp.max(rest, axis=-1) == -jnp.inf
    children = parents[:, None, :] == path[:, :-1, None]
    overlap = jnp.sum(jnp.where(children, p[:, None, :], 0.0), axis=-1)
    return TreeDecision(accepted, path, jnp.where(empty[:, None], own, rest), overlap)


def drawn(
    log_p: jax.Array, proposal: Proposal, coins: jax.Array, log_q: jax.Array, replaced: bool
) -> TreeDecision:
    """Decide about candidates drawn from q, one after another.

    Args:
        log_p: [B, T, V] float32.
        proposal: T - 1 candidates.
        coins: [B, T - 1] float32 in [0, 1).
        log_q: [B, P, V] float32, what the children of node i were drawn from; nodes at or past P
            have none.
        replaced: static; drawn independently, else without replacement.
    """

    def enter(node: jax.Array) -> tuple[jax.Array, jax.Array]:
        law = jnp.exp(row_of(log_q, jnp.minimum(node, log_q.shape[1] - 1)))
        return jnp.exp(row_of(log_p, node)), law

    parents = jnp.asarray(proposal.topology.by_row().parents)
    walked = walk(enter, parents, proposal.tokens, proposal.valid, coins, replaced)
    accepted, path = _follow(walked.wins[:, 1:], _links(proposal.topology))
    overlap = 1.0 - jnp.take_along_axis(walked.missed, path[:, :-1], axis=1)
    return TreeDecision(accepted, path, jnp.log(walked.r), overlap)


def typical(log_p: jax.Array, proposal: Proposal, rule: TypicalAcceptance) -> TreeDecision:
    """Take the longest path of typical candidates, of several the most probable one; lossy.

    Args:
        log_p: [B, T, V] float32.
        proposal: T - 1 candidates, chosen in any way.
        rule: parameters.

    Returns:
        The decision; `overlap` is 1 where a child of the path's node is typical, else 0.
    """
    links = _links(proposal.topology)
    batch, size = log_p.shape[:2]
    parents = links.parents[:, 1:]
    log_own = _gather(log_p, parents, proposal.tokens)
    least = _of_nodes(typical_acceptance.thresholds(log_p, rule), parents)
    wins = (jnp.exp(log_own) > least) & proposal.valid
    won = jnp.pad(wins, [(0, 0), (1, 0)], constant_values=True)
    reached = jnp.all(~links.on_path | won[:, None, :], axis=-1)
    depth = jnp.where(reached, links.depths, 0)
    accepted = jnp.max(depth, axis=-1)
    # Only drafts of a path that was reached count, and these have some probability.
    of_node = jnp.pad(jnp.where(wins, log_own, 0.0), [(0, 0), (1, 0)])
    likelihood = jnp.sum(jnp.where(links.on_path, of_node[:, None, :], 0.0), axis=-1)
    deepest = reached & (depth == accepted[:, None])
    last = jnp.argmax(jnp.where(deepest, likelihood, -jnp.inf), axis=-1).astype(jnp.int32)
    node = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))  # and every depth
    on_path = jnp.broadcast_to(links.on_path, (batch, size, size))
    mine = jnp.take_along_axis(on_path, last[:, None, None], axis=1)[:, 0]
    at = mine[:, None, :] & (links.depths[:, None, :] == node[:, :, None])
    path = jnp.sum(jnp.where(at, node[:, None, :], 0), axis=-1, dtype=jnp.int32)
    hit = jnp.any(wins[:, None, :] & (parents[:, None, :] == path[:, :-1, None]), axis=-1)
    return TreeDecision(accepted, path, row_of(log_p, last), hit.astype(jnp.float32))


def verify_tree(
    logits: jax.Array,
    proposal: Proposal,
    rows: RowSampling,
    keys: jax.Array,
    rule: Verification = "token",
    of_typical: TypicalAcceptance = typical_acceptance.DEFAULT,
) -> Verdict:
    """Verify a tree of T - 1 candidates a row against the target.

    Args:
        logits: [B, T, V] float32, the target's at every node, after `jspec.edits`.
        proposal: T - 1 candidates.
        rows: transforms of the B rows.
        keys: [B] typed round keys.
        rule: "token", which is the lossless rule of the proposal's law, or "typical".
        of_typical: parameters of "typical".

    Returns:
        The verdict. Its `overlap` at depth i is the chance that a child of the accepted node of
        that depth is accepted.
    """
    batch, size, _ = logits.shape
    links = _links(proposal.topology)
    node = jnp.broadcast_to(jnp.arange(1, size, dtype=jnp.int32), (batch, size - 1))
    is_greedy = sampling.is_greedy(rows)

    def possible(usable: jax.Array) -> Proposal:
        """Drop nodes that cannot be decided about: their parents are not `usable` ([B, T])."""
        fits = proposal.valid & _of_nodes(usable, links.parents[:, 1:])
        padded = jnp.pad(fits, [(0, 0), (1, 0)], constant_values=True)
        whole = jnp.all(~links.on_path | padded[:, None, :], axis=-1)[:, 1:]
        return dataclasses.replace(proposal, valid=whole)

    def stochastic() -> tuple[jax.Array, ...]:
        usable = sampling.usable(logits)
        log_p = sampling.log_probs(logits, rows)
        coins = randomness.uniforms(randomness.node_keys(keys, node, Purpose.ACCEPT))
        law = proposal.law
        if rule == "typical":
            decided = typical(log_p, possible(usable), of_typical)
        elif isinstance(law, Dense | WithoutReplacement):
            replaced = isinstance(law, Dense)
            decided = drawn(log_p, possible(usable), coins, law.log_q, replaced)
        else:
            decided = deterministic(log_p, possible(usable), coins)
        last = jnp.take_along_axis(decided.path, decided.accepted[:, None], axis=1)
        final_keys = randomness.node_keys(keys, last, Purpose.FINAL)[:, 0]
        final = sampling.draw(decided.log_rest, final_keys)
        mine = (decided.accepted, decided.path, final, decided.overlap, usable)

        # Where q is a point mass only its one token could be accepted, not the other candidates.
        def choose(best: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(is_greedy.reshape((-1,) + (1,) * (best.ndim - 1)), best, other)

        return tuple(map(choose, best(), mine))

    def best() -> tuple[jax.Array, ...]:
        usable = sampling.usable(logits)
        decided, final = greedy(logits, possible(usable))
        return decided.accepted, decided.path, final, decided.overlap, usable

    accepted, path, final, overlap, usable = jax.lax.cond(jnp.all(is_greedy), best, stochastic)
    on_path = jnp.take_along_axis(usable, path, axis=1)
    past = jnp.arange(size, dtype=jnp.int32)[None, :] > accepted[:, None]
    finite = jnp.all(on_path | past, axis=-1)
    return Verdict(accepted=accepted, final=final, overlap=overlap, finite=finite, path=path)
