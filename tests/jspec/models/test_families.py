"""Every family against logits of Hugging Face transformers, loaded from its checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import checkpoints, trees
from jspec.cache import KVCache
from jspec.config import ModelConfig, RopeConfig, SpeculationConfig
from jspec.drafting.ngram import ngram
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.model import Model
from jspec.models.parameters import TransformerParams, named
from jspec.models.transformer import Transformer
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.trees import Topology
from tests import tiny
from tests.oracles import families

CAPACITY = 64


@functools.cache
def loaded(name: str, dtype: str = "float32") -> checkpoints.Checkpoint:
    return checkpoints.load(families.directory(name), dtype)


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def run(
    config: ModelConfig,
    params: TransformerParams,
    tokens: jax.Array,
    cache: KVCache,
    topology: Topology,
) -> tuple[jax.Array, KVCache]:
    """Return the logits [B, T, V] and the cache."""
    model = Transformer(config)
    hidden, cache, _ = model.forward(params, tokens, cache, topology)
    return model.logits(params, hidden).reshape(*tokens.shape, -1), cache


compiled = jax.jit(run, static_argnames=("config",))


def in_steps(
    config: ModelConfig, params: TransformerParams, tokens: np.ndarray, width: int
) -> np.ndarray:
    """Return the logits after every token, `width` tokens a compiled pass."""
    cache = Transformer(config).init_cache(1, CAPACITY, params.final_norm.dtype)
    found = []
    for start in range(0, len(tokens), width):
        row = jnp.asarray(tokens[None, start : start + width])
        logits, cache = compiled(config, params, row, cache, trees.chain(row.shape[1] - 1))
        cache = kv.commit(cache, jnp.full(1, row.shape[1], jnp.int32))
        found.append(np.asarray(logits[0]))
    return np.concatenate(found)


def at_once(
    config: ModelConfig, params: TransformerParams, *sequences: np.ndarray
) -> list[np.ndarray]:
    """Return the logits after every token of each sequence, of one pass, operation by operation.

    Nothing is compiled as a whole, so that many configurations take little time.
    """
    rows = np.zeros((len(sequences), CAPACITY), np.int32)  # later tokens change nothing
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens
    cache = Transformer(config).init_cache(len(rows), CAPACITY, params.final_norm.dtype)
    logits, _ = run(config, params, jnp.asarray(rows), cache, trees.chain(CAPACITY - 1))
    return [np.asarray(row[: len(tokens)]) for row, tokens in zip(logits, sequences, strict=True)]


@pytest.mark.parametrize("width", [40, 5, 1])
@pytest.mark.parametrize("name", families.NAMES)
def test_logits_of_transformers(name: str, width: int) -> None:
    checkpoint, golden = loaded(name), families.golden(name)
    found = in_steps(checkpoint.config, checkpoint.params, golden.tokens, width)
    error = np.abs(found - golden.logits)
    print(f"{name} in steps of {width}: {error.max():.2e}")
    assert error.max() < 1e-4
    assert (error / np.abs(golden.logits).max()).max() < 1e-4


# What each tiny checkpoint is there for: without it, the logits are others.
FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"windows": ()}),
    ("qwen2", {"windows": (7, 7, 7)}),
    ("qwen3", {"qk_norm": False}),
    ("qwen3", {"rope": RopeConfig(1000.0)}),
    ("mistral", {"windows": ()}),
    ("mistral", {"windows": (5, 6)}),
    ("gemma2", {"windows": ()}),
    ("gemma2", {"windows": (None, 6, None, 6)}),
    ("gemma2", {"activation": "silu"}),
    ("gemma2", {"norm_unit_offset": False}),
    ("gemma2", {"post_norms": False}),
    ("gemma2", {"embedding_scale": None}),
    ("gemma2", {"attention_scale": None}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"logit_softcap": None}),
    ("gemma3", {"windows": ()}),
    ("gemma3", {"local_rope": None}),
    ("gemma3", {"rope": RopeConfig(5000.0)}),
    ("gemma3", {"qk_norm": False}),
]
OPTIONAL = {"qk_norm": ("q_norm", "k_norm"), "post_norms": ("post_attention_norm", "post_mlp_norm")}


@pytest.mark.parametrize(("name", "change"), FEATURES)
def test_every_feature_matters(name: str, change: dict[str, Any]) -> None:
    golden = families.golden(name)
    config, params = loaded(name).config, loaded(name).params
    assert getattr(config, next(iter(change))) != next(iter(change.values()))
    gone = dict.fromkeys(OPTIONAL.get(next(iter(change)), ()))
    layers = tuple(dataclasses.replace(layer, **gone) for layer in params.layers)
    params = dataclasses.replace(params, layers=layers)
    (found,) = at_once(dataclasses.replace(config, **change), params, golden.tokens)
    assert np.abs(found - golden.logits).max() > 1e-2


@pytest.mark.parametrize("name", families.NAMES)
def test_biases_and_norms_are_not_neutral(name: str) -> None:
    for path, leaf in named(loaded(name).params).items():
        if path.endswith(("norm", "bias")):
            assert float(jnp.std(leaf)) > 0.1, path


@pytest.mark.parametrize("name", families.NAMES)
def test_bfloat16_stays_near(name: str) -> None:
    checkpoint, golden = loaded(name, "bfloat16"), families.golden(name)
    (found,) = at_once(checkpoint.config, checkpoint.params, golden.tokens)
    # 8 bits, and up to seven layers of large random weights.
    assert np.abs(found - golden.logits).mean() < 0.05 * np.abs(golden.logits).max()


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3"])
def test_each_node_of_a_tree_is_its_root_path_run_as_a_sequence(name: str) -> None:
    # Deeper than every window, so that ancestors fall out of it; siblings have later slots.
    parents = (-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 9, 10, 12, 13, 14)
    checkpoint = loaded(name)
    config, params = checkpoint.config, checkpoint.params
    rng = np.random.default_rng(7)
    prefix = rng.integers(0, config.vocab_size, size=9)
    nodes = rng.integers(0, config.vocab_size, size=len(parents))
    cache = Transformer(config).init_cache(1, CAPACITY, jnp.float32)
    _, cache = run(config, params, jnp.asarray(prefix[None], jnp.int32), cache, trees.chain(8))
    cache = kv.commit(cache, jnp.full(1, 9, jnp.int32))
    topology = trees.from_parents(parents)
    logits, _ = run(config, params, jnp.asarray(nodes[None], jnp.int32), cache, topology)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if node else ()), int(nodes[node])])
    expected = at_once(config, params, *(np.array([*prefix, *path]) for path in paths))
    for node, row in enumerate(expected):
        np.testing.assert_allclose(logits[0, node], row[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_speculative_greedy_is_plain_greedy(name: str) -> None:
    checkpoint = loaded(name)
    model = Model(name, checkpoint.config, checkpoint.params, None, ())
    tokens = families.golden(name).tokens.tolist()
    params = SamplingParams(max_new_tokens=24)
    requests = [Request(tuple(tokens[:size]) * 2, params) for size in (1, 4, 11)]
    plain, drafted = (
        Decoder(model, drafter, SpeculationConfig(gamma), batch_size=3).generate(requests)
        for drafter, gamma in ((None, 0), (ngram(), 4))
    )
    assert [row.token_ids for row in drafted] == [row.token_ids for row in plain]
    # Greedy tokens are those of the whole sequence run at once, too.
    sequences = [
        np.array([*request.token_ids, *row.token_ids])
        for request, row in zip(requests, plain, strict=True)
    ]
    expected = at_once(checkpoint.config, checkpoint.params, *sequences)
    for request, row, logits in zip(requests, plain, expected, strict=True):
        start = len(request.token_ids) - 1
        assert tuple(logits[start:-1].argmax(axis=-1).tolist()) == tuple(row.token_ids)


def test_a_window_that_no_row_can_outgrow_costs_nothing() -> None:
    config, params = loaded("mistral").config, loaded("mistral").params
    row, topology = jnp.zeros((1, 4), jnp.int32), trees.chain(3)

    def program(windows: tuple[int | None, ...]) -> str:
        changed = dataclasses.replace(config, windows=windows)
        cache = Transformer(changed).init_cache(1, 32, jnp.float32)
        return compiled.lower(changed, params, row, cache, topology).as_text()

    assert program((32, 40)) == program(())
    assert program((31, 40)) != program(())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"windows": (4,)}, "windows"),
        ({"windows": (4, 0)}, "windows"),
        ({"attention_softcap": 0.0}, "attention_softcap"),
        ({"logit_softcap": -1.0}, "logit_softcap"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"attention_scale": 0.0}, "attention_scale"),
        ({"activation": "relu"}, "activation"),
    ],
)
def test_configs_that_make_no_sense(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        dataclasses.replace(loaded("mistral").config, **change)
    assert caught.value.field == field
