"""What of a drafter has a closed form: the linear maps that best guess the target's features.

Least squares with a ridge, over inputs of size 1, on a sample of the training text. A drafter that
begins there drafts before its first step what a random one drafts after hundreds of thousands of
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training import batches, heads
from experiments.training.batches import Corpus
from jspec.config import ModelConfig
from jspec.models.parameters import TransformerParams

Array = np.ndarray[Any, Any]

_MOST = 120_000  # tokens of the sample
_ROWS = 8192  # tokens of a product
_BEGINNING = 4  # of a conversation's tokens, that are left out: their features are far off
_RIDGE = 1e-3
# Features of size 1 are cut here, so that no few tokens decide.
_LARGEST = 20.0


def sizes(corpus: Corpus, eps: float) -> tuple[Array, Array]:
    """Return the root mean square of each feature [D], and of the lower layers' [F * D], normed.

    Args:
        corpus: conversations, of which a sample is looked at.
        eps: of the norm.
    """
    first = corpus.shards[0]
    feature, lower = np.zeros(first.final.shape[1]), np.zeros(first.layers.shape[1])
    seen = 0
    for _, layers, final, _ in _sampled(corpus, _MOST // 8, eps):
        feature += np.sum(final * final, axis=0, dtype=np.float64)
        lower += np.sum(layers * layers, axis=0, dtype=np.float64)
        seen += len(layers)
    feature, lower = (np.sqrt(total / max(seen, 1) + 1e-12) for total in (feature, lower))
    return feature, lower


def maps(corpus: Corpus, embedding: Array, scale: dict[str, Array], eps: float) -> dict[str, Array]:
    """Return the maps that guess a feature from the one before and the token between.

    Args:
        corpus: conversations to learn from.
        embedding: [V, D].
        scale: what the maps' inputs are multiplied with: "fc" [2 * D] of embedding and feature, and
            "fuse" [L * D] of the normed features of lower layers, if they are read.
        eps: of their norm.

    Returns:
        "fc" [D, 2 * D], which guesses best where no lower layer is known, as in all drafts but the
        first; and "fuse" [D, L * D], if asked for, which adds to a feature what the lower layers
        know better.
    """
    d = embedding.shape[1]
    inputs = np.concatenate(list(scale.values()))
    gram, cross = np.zeros((len(inputs), len(inputs))), np.zeros((len(inputs), d))
    for tokens, layers, final, following in _sampled(corpus, _MOST, eps):
        parts = (
            [embedding[tokens], final, layers] if "fuse" in scale else [embedding[tokens], final]
        )
        x = np.clip(np.concatenate(parts, axis=1) * inputs, -_LARGEST, _LARGEST)
        gram += x.T @ x
        cross += x.T @ following
    few, more = slice(0, 2 * d), slice(2 * d, None)
    fc = _solved(gram[few, few], cross[few]).T
    found = {"fc": fc}
    if "fuse" in scale:
        # What lower layers then know of the next feature goes through the map of this one.
        left = cross[more] - gram[more, few] @ fc.T
        through = fc[:, d:] * scale["fc"][d:]
        gained = _solved(gram[more, more], left).T
        found["fuse"] = _solved(through.T @ through, through.T @ gained)
    return {name: found[name].astype(np.float32) for name in scale}


def last_down(
    corpus: Corpus, config: ModelConfig, params: TransformerParams, embedding: Array
) -> Array:
    """Return the last `down` [D, F] with which a small model best guesses the target's features.

    Args:
        corpus: conversations to learn from.
        config: of the small model.
        params: its layers, and the norm of the target's output; matrices float32.
        embedding: [V, D], the target's.
    """
    units_of = jax.jit(heads.before_last_down, static_argnames=("config", "dtype"))
    norm = np.asarray(params.final_norm)
    gram = np.zeros((config.intermediate_size,) * 2)
    cross = np.zeros((config.intermediate_size, config.hidden_size))
    size, seen = 0.0, 0
    vocabulary = np.zeros(0, np.int64)
    for plan in batches.plan(corpus, _ROWS, 0, 0):
        batch = batches.gather(corpus, plan, vocabulary, len(embedding), 1.0)
        known = batch.weight > 0
        known[:, :_BEGINNING] = False
        embedded = jnp.asarray(embedding[batch.tokens], jnp.float32)
        x, units = units_of(config, params, embedded, jnp.dtype("float32"))
        x, units = np.asarray(x)[known], np.asarray(units)[known]
        # The norm after it takes any size: that of what is there already leaves most of it alone.
        size = size or float(np.sqrt(np.mean(x * x)))
        wanted = batch.final.astype(np.float32)[known] / norm * size
        gram += units.T @ units
        cross += units.T @ (wanted - x)
        seen += len(x)
        if seen >= _MOST:
            break
    return _solved(gram, cross).T.astype(np.float32)


def _solved(gram: Array, cross: Array) -> Array:
    # The ridge is a share of each feature's own square: the features' units play no part.
    return np.linalg.solve(gram + _RIDGE * np.diag(np.diag(gram)), cross)


def _sampled(corpus: Corpus, most: int, eps: float) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Give places of conversations, [N] of them at a time.

    They are the tokens after them [N], normed lower layers [N, F * D], features [N, D], and the
    features after them [N, D].
    """
    every = max(1, corpus.total // most)
    d = corpus.shards[0].final.shape[1]
    waiting: list[tuple[Array, Array, Array, Array]] = []
    for shard, row in corpus.rows[::every]:
        features = corpus.shards[int(shard)]
        begin = int(features.start[row]) + _BEGINNING
        end = int(features.start[row]) + int(features.length[row]) - 1
        if end <= begin:
            continue
        layers = features.layers[begin:end].astype(np.float32)
        split = layers.reshape(len(layers), -1, d)
        split = split / np.sqrt(np.mean(split * split, axis=-1, keepdims=True) + eps)
        final = features.final[begin : end + 1].astype(np.float32)
        tokens = features.tokens[begin + 1 : end + 1]
        waiting.append((tokens, split.reshape(layers.shape), final[:-1], final[1:]))
        if sum(len(part[0]) for part in waiting) >= _ROWS:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[tuple[Array, Array, Array, Array]]) -> tuple[Array, Array, Array, Array]:
    columns = zip(*parts, strict=True)
    tokens, layers, final, following = (np.concatenate(column) for column in columns)
    return tokens, layers, final, following
