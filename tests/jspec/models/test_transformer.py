"""The transformer against Llama written in float64 NumPy from the definitions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.config import ModelConfig, RopeConfig
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from jspec.trees import Topology
from tests import tiny

LLAMA3 = RopeConfig(
    theta=1000.0,
    scaling="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_context=32,
)
CONFIGS = {
    "untied": tiny.CONFIG,
    "tied": dataclasses.replace(tiny.CONFIG, tie_embeddings=True, norm_eps=1e-2),
    "biases": dataclasses.replace(tiny.CONFIG, attention_bias=True, num_kv_heads=1),
    "linear": dataclasses.replace(
        tiny.CONFIG, rope=RopeConfig(theta=50.0, scaling="linear", factor=3.0), num_kv_heads=4
    ),
    # The heads together are wider than the model, as in some families.
    "llama3": dataclasses.replace(tiny.CONFIG, rope=LLAMA3, head_dim=16, num_layers=3),
}
CAPACITY = 64


@functools.partial(jax.jit, static_argnames=("config",))
def run(
    config: ModelConfig,
    params: TransformerParams,
    tokens: jax.Array,
    cache: KVCache,
    topology: Topology,
) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
    """Return logits [B, T, V], the cache and every layer's features [D, B * T]."""
    model = Transformer(config)
    layers = tuple(range(config.num_layers + 1))
    hidden, cache, features = model.forward(params, tokens, cache, topology, layers)
    return model.logits(params, hidden).reshape(*tokens.shape, -1), cache, features


def empty(config: ModelConfig, rows: int) -> KVCache:
    return Transformer(config).init_cache(rows, CAPACITY, jnp.float32)


def ids(*rows: list[int]) -> jax.Array:
    return jnp.array(rows, jnp.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_features(name: str) -> None:
    config = CONFIGS[name]
    params = tiny.params(config, seed=3, spread=0.1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size=40)
    logits, _, features = run(config, params, ids(list(tokens)), empty(config, 1), trees.chain(39))
    expected, residuals = tiny.to_numpy(config, params).run(tokens)
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-4)
    assert logits.dtype == jnp.float32
    assert len(features) == config.num_layers + 1
    for found, residual in zip(features[:-1], residuals, strict=True):
        np.testing.assert_allclose(found.T, residual, rtol=1e-4, atol=1e-4)
    # After the last layer's comes the normed output, which the head reads.
    head = params.embedding if params.head is None else params.head
    np.testing.assert_allclose(features[-1].T @ head.T, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["biases", "llama3"])
def test_token_by_token_through_the_cache(name: str) -> None:
    config = CONFIGS[name]
    params = tiny.params(config, seed=4, spread=0.1)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, size=12)
    expected, _ = tiny.to_numpy(config, params).run(tokens)
    cache = empty(config, 1)
    for position, token in enumerate(tokens):
        logits, cache, _ = run(config, params, ids([int(token)]), cache, trees.chain(0))
        cache = kv.commit(cache, jnp.ones(1, jnp.int32))
        np.testing.assert_allclose(logits[0, 0], expected[position], rtol=1e-4, atol=1e-4)


def test_rows_of_different_lengths_do_not_see_each_other() -> None:
    config = CONFIGS["untied"]
    params = tiny.params(config, seed=5)
    reference = tiny.to_numpy(config, params)
    rng = np.random.default_rng(2)
    rows = [list(map(int, rng.integers(0, config.vocab_size, size=n))) for n in (3, 9, 1)]
    width = 8  # the second row needs a second step; padding is whatever
    cache = empty(config, 3)
    done = [0, 0, 0]
    while any(done[i] < len(row) for i, row in enumerate(rows)):
        counts = [min(width, len(row) - done[i]) for i, row in enumerate(rows)]
        parts = [
            row[done[i] : done[i] + n] for i, (row, n) in enumerate(zip(rows, counts, strict=True))
        ]
        padded = ids(*[part + [60] * (width - len(part)) for part in parts])
        logits, cache, _ = run(config, params, padded, cache, trees.chain(width - 1))
        cache = kv.commit(cache, jnp.array(counts, jnp.int32))
        for i, row in enumerate(rows):
            expected = reference.run(row)[0][done[i] : done[i] + counts[i]]
            np.testing.assert_allclose(logits[i, : counts[i]], expected, rtol=1e-4, atol=1e-4)
            done[i] += counts[i]
    assert list(cache.length) == [3, 9, 1]


