"""N-gram drafting with several continuations: a tree of what followed the row's last tokens.

The best matches of the row's last tokens (`jspec.drafting.ngram`) are merged into a trie, and its
most valuable nodes are drafted. A node is worth the matches that run through it: a match of one
token more counts four times as much, several that agree add up, and every level costs a quarter.

The constants hardly matter: other factors and costs of a level, weights by recency and looking up
the suffix of every node anew were tried on real outputs and changed next to nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec import trees
from jspec.drafting import BoundDrafter, expansion
from jspec.drafting.ngram import check_lengths, continuations, match_scores
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.drafting.stateless import StatelessDrafter
from jspec.errors import require, require_integer

LONGER = 4.0
DEEPER = 0.75
_MOST_MATCHES = 64


@dataclasses.dataclass(frozen=True)
class NGramTreeDrafter(StatelessDrafter):
    """Drafts a trie of what followed the best matches of the row's last tokens.

    Attributes:
        matches: M, how many are looked at.
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match.
    """

    matches: int
    max_n: int
    min_n: int

    def propose(
        self, params: tuple[()], state: tuple[()], context: Context, gamma: int
    ) -> tuple[Proposal, tuple[()]]:
        """Return the `gamma` best nodes; rows without a match draft nothing."""
        score = match_scores(context.tokens, context.length, self.max_n, self.min_n)
        slots = score.shape[1]
        best = _largest(score, self.matches)
        ends = jnp.maximum(best, 0) % slots
        tokens = continuations(context.tokens, context.length, ends, gamma)
        run = jnp.where(best >= 0, best // slots, 0)
        # A table, since powers need not come out alike everywhere.
        by_shortfall = jnp.asarray(LONGER ** -np.arange(self.max_n + 1, dtype=np.float32))
        weights = jnp.where(best >= 0, jnp.take(by_shortfall, run[:, :1] - run), 0.0)
        depth = jnp.arange(1, gamma + 1, dtype=jnp.int32)
        useful = depth[None, :, None] <= context.room[:, None, None]
        weights = jnp.where(useful, weights[:, None, :], 0.0)
        candidates, values, parents = _trie(tokens, weights)
        kept = expansion.rerank(values, parents, gamma)
        return (
            Proposal(
                tokens=jnp.take_along_axis(candidates, kept.places, axis=1),
                topology=trees.from_parent_rows(kept.parents),
                valid=kept.valid,
                law=PointMass(),
            ),
            (),
        )


def _largest(scores: jax.Array, count: int) -> jax.Array:
    """Return the [B, count] largest of scores [B, S], which differ or are -1, in falling order.

    One pass each: XLA:CPU sorts all of them for top_k.
    """

    def step(above: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        best = jnp.max(jnp.where(scores < above[:, None], scores, -1), axis=1)
        return best, best

    start = jnp.full(scores.shape[0], np.iinfo(np.int32).max, jnp.int32)
    _, found = jax.lax.scan(step, start, length=count)
    return found.T


def _trie(tokens: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merge M continuations of D tokens.

    Args:
        tokens: [B, M, D] int32.
        weights: [B, D, M] float32, 0 where there is no token.

    Returns:
        Tokens, values and parents, [B, D * M] each, as `expansion.rerank` takes them: candidate
        d * M + m is continuation m's token d. Of those with the same way to them the first stands
        for all, and the others are none.
    """
    batch, matches, depth = tokens.shape
    by_depth = jnp.swapaxes(tokens, 1, 2)
    equal = by_depth[:, :, :, None] == by_depth[:, :, None, :]
    same = jnp.cumprod(equal, axis=1, dtype=jnp.int32) == 1  # [B, D, M, M]
    through = jnp.sum(jnp.where(same, weights[:, :, None, :], 0.0), axis=-1)
    fall = jnp.asarray(np.float32(DEEPER) ** np.arange(depth, dtype=np.float32))
    first = jnp.argmax(same, axis=-1).astype(jnp.int32)
    own = (first == jnp.arange(matches, dtype=jnp.int32)[None, None, :]) & (weights > 0)
    values = jnp.where(own, through * fall[None, :, None], -jnp.inf)
    level = jnp.arange(depth - 1, dtype=jnp.int32)[None, :, None]
    above = first[:, :-1] + level * matches
    parents = jnp.pad(above, [(0, 0), (1, 0), (0, 0)], constant_values=-1)
    return by_depth.reshape(batch, -1), values.reshape(batch, -1), parents.reshape(batch, -1)


def ngram_tree(nodes: int = 15, matches: int = 8, max_n: int = 5, min_n: int = 1) -> BoundDrafter:
    """Return a drafter that looks up several continuations of the row's last tokens.

    Args:
        nodes: drafts a round.
        matches: how many continuations are looked at.
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match. Short ones fill the places that longer ones
            leave, so there is no reason to refuse them, as there is for a chain.

    Raises:
        InputError: a number is no integer or out of its range.
    """
    require_integer("nodes", nodes)
    require(1 <= nodes <= 127, "nodes", nodes, "is outside 1..127", "give a smaller tree")
    require_integer("matches", matches)
    require(
        1 <= matches <= _MOST_MATCHES,
        "matches",
        matches,
        f"is outside 1..{_MOST_MATCHES}",
        "look at fewer, the best ones",
    )
    check_lengths(max_n, min_n)
    return BoundDrafter(
        f"ngram-tree-{nodes}", NGramTreeDrafter(matches, max_n, min_n), drafts=nodes
    )
