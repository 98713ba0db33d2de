"""What happened in each round, kept by the slot of the tokens it committed.

The device writes; the host counts, over as many tokens as the request keeps: text that a stop
string cuts off takes its rounds with it. Every figure derived from the counts is in
`jspec.metrics`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.metrics import Counts

# Drafts proposed and accepted share a word: at most 127 each (`SpeculationConfig.gamma`).
_BASE = 256
_NOTHING = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """Rounds of each row since it was admitted.

    Attributes:
        rounds: [B, S] int32; where a round's first token lies, 256 * drafts proposed + drafts
            accepted; -1 elsewhere.
        overlap: [B, S] float32; sum_x min(p, q) at the position of the token, for `Counts`; only
            read where the round proposed a draft for it.
        nodes: [B, S] int32; the node of the tree that the token was drafted as; only read where it
            is an accepted draft.
        discarded: [B] int32, tokens verified and then cut because a stop came first.
    """

    rounds: jax.Array
    overlap: jax.Array
    nodes: jax.Array
    discarded: jax.Array


def init(batch: int, slots: int) -> Trace:
    """Return an empty trace for token buffers [batch, slots]."""
    return Trace(
        rounds=jnp.full((batch, slots), _NOTHING, jnp.int32),
        overlap=jnp.zeros((batch, slots), jnp.float32),
        nodes=jnp.zeros((batch, slots), jnp.int32),
        discarded=jnp.zeros(batch, jnp.int32),
    )


def record(
    trace: Trace,
    slots: jax.Array,
    proposed: jax.Array,
    accepted: jax.Array,
    overlap: jax.Array,
    nodes: jax.Array,
    discarded: jax.Array,
) -> Trace:
    """Add one round.

    Args:
        trace: so far.
        slots: [B, K + 1] int32 of the tokens that the round commits; S where it commits none.
        proposed: [B] int32 drafts.
        accepted: [B] int32 drafts, of which a stop may have cut some.
        overlap: [B, K] float32 of every draft.
        nodes: [B, K] int32 of the accepted drafts, by depth.
        discarded: [B] int32 tokens cut.
    """
    row = jnp.broadcast_to(jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None], slots.shape)
    word = proposed * _BASE + accepted
    drafts = overlap.shape[1]
    rows, of_drafts = row[:, :drafts], slots[:, :drafts]
    return Trace(
        rounds=trace.rounds.at[row[:, :1], slots[:, :1]].set(word[:, None], mode="drop"),
        overlap=trace.overlap.at[rows, of_drafts].set(overlap, mode="drop"),
        nodes=trace.nodes.at[rows, of_drafts].set(nodes, mode="drop"),
        discarded=trace.discarded + discarded,
    )


def counts(trace: Trace, row: int, start: int, end: int, length: int, max_gamma: int) -> Counts:
    """Count one row's rounds.

    A round that ends at a stop counts only the drafts up to it, as proposed and as accepted: what
    lies beyond was decided by the stop, not by the drafter, and is counted as discarded.

    Args:
        trace: on the host.
        row: of the batch.
        start: length of the prompt.
        end: length that the request keeps, at most `length`.
        length: committed on the device.
        max_gamma: G of the result.
    """
    words = np.asarray(trace.rounds)[row, start:end]
    first = np.flatnonzero(words != _NOTHING)
    size = np.diff(np.append(first, end - start))
    proposed, accepted = np.divmod(words[first], _BASE)
    cut = size < accepted + 1
    proposed = np.where(cut, np.minimum(proposed, size), proposed)
    accepted = np.minimum(accepted, size)
    histogram = np.zeros((max_gamma + 1, max_gamma + 1), np.int64)
    np.add.at(histogram, (proposed, accepted), 1)
    overlap = np.zeros(max_gamma, np.float64)
    nodes = np.zeros((max_gamma + 1, 2), np.int64)
    nodes[0, 0] = len(first)
    seen = np.asarray(trace.overlap)[row, start:end]
    drafted = np.asarray(trace.nodes)[row, start:end]
    for position in range(max_gamma):
        examined = first[(position < proposed) & (position <= accepted) & (position < size)]
        overlap[position] = seen[examined + position].sum(dtype=np.float64)
        parents = drafted[examined + position - 1] if position else np.zeros_like(examined)
        np.add.at(nodes[:, 1], parents, 1)
        np.add.at(nodes[:, 0], drafted[first[position < accepted] + position], 1)
    return Counts(
        histogram=histogram,
        overlap=overlap,
        emitted=end - start,
        discarded=int(np.asarray(trace.discarded)[row]) + length - end,
        nodes=nodes,
    )