def test_each_node_of_a_tree_is_its_root_path_run_as_a_sequence() -> None:
    config = CONFIGS["llama3"]
    params = tiny.params(config, seed=6, spread=0.1)
    reference = tiny.to_numpy(config, params)
    parents = (-1, 0, 0, 1, 1, 2, 5, 3)
    topology = trees.from_parents(parents)
    rng = np.random.default_rng(3)
    prefixes = [list(map(int, rng.integers(0, 61, size=n))) for n in (0, 5)]
    nodes = rng.integers(0, 61, size=(2, len(parents)))
    cache = empty(config, 2)
    padded = ids(*[prefix + [0] * (5 - len(prefix)) for prefix in prefixes])
    _, cache, _ = run(config, params, padded, cache, trees.chain(4))
    cache = kv.commit(cache, jnp.array([0, 5], jnp.int32))
    logits, after, features = run(config, params, jnp.asarray(nodes, jnp.int32), cache, topology)
    assert list(after.length) == [0, 5]  # the nodes are scratch until committed
    for row, prefix in enumerate(prefixes):
        for node in range(len(parents)):
            path: list[int] = []
            at = node
            while at >= 0:
                path.insert(0, int(nodes[row, at]))
                at = parents[at]
            expected, residuals = reference.run(prefix + path)
            np.testing.assert_allclose(logits[row, node], expected[-1], rtol=1e-4, atol=1e-4)
            column = row * len(parents) + node
            np.testing.assert_allclose(
                features[1][:, column], residuals[1][-1], rtol=1e-4, atol=1e-4
            )


def test_an_unusable_draft_spoils_its_descendants_alone() -> None:
    config = CONFIGS["untied"]
    params = tiny.params(config)
    ill = dataclasses.replace(params, embedding=params.embedding.at[7].set(jnp.nan))
    topology = trees.from_parents((-1, 0, 0, 1, 2, 3))
    tokens = ids([3, 7, 4, 5, 6, 8])  # nodes 1, 3 and 5 are or follow token 7
    logits, cache, _ = run(config, ill, tokens, empty(config, 1), topology)
    expected, _, _ = run(config, params, tokens, empty(config, 1), topology)
    for node in (0, 2, 4):
        np.testing.assert_array_equal(logits[0, node], expected[0, node])
    for node in (1, 3, 5):
        assert jnp.isnan(logits[0, node]).all()
    # Not committed, it is overwritten by the next pass and leaves no trace.
    cache = kv.commit(cache, jnp.ones(1, jnp.int32))
    logits, _, _ = run(config, ill, ids([4]), cache, trees.chain(0))
    reference, _ = tiny.to_numpy(config, params).run([3, 4])
    np.testing.assert_allclose(logits[0, 0], reference[-1], rtol=1e-4, atol=1e-4)


def test_padding_ids_have_no_probability() -> None:
    whole = CONFIGS["tied"]
    padded = dataclasses.replace(whole, token_count=50)
    params = tiny.params(whole)
    tokens = ids([1, 2, 3])
    logits, _, _ = run(padded, params, tokens, empty(padded, 1), trees.chain(2))
    expected, _ = tiny.to_numpy(whole, params).run([1, 2, 3])
    assert (logits[0, :, 50:] == -jnp.inf).all()
    np.testing.assert_allclose(logits[0, :, :50], expected[:, :50], rtol=1e-4, atol=1e-4)


def test_bfloat16_accumulates_in_float32() -> None:
    config = CONFIGS["untied"]
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params(config, seed=8))
    cache = Transformer(config).init_cache(1, CAPACITY, jnp.bfloat16)
    tokens = np.random.default_rng(5).integers(0, 61, size=30)
    logits, cache, features = run(config, params, ids(list(tokens)), cache, trees.chain(29))
    assert logits.dtype == jnp.float32
    assert cache.keys[0].dtype == features[0].dtype == jnp.bfloat16
    expected, _ = tiny.to_numpy(config, params).run(tokens)
    # bfloat16 keeps 8 bits; the logits here have a spread of about 1.
    assert float(np.abs(np.asarray(logits[0]) - expected).max()) < 0.12
    assert float(np.abs(np.asarray(logits[0]) - expected).mean()) < 0.02
