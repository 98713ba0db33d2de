"""N-gram drafting, also called prompt lookup (Saxena 2023), on the device.

The row's last n tokens are looked up in its own prompt and output; what followed them there is the
draft. The longest n wins, then the most recent occurrence.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import trees
from jspec.drafting import BoundDrafter
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.drafting.stateless import StatelessDrafter
from jspec.errors import require, require_integer

_MAX_N = 128


def match_scores(tokens: jax.Array, length: jax.Array, max_n: int, min_n: int) -> jax.Array:
    """Rank the earlier occurrences of each row's last tokens: the longest, then the most recent.

    Args:
        tokens: [B, S] int32, the rows' text.
        length: [B] int32, its length.
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match.

    Returns:
        [B, S] int32, for the place e of an occurrence's last token S * (tokens that agree) + e;
        -1 where fewer than `min_n` agree.
    """
    batch, slots = tokens.shape
    position = jnp.arange(slots, dtype=jnp.int32)[None, :]
    last = length[:, None] - 1
    # run[b, e]: how many tokens, counted back from e, equal the row's last ones.
    run = jnp.zeros((batch, slots), jnp.int32)
    going = position < last
    for back in range(max_n):
        suffix = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        shifted = jnp.roll(tokens, back, axis=1)
        going &= (shifted == suffix) & (position >= back)
        run += going.astype(jnp.int32)
    return jnp.where(run >= min_n, run * slots + position, -1)


def continuations(tokens: jax.Array, length: jax.Array, ends: jax.Array, count: int) -> jax.Array:
    """Return what followed some occurrences of each row's last tokens.

    A match that runs into the suffix itself is a repetition of some period; its continuation is
    read round and round that period, so a short loop still gives `count` tokens.

    Args:
        tokens: [B, S] int32, the rows' text.
        length: [B] int32, its length.
        ends: [B, M] int32, where the occurrences end.
        count: of each continuation.

    Returns:
        [B, M, count] int32.
    """
    batch, matches = ends.shape
    step = jnp.arange(count, dtype=jnp.int32)[None, None, :]
    period = jnp.maximum(length[:, None] - 1 - ends, 1)[:, :, None]
    slots = (ends[:, :, None] + 1 + step % period).reshape(batch, -1)
    found = jnp.take_along_axis(tokens, slots, axis=1, mode="clip")
    return found.reshape(batch, matches, count)


def check_lengths(max_n: int, min_n: int) -> None:
    """Raise `InputError` unless they are suffix lengths that can be looked up."""
    require_integer("min_n", min_n)
    require_integer("max_n", max_n)
    require(min_n >= 1, "min_n", min_n, "is below 1", "match at least one token")
    require(max_n >= min_n, "max_n", max_n, f"is below min_n ({min_n})", "give max_n >= min_n")
    require(  # the program grows with it
        max_n <= _MAX_N,
        "max_n",
        max_n,
        f"is above {_MAX_N}",
        "look up shorter suffixes; the longest match wins anyway",
    )


@dataclasses.dataclass(frozen=True)
class NGramDrafter(StatelessDrafter):
    """Drafts by looking up the row's last tokens in its own history.

    Attributes:
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match.
    """

    max_n: int = 3
    min_n: int = 2

    def __post_init__(self) -> None:
        check_lengths(self.max_n, self.min_n)

    def propose(
        self, params: tuple[()], state: tuple[()], context: Context, gamma: int
    ) -> tuple[Proposal, tuple[()]]:
        """Return what followed the best match; rows without a match draft nothing."""
        score = match_scores(context.tokens, context.length, self.max_n, self.min_n)
        end = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
        found = jnp.max(score, axis=1) >= 0
        tokens = continuations(context.tokens, context.length, end, gamma)[:, 0]
        return (
            Proposal(
                tokens=tokens,
                topology=trees.chain(gamma),
                valid=jnp.broadcast_to(found[:, None], tokens.shape),
                law=PointMass(),
            ),
            (),
        )


def ngram(max_n: int = 3, min_n: int = 2) -> BoundDrafter:
    """Return an n-gram (prompt lookup) drafter.

    Args:
        max_n: longest suffix looked up.
        min_n: shortest suffix that counts as a match.

    Raises:
        InputError: a length is no integer or out of its range.
    """
    return BoundDrafter(f"ngram-{min_n}-{max_n}", NGramDrafter(max_n, min_n))
