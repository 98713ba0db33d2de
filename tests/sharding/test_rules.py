from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jspec
from jspec.config import ModelConfig
from jspec.drafting.draft_model import draft_model
from jspec.models.parameters import TensorSpec, initialize
from sharding import rules

CONFIG = ModelConfig(
    name="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    max_context=128,
    tie_embeddings=True,
)


def mesh(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,))


def model(params: object) -> jspec.Model:
    return jspec.Model("tiny", CONFIG, params, None, ())  # type: ignore[arg-type]


def test_every_device_holds_its_share() -> None:
    placed = rules.shardings(CONFIG, mesh(4))
    params = jax.device_put(initialize(CONFIG, jax.random.key(0), jnp.float32), placed)
    shapes = {
        "qkv": (1, 4, 8, 32),
        "attention_out": (32, 16),
        "gate_up": (2, 12, 32),
        "down": (32, 12),
        "attention_norm": (32,),
    }
    for name, shape in shapes.items():
        for shard in getattr(params.layers[1], name).addressable_shards:
            assert shard.data.shape == shape
    assert {s.data.shape for s in params.embedding.addressable_shards} == {(16, 32)}


def test_scales_are_split_as_their_outputs() -> None:
    placed = rules.shardings(CONFIG, mesh(4), weights="int8")
    params = initialize(CONFIG, jax.random.key(0), jnp.float32, "int8")
    spread = jax.device_put(params, placed)
    shapes = {
        "qkv": ((1, 4, 8, 32), (1, 4, 8)),
        "attention_out": ((32, 16), (32,)),
        "gate_up": ((2, 12, 32), (2, 12)),
        "down": ((32, 12), (32,)),
    }
    for name, (values, scales) in shapes.items():
        matrix = getattr(spread.layers[1], name)
        assert {s.data.shape for s in matrix.values.addressable_shards} == {values}
        assert {s.data.shape for s in matrix.scales.addressable_shards} == {scales}
    assert {s.data.shape for s in spread.embedding.scales.addressable_shards} == {(16,)}
    request = jspec.Request((3, 1, 4), jspec.SamplingParams(max_new_tokens=8))
    alone, split = (jspec.Decoder(model(tree)).generate([request]) for tree in (params, spread))
    assert alone[0].token_ids == split[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_same_tokens_on_one_device_and_on_several(temperature: float) -> None:
    alone = initialize(CONFIG, jax.random.key(0), jnp.float32)
    # Sharper than a random head, so that summing in another order decides nothing.
    alone = dataclasses.replace(alone, final_norm=alone.final_norm * 4)
    spread = jax.device_put(alone, rules.shardings(CONFIG, mesh(4)))
    whole = jax.device_put(alone, rules.shardings(CONFIG, mesh(4), rules.REPLICATED))
    sampling = jspec.SamplingParams(temperature=temperature, seed=7, max_new_tokens=24)
    prompts = [[5, 9, 11], [3], [60, 2, 2, 17, 40]]
    speculation = jspec.SpeculationConfig(gamma=3)
    expected = jspec.generate(
        model(alone),
        prompts,
        drafter=draft_model(CONFIG, alone),
        sampling=sampling,
        speculation=speculation,
    )
    # The drafter is whole on every device beside a target that is split.
    found = jspec.generate(
        model(spread),
        prompts,
        drafter=draft_model(CONFIG, whole),
        sampling=sampling,
        speculation=speculation,
    )
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert len({c.token_ids for c in found}) == 3
    for leaf in jax.tree.leaves(whole):
        assert leaf.sharding.is_fully_replicated
    assert not spread.layers[0].qkv.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("spec", "mapping", "word"),
    [
        (TensorSpec((6, 4), ("heads", None)), rules.TENSOR_PARALLEL, "heads = 6"),
        (TensorSpec((8, 8), ("heads", "mlp")), rules.TENSOR_PARALLEL, "two dimensions"),
        (TensorSpec((8,), ("experts",)), rules.TENSOR_PARALLEL, "has no rule"),
        (TensorSpec((8,), ("mlp",)), {"mlp": "tensor"}, "no axis of the mesh"),
    ],
)
def test_what_cannot_be_split_is_named(spec: TensorSpec, mapping: rules.Rules, word: str) -> None:
    with pytest.raises(jspec.InputError, match=word):
        rules.partition(spec, mapping, mesh(4))


def test_counts_match_numpy() -> None:
    placed = jax.device_put(
        initialize(CONFIG, jax.random.key(1), jnp.float32), rules.shardings(CONFIG, mesh(2))
    )
    total = sum(np.asarray(leaf).size for leaf in jax.tree.leaves(placed))
    layer = 4 * 4 * 8 * 32 + 32 * 8 * 8 + 2 * 48 * 32 + 32 * 48 + 2 * 32
    assert total == 64 * 32 + 2 * layer + 32
