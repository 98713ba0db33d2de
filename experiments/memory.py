"""Memory that a drafter takes beside its target's: weights of its own, lent ones, its state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

import jspec


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        own: weights that only the drafter reads.
        lent: the target's weights that the drafter reads too; no memory of their own.
        state: what the drafter keeps for a row: keys and values, and features of a round.
        target_weights: the target's.
        target_cache: the target's keys and values of a row.
        capacity: tokens a row that `state` and `target_cache` are for.
    """

    own: int
    lent: int
    state: int
    target_weights: int
    target_cache: int
    capacity: int

    @property
    def own_share(self) -> float:
        """Of the target's weights."""
        return self.own / self.target_weights

    @property
    def lent_share(self) -> float:
        """Of the target's weights."""
        return self.lent / self.target_weights

    @property
    def state_share(self) -> float:
        """Of the target's cache."""
        return self.state / self.target_cache

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "own_share": self.own_share,
            "lent_share": self.lent_share,
            "state_share": self.state_share,
        }


def measure(target: jspec.Model, drafter: jspec.BoundDrafter, capacity: int) -> Memory:
    """Return what a drafter takes beside its target.

    Args:
        target: what is drafted for.
        drafter: whose arrays are the target's own where it borrows them.
        capacity: tokens a row.
    """
    known = {id(leaf): leaf for leaf in jax.tree.leaves(target.params)}
    read = {id(leaf): leaf for leaf in jax.tree.leaves(drafter.params)}
    dtype = target.cache_dtype
    cache = jax.eval_shape(lambda: target.functions.init_cache(1, capacity, dtype))
    state = jax.eval_shape(lambda: drafter.drafter.init(1, capacity, dtype))
    return Memory(
        own=sum(int(leaf.nbytes) for key, leaf in read.items() if key not in known),
        lent=sum(int(leaf.nbytes) for key, leaf in read.items() if key in known),
        state=_bytes(state),
        target_weights=sum(int(leaf.nbytes) for leaf in known.values()),
        target_cache=_bytes(cache),
        capacity=capacity,
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
