"""The sampling transforms in float64, by sorting: temperature, top-k, top-p, min-p in that order.

Each works on what the one before left, renormalised, and tokens tied with the last one kept are
kept too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Transforms(NamedTuple):
    """One row's parameters; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def _softmax(scores: np.ndarray) -> np.ndarray:
    weight = np.exp(scores - scores.max())
    return weight / weight.sum()


def _lower(score: float, slack: float) -> float:
    """Return the score that rounding may have turned into `score`."""
    return score - max(slack, 0.0) * (1 + abs(score)) if score > -np.inf else score


def support(logits: np.ndarray, row: Transforms, slack: float = 0.0) -> np.ndarray:
    """Return [V] bool: tokens that may be drawn.

    Args:
        logits: [V], at least one of them finite.
        row: transforms.
        slack: by how much every threshold is moved, relative for scores and absolute for masses;
            positive keeps more. A set that is the same for both signs is beyond rounding's reach.
    """
    logits = np.asarray(logits, np.float64)
    if row.temperature == 0:
        return np.arange(logits.size) == np.argmax(logits)
    scores = (logits - logits.max()) / np.float64(np.float32(row.temperature))
    kept = np.ones(logits.size, bool)
    if 0 < row.top_k < logits.size:
        kept = scores >= _lower(np.sort(scores)[::-1][row.top_k - 1], slack)
    top_p = np.float64(np.float32(row.top_p))
    if top_p < 1:
        left = np.sort(np.where(kept, scores, -np.inf))[::-1]
        reached = np.cumsum(_softmax(left)) >= top_p + slack
        # A mass that the sum never reaches is everything.
        kept &= scores >= _lower(left[int(np.argmax(reached)) if reached.any() else -1], slack)
    ratio = np.exp(np.where(kept, scores, -np.inf))  # the largest is 1
    kept &= ratio >= np.float64(np.float32(row.min_p)) * (1 - slack)
    return kept & (logits > -np.inf)


def law(logits: np.ndarray, row: Transforms) -> np.ndarray:
    """Return [V] float64 probabilities."""
    if row.temperature == 0:
        return support(logits, row).astype(np.float64)
    logits = np.asarray(logits, np.float64)
    scores = (logits - logits.max()) / np.float64(np.float32(row.temperature))
    return _softmax(np.where(support(logits, row), scores, -np.inf))


def laws(logits: np.ndarray, row: Transforms) -> np.ndarray:
    """Return `law` along the last axis of [..., V]."""
    flat = np.asarray(logits).reshape(-1, np.shape(logits)[-1])
    return np.stack([law(one, row) for one in flat]).reshape(np.shape(logits))


def is_borderline(logits: np.ndarray, row: Transforms, slack: float = 1e-5) -> bool:
    """Say whether float32 rounding could change the support anywhere in [..., V]."""
    flat = np.asarray(logits).reshape(-1, np.shape(logits)[-1])
    return any((support(one, row, slack) != support(one, row, -slack)).any() for one in flat)
