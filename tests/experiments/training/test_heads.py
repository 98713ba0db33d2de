"""The forward passes of training against the definitions of what drafts, in float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import heads
from jspec.models.medusa import MedusaParams
from tests import tiny, tiny_eagle
from tests.tiny_eagle import KINDS, VOCAB, Variant

FLOAT = jnp.dtype("float32")
STEPS = 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_eagle_head_goes_on_with_its_own_outputs(kind: Variant) -> None:
    config, params = tiny_eagle.config(kind), tiny_eagle.params(kind)
    oracle, rng = tiny_eagle.to_numpy(kind), np.random.default_rng(5)
    width = 7
    tokens = rng.integers(0, VOCAB, (2, width + STEPS))
    given = rng.normal(size=(2, width, len(config.feature_layers) * config.layer.hidden_size))
    features = jnp.asarray(given, jnp.float32)
    features = heads.fuse(config, params, features, FLOAT)
    past: heads.Pair | None = None
    own: tuple[heads.Pair, ...] = ()
    outputs = []
    for step in range(STEPS):
        following = jnp.asarray(tokens[:, step : step + width])
        embedded = jnp.take(params.embedding, following, axis=0)
        features, mine = heads.eagle_step(config, params, embedded, features, past, own, FLOAT)
        past, own = (mine, ()) if past is None else (past, (*own, mine))
        outputs.append(np.asarray(features))
    logits = np.asarray(heads.eagle_logits(config, params, features, FLOAT))
    for row in range(2):
        entered = oracle.fused(given[row])
        for place in range(width):
            so_far = entered[: place + 1]
            for step in range(STEPS):
                taken = tokens[row, : place + 1 + step].tolist()
                output = oracle.run(taken, so_far)[-1]
                np.testing.assert_allclose(outputs[step][row, place], output, rtol=1e-4, atol=1e-4)
                so_far = np.concatenate([so_far, output[None]])
            expected = oracle.logits(so_far[-1], VOCAB)[list(oracle.vocabulary)]
            np.testing.assert_allclose(logits[row, place], expected, rtol=1e-4, atol=1e-4)


def test_a_model_gives_its_own_logits() -> None:
    params = tiny_eagle.TARGET.params
    tokens = np.random.default_rng(6).integers(0, VOCAB, (2, 9))
    embedded = jnp.take(params.embedding, jnp.asarray(tokens), axis=0)
    hidden = heads.transformer_hidden(tiny_eagle.CONFIG, params, embedded, FLOAT)
    head = params.embedding if params.head is None else params.head
    logits = np.asarray(heads.product(hidden, head, FLOAT))
    oracle = tiny.to_numpy(tiny_eagle.CONFIG, params)
    for row in range(2):
        expected, _ = oracle.run(tokens[row].tolist())
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_a_medusa_head_is_its_blocks_one_after_another() -> None:
    rng = np.random.default_rng(7)
    weights, biases = rng.normal(size=(3, 2, 6, 6)), rng.normal(size=(3, 2, 6))
    x = rng.normal(size=(1, 4, 6))
    params = MedusaParams(jnp.float32(weights), jnp.float32(biases), None, None)
    for head in range(3):
        found = heads.medusa_hidden(params, jnp.float32(x), head, FLOAT)
        expected = x
        for block in range(2):
            inner = expected @ weights[head, block].T + biases[head, block]
            expected = expected + inner / (1 + np.exp(-inner))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_products_gradients(dtype: str) -> None:
    rng = np.random.default_rng(8)
    x, weight = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 2, 5))
    slope = rng.normal(size=(2, 3, 4))

    def total(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(heads.product(x, weight, jnp.dtype(dtype)) * jnp.float32(slope))

    of_x, of_weight = jax.grad(total, (0, 1))(jnp.float32(x), jnp.float32(weight))
    flat = weight.reshape(4, 5)
    rough = 1e-5 if dtype == "float32" else 0.05
    np.testing.assert_allclose(of_x, slope @ flat, rtol=rough, atol=rough)
    expected = np.einsum("nwo,nwi->oi", slope, x).reshape(weight.shape)
    np.testing.assert_allclose(of_weight, expected, rtol=rough, atol=rough)
