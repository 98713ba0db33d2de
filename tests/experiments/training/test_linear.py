"""Linear maps of features against the law that made them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments.training import batches, heads, linear
from experiments.training.batches import Corpus
from experiments.training.features import Features
from tests import tiny

D, VOCAB, LAYERS, EPS = 4, 11, 2, 1e-5


def made(law: np.ndarray, embedding: np.ndarray, rows: int = 40, size: int = 120) -> Corpus:
    """Return conversations whose features follow a linear law, but for bfloat16's rounding."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (rows, size))
    layers = rng.normal(size=(rows, size, LAYERS, D)) * np.array([[30.0], [0.5]])
    layers = layers.astype(ml_dtypes.bfloat16).astype(np.float64)
    normed = layers / np.sqrt(np.mean(layers**2, axis=-1, keepdims=True) + EPS)
    final = rng.normal(size=(rows, size, D))
    for place in range(size - 1):
        known = (embedding[tokens[:, place + 1]], final[:, place], *normed[:, place].swapaxes(0, 1))
        final[:, place + 1] = np.concatenate(known, axis=1) @ law.T
    final[:, :4] = 1e3  # beginnings are far off, and are left out
    flat = rows * size
    features = Features(
        tokens=tokens.reshape(flat).astype(np.int32),
        start=np.arange(0, flat, size, dtype=np.int32),
        length=np.full(rows, size, np.int32),
        answer=np.zeros(rows, np.int32),
        layers=layers.reshape(flat, -1).astype(ml_dtypes.bfloat16),
        final=final.reshape(flat, -1).astype(ml_dtypes.bfloat16),
        log_z=np.zeros(flat, np.float32),
        best=np.zeros(flat, np.int32),
    )
    return batches.corpus([features])


def test_the_maps_are_those_of_the_law() -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(VOCAB, D))
    through = np.linalg.qr(rng.normal(size=(D, D)))[0] * 0.7
    of_tokens, lower = rng.normal(size=(D, D)), rng.normal(size=(D, LAYERS * D))
    corpus = made(np.concatenate([of_tokens, through, through @ lower], axis=1), embedding)
    feature, normed = linear.sizes(corpus, EPS)
    np.testing.assert_allclose(normed, 1, atol=0.1)
    rest = corpus.shards[0].final.astype(np.float64).reshape(40, -1, D)[:, 4:]
    np.testing.assert_allclose(feature, np.sqrt(np.mean(rest**2, axis=(0, 1))), rtol=0.05)

    scale = {"fc": rng.uniform(0.1, 0.5, 2 * D), "fuse": rng.uniform(0.1, 0.5, LAYERS * D)}
    found = linear.maps(corpus, embedding, scale, EPS)
    expected = np.concatenate([of_tokens, through], axis=1)
    np.testing.assert_allclose(found["fc"] * scale["fc"], expected, atol=0.1)
    np.testing.assert_allclose(found["fuse"] * scale["fuse"], lower, atol=0.1)

    del scale["fuse"]
    alone = linear.maps(corpus, embedding, scale, EPS)
    assert alone.keys() == {"fc"}
    np.testing.assert_array_equal(alone["fc"], found["fc"])


def test_the_last_down_is_the_least_squares_one() -> None:
    config = dataclasses.replace(tiny.CONFIG, num_layers=2)
    params = tiny.params(config, seed=5)
    embedding, rng = np.asarray(params.embedding), np.random.default_rng(2)
    rows, size, d = 24, 40, config.hidden_size
    tokens = rng.integers(0, config.vocab_size, (rows, size)).astype(np.int32)
    final = rng.normal(size=(rows, size, d)) + embedding[tokens] * 3
    flat = rows * size
    features = Features(
        tokens=tokens.reshape(flat),
        start=np.arange(0, flat, size, dtype=np.int32),
        length=np.full(rows, size, np.int32),
        answer=np.zeros(rows, np.int32),
        layers=np.zeros((flat, d), ml_dtypes.bfloat16),
        final=final.reshape(flat, d).astype(ml_dtypes.bfloat16),
        log_z=np.zeros(flat, np.float32),
        best=np.zeros(flat, np.int32),
    )
    down = linear.last_down(batches.corpus([features]), config, params, embedding)

    float32 = jnp.dtype("float32")
    embedded = jnp.asarray(embedding[tokens])
    parts = heads.before_last_down(config, params, embedded, float32)
    x, units = (np.asarray(part, np.float64)[:, 4:].reshape(-1, part.shape[-1]) for part in parts)
    wanted = features.final.astype(np.float64).reshape(rows, size, d)[:, 4:].reshape(-1, d)
    wanted = wanted / np.asarray(params.final_norm)
    # One size of the output, of which the norm thinks nothing, is that of the first batch's x.
    best, *_ = np.linalg.lstsq(units, wanted * np.sqrt(np.mean(x * x)) - x, rcond=None)
    np.testing.assert_allclose(down, best.T, rtol=0.05, atol=0.05 * np.abs(best).max())
