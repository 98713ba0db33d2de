"""Sequences put together for a step of training: alike in length, in an order drawn anew each time.

The order follows from seed and epoch alone, so that a run that goes on later sees the same batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from experiments.training.features import Features
from experiments.training.losses import Batch

# Tokens a row; rows are cut to the last of them.
WIDTHS = (128, 256, 384, 512)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Conversations of several shards.

    Attributes:
        shards: their features.
        rows: [M, 2] int32, shard and row of each conversation.
        length: [M] int32.
    """

    shards: Sequence[Features]
    rows: np.ndarray
    length: np.ndarray

    @property
    def total(self) -> int:
        """Tokens."""
        return int(self.length.sum())


def corpus(shards: Sequence[Features]) -> Corpus:
    """Return all conversations of some shards."""
    rows = [
        (shard, row) for shard, features in enumerate(shards) for row in range(len(features.length))
    ]
    length = np.concatenate([features.length for features in shards])
    return Corpus(shards, np.array(rows, np.int32), length)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One batch: `rows` of a corpus, each in a window of `width` tokens; -1 is no row."""

    width: int
    rows: np.ndarray


def plan(source: Corpus, tokens: int, seed: int, epoch: int) -> list[Plan]:
    """Return the batches of one pass over a corpus.

    Args:
        source: what is passed over.
        tokens: of a batch, padding included.
        seed: of the order.
        epoch: number of the pass.
    """
    random = np.random.default_rng((seed, epoch))
    place = np.searchsorted(WIDTHS, np.minimum(source.length, WIDTHS[-1]))
    plans = []
    for index, width in enumerate(WIDTHS):
        members = random.permutation(np.flatnonzero(place == index))
        count = max(1, tokens // width)
        for begin in range(0, len(members), count):
            rows = np.full(count, -1, np.int64)
            chosen = members[begin : begin + count]
            rows[: len(chosen)] = chosen
            plans.append(Plan(width, rows))
    return [plans[index] for index in random.permutation(len(plans))]


def gather(
    source: Corpus, batch: Plan, vocabulary: np.ndarray, vocab_size: int, prompt_weight: float
) -> Batch:
    """Return a batch as arrays on the host.

    Args:
        source: where from.
        batch: which rows.
        vocabulary: [Vd], ids that can be proposed.
        vocab_size: V.
        prompt_weight: what guessing a token of a prompt counts; one of an answer counts 1.
    """
    place = np.full(vocab_size, -1, np.int32)
    place[vocabulary] = np.arange(len(vocabulary), dtype=np.int32)
    count, width = len(batch.rows), batch.width
    first = source.shards[0]
    tokens = np.zeros((count, width), np.int32)
    weight = np.zeros((count, width), np.float32)
    layers = np.zeros((count, width, first.layers.shape[1]), ml_dtypes.bfloat16)
    final = np.zeros((count, width, first.final.shape[1]), ml_dtypes.bfloat16)
    log_z = np.zeros((count, width), np.float32)
    best = np.full((count, width), -1, np.int32)
    for row, chosen in enumerate(batch.rows):
        if chosen < 0:
            continue
        shard, index = source.rows[chosen]
        features = source.shards[shard]
        size = min(int(features.length[index]), width)
        part = slice(int(features.start[index]), int(features.start[index]) + size)
        tokens[row, :size] = features.tokens[part]
        layers[row, :size] = features.layers[part]
        final[row, :size] = features.final[part]
        log_z[row, :size] = features.log_z[part]
        best[row, :size] = place[features.best[part]]
        weight[row, :size] = prompt_weight
        weight[row, int(features.answer[index]) : size] = 1.0
    return Batch(tokens, weight, layers, final, log_z, best)
