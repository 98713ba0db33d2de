"""Bias, penalties and forbidden tokens, one node at a time in plain Python and float64.

The history is spelled out: the prompt, then every token generated before the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Wishes(NamedTuple):
    """What one request asks for; the defaults change nothing."""

    bias: Mapping[int, float] = {}
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bad_words: Sequence[Sequence[int]] = ()
    min_new: int = 0
    stops: Sequence[int] = ()


def edited(
    logits: np.ndarray, wishes: Wishes, prompt: Sequence[int], generated: Sequence[int]
) -> np.ndarray:
    """Return [V] float64 logits of the token that follows prompt and generated tokens."""
    scores = [float(value) for value in logits]
    for token, value in wishes.bias.items():
        scores[token] += value
    for token in {*prompt, *generated}:
        if scores[token] > 0:
            scores[token] /= wishes.repetition
        else:
            scores[token] *= wishes.repetition
    for token, count in Counter(generated).items():
        scores[token] -= wishes.frequency * count + wishes.presence
    text = [*prompt, *generated]
    for word in wishes.bad_words:
        head = list(word[:-1])
        if len(head) <= len(text) and text[len(text) - len(head) :] == head:
            scores[word[-1]] = -np.inf
    if len(generated) < wishes.min_new:
        for token in wishes.stops:
            scores[token] = -np.inf
    return np.array(scores)
