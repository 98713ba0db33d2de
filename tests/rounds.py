"""What a state's trace says about one row, as the host counts it."""

from __future__ import annotations

import jax
import numpy as np

from jspec import trace
from jspec.metrics import Counts
from jspec.state import DecodeState


def counted(state: DecodeState, start: int, row: int = 0, gamma: int = 5) -> Counts:
    """Return the counts of the tokens that row `row` committed from slot `start` on."""
    length = int(state.length[row])
    return trace.counts(jax.device_get(state.trace), row, start, length, length, gamma)


def cells(counts: Counts) -> dict[tuple[int, int], int]:
    """Return rounds by (proposed, accepted)."""
    table = counts.histogram
    return {(int(i), int(j)): int(table[i, j]) for i, j in zip(*np.nonzero(table), strict=True)}
