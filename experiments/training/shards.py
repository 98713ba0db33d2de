"""Shards of features on disk: read where they are looked at, and split into two parts."""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from experiments.training.batches import Corpus
from experiments.training.features import Features

_DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32}
_SAMPLED = 256  # conversations whose features' sizes are looked at
_BEGINNING = 4  # tokens of each that are not
_LEAST_SQUARE = 1e-12
_HELD_OUT = 20  # one conversation of so many is not trained on


def mapped(path: Path) -> Features:
    """Return a shard of features, of which only what is looked at is read from disk."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8 : 8 + size])

    def array(name: str) -> np.ndarray[Any, Any]:
        entry = header[name]
        shape = tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        begin = 8 + size + entry["data_offsets"][0]
        return np.frombuffer(memory, _DTYPES[entry["dtype"]], count, begin).reshape(shape)

    return Features(**{field.name: array(field.name) for field in dataclasses.fields(Features)})


def tokens(corpus: Corpus, index: int) -> np.ndarray[Any, Any]:
    """Return the tokens [T] of a conversation."""
    shard, row = corpus.rows[index]
    features = corpus.shards[int(shard)]
    begin = int(features.start[row])
    return features.tokens[begin : begin + int(features.length[row])]


def answer(corpus: Corpus, index: int) -> int:
    """Return where in a conversation the answer begins."""
    shard, row = corpus.rows[index]
    return int(corpus.shards[int(shard)].answer[row])


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Return what is trained on, and the conversations that are measured on and never trained on.

    Which these are follows from shard and row alone, so they stay so when shards are added.
    """
    shard, row = corpus.rows.T
    held = (shard + row) % _HELD_OUT == 0
    return _those(corpus, ~held), _those(corpus, held)


def without(corpus: Corpus, shares: Callable[[np.ndarray[Any, Any]], bool]) -> tuple[Corpus, int]:
    """Return the conversations of whose tokens `shares` is false, and the number of others."""
    kept = np.array([not shares(tokens(corpus, i)) for i in range(len(corpus.rows))], bool)
    return _those(corpus, kept), int((~kept).sum())


def counts(corpus: Corpus, vocab_size: int) -> np.ndarray[Any, Any]:
    """Return how often each token [V] comes in a corpus, and how often the target would say it."""
    found = np.zeros(vocab_size, np.int64)
    for shard, row in corpus.rows:
        features = corpus.shards[int(shard)]
        begin = int(features.start[row])
        part = slice(begin, begin + int(features.length[row]))
        found += np.bincount(features.tokens[part], minlength=vocab_size)
        found += np.bincount(features.best[part], minlength=vocab_size)
    return found


def sizes(corpus: Corpus) -> np.ndarray[Any, Any]:
    """Return the root mean square [F * D] of each feature of the layers kept, over a sample.

    Beginnings of rows are left out: a text's first token has features a thousandfold larger.
    """
    squares, seen = np.zeros(corpus.shards[0].layers.shape[1], np.float64), 0
    for shard, row in corpus.rows[:: max(1, len(corpus.rows) // _SAMPLED)]:
        features = corpus.shards[int(shard)]
        begin, length = int(features.start[row]), int(features.length[row])
        part = features.layers[begin + _BEGINNING : begin + length].astype(np.float32)
        squares += np.sum(part * part, axis=0, dtype=np.float64)
        seen += len(part)
    if not seen:
        return np.ones_like(squares, np.float32)
    return np.sqrt(squares / seen + _LEAST_SQUARE).astype(np.float32)


def _those(corpus: Corpus, mask: np.ndarray[Any, Any]) -> Corpus:
    return Corpus(corpus.shards, corpus.rows[mask], corpus.length[mask])
