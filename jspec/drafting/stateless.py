"""Base of drafters that keep no state: all they need is in the round's context."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from jspec.drafting.protocol import Outcome


class StatelessDrafter:
    """Everything of `protocol.Drafter` but `propose`. Subclass it with a frozen dataclass."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """None: it does not look at the target's features."""
        return ()

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> tuple[()]:
        """Return the empty state."""
        return ()

    def synced(self, state: tuple[()], length: jax.Array) -> jax.Array:
        """Return `length`: there is nothing to catch up on."""
        return length

    def extend(
        self,
        params: Any,
        state: tuple[()],
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> tuple[()]:
        """Return the empty state."""
        return ()

    def absorb(self, state: tuple[()], outcome: Outcome) -> tuple[()]:
        """Return the empty state."""
        return ()

    def permute_rows(self, state: tuple[()], source: jax.Array) -> tuple[()]:
        """Return the empty state."""
        return ()
