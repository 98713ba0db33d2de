"""Exact laws of a round over a chain of drafts, in float64, for vocabularies small enough to list.

A table of depth n holds a distribution over V tokens for every prefix of up to n tokens:
tables[k] is [V] * k + [V]. Nothing is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def joint(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return p(x1) p(x2 | x1) ... over [V] * len(tables)."""
    law = tables[0]
    for table in tables[1:]:
        law = law[..., None] * table
    return law


class Paths(NamedTuple):
    """Every chain of 0 .. K drafts.

    Attributes:
        tokens: [N, K]; those past `drafted` are filler.
        drafted: [N], drafts in use.
    """

    tokens: np.ndarray
    drafted: np.ndarray


def all_paths(vocab: int, depth: int, filler: np.random.Generator) -> Paths:
    """List the V^d paths of every length d = 0 .. depth."""
    tokens, drafted = [], []
    for d in range(depth + 1):
        for path in itertools.product(range(vocab), repeat=d):
            rest = filler.integers(0, vocab, depth - d)
            tokens.append([*path, *rest.tolist()])
            drafted.append(d)
    count = len(drafted)
    return Paths(np.array(tokens, np.int32).reshape(count, depth), np.array(drafted, np.int32))


def along(tables: Sequence[np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Return [N, len(tables), V]: the table's row at every node of every path."""
    nodes = [table[tuple(tokens[:, :k].T)] for k, table in enumerate(tables)]
    shape = (tokens.shape[0], tables[0].shape[-1])
    return np.stack([np.broadcast_to(node, shape) for node in nodes], axis=1)


def of_drafts(laws: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return laws[n, k, tokens[n, k]] for [N, K, V] and [N, K]."""
    return np.take_along_axis(laws, tokens[..., None].astype(np.int64), axis=-1)[..., 0]


def drawing_probability(q: np.ndarray, paths: Paths) -> np.ndarray:
    """Return [N]: the chance that a drafter of law q ([N, K, V]) draws the drafts in use."""
    used = np.arange(paths.tokens.shape[1])[None, :] < paths.drafted[:, None]
    return np.where(used, of_drafts(q, paths.tokens), 1.0).prod(axis=1)


def emitted(
    target: Sequence[np.ndarray],
    tokens: np.ndarray,
    accepted: np.ndarray,
    weight: np.ndarray,
    last: np.ndarray,
) -> np.ndarray:
    """Return the joint law of K + 1 tokens: accepted drafts, the token after them, then plain p.

    Args:
        target: K + 1 tables of p.
        tokens: [M, K] drafts of each outcome.
        accepted: [M].
        weight: [M], the outcomes' probabilities.
        last: [M, V], law of the token after the accepted drafts.
    """
    vocab = target[0].shape[-1]
    total = np.zeros((vocab,) * len(target))
    for n in range(len(target)):
        rows = accepted == n
        prefix = tokens[rows, :n].astype(np.int64) @ vocab ** np.arange(n)[::-1]
        mass = np.zeros((vocab**n, vocab))
        np.add.at(mass, prefix, weight[rows, None] * last[rows])
        mass = mass.reshape((vocab,) * (n + 1))
        for table in target[n + 1 :]:
            mass = mass[..., None] * table
        total += mass
    return total


def token_coins(p: np.ndarray, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Leviathan et al. 2023: draft x passes when its coin is below p(x) / q(x), [N, K].

    Args:
        p: [N, K + 1, V].
        q: [N, K, V], positive at the drafts.
        tokens: [N, K].
    """
    return np.minimum(of_drafts(p[:, :-1], tokens) / of_drafts(q, tokens), 1.0)


def block_coins(p: np.ndarray, q: np.ndarray, paths: Paths) -> np.ndarray:
    """Sun et al. (arXiv 2403.10444), algorithm 2: h_i of every block length, [N, K].

    The longest block whose coin is below h_i is accepted. Where h_i is 0 / 0 it is nan: any value
    serves, for a longer block is accepted for certain. Blocks longer than the drafts have 0.
    """
    count, depth = paths.tokens.shape
    h = np.zeros((count, depth))
    for n in range(count):
        weight = 1.0
        for i in range(int(paths.drafted[n])):
            x = paths.tokens[n, i]
            weight = min(weight * p[n, i, x] / q[n, i, x], 1.0)
            if i + 1 == paths.drafted[n]:
                h[n, i] = weight
                break
            rest = np.maximum(weight * p[n, i + 1] - q[n, i + 1], 0.0).sum()
            whole = rest + 1.0 - weight
            h[n, i] = rest / whole if whole > 0 else np.nan
    return h
