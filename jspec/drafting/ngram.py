"""N-gram drafting, also called prompt lookup (Saxena 2023), on the device.

The row's last n tokens are looked up in its own prompt and output; what followed them there is the
draft. The longest n wins, then the most recent occurrence.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jspec import trees
from jspec.drafting import BoundDrafter
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.drafting.stateless import StatelessDrafter
from jspec.errors import require, require_integer

_MAX_N = 128


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
        require_integer("min_n", self.min_n)
        require_integer("max_n", self.max_n)
        require(self.min_n >= 1, "min_n", self.min_n, "is below 1", "match at least one token")
        require(
            self.max_n >= self.min_n,
            "max_n",
            self.max_n,
            f"is below min_n ({self.min_n})",
            "give max_n >= min_n",
        )
        require(  # the program grows with it
            self.max_n <= _MAX_N,
            "max_n",
            self.max_n,
            f"is above {_MAX_N}",
            "look up shorter suffixes; the longest match wins anyway",
        )

    def propose(
        self, params: tuple[()], state: tuple[()], context: Context, gamma: int
    ) -> tuple[Proposal, tuple[()]]:
        """Return what followed the best match; rows without a match draft nothing.

        A match that runs into the suffix itself is a repetition of some period; its continuation
        is read round and round that period, so a short loop still fills `gamma`.
        """
        batch, slots = context.tokens.shape
        position = jnp.arange(slots, dtype=jnp.int32)[None, :]
        last = context.length[:, None] - 1

        # run[b, e]: how many tokens, counted back from e, equal the row's last ones.
        run = jnp.zeros((batch, slots), jnp.int32)
        going = position < last
        for back in range(self.max_n):
            suffix = jnp.take_along_axis(context.tokens, jnp.maximum(last - back, 0), axis=1)
            shifted = jnp.roll(context.tokens, back, axis=1)
            going &= (shifted == suffix) & (position >= back)
            run += going.astype(jnp.int32)
        score = jnp.where(run >= self.min_n, run * slots + position, -1)
        end = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
        found = jnp.max(score, axis=1) >= 0

        step = jnp.arange(gamma, dtype=jnp.int32)[None, :]
        period = jnp.maximum(last - end, 1)
        tokens = jnp.take_along_axis(context.tokens, end + 1 + step % period, axis=1, mode="clip")
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
