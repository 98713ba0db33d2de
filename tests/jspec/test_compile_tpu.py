"""The whole chunk compiled for a TPU v5e, where libtpu is installed; no TPU is needed."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.config import ModelConfig, RopeConfig, SpeculationConfig
from jspec.drafting.ngram import ngram
from jspec.generation import Decoder, run_chunk
from jspec.model import Model
from jspec.models import parameters
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests.oracles import hlo

# SmolLM2-135M's shapes, four layers of it.
CONFIG = ModelConfig(
    name="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=2048,
    rope=RopeConfig(theta=1e5),
    tie_embeddings=True,
)
GAMMA = 7
ROWS = 1


@functools.cache
def chip() -> jax.Device:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed; in the checkout, pip install '.[compile-tpu]'")
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
        )
    except (RuntimeError, jax.errors.JaxRuntimeError) as error:
        pytest.skip(f"libtpu cannot describe a v5e here: {error}")
    return described.devices[0]


@functools.cache
def compiled() -> tuple[Any, Any]:
    """Return the chunk compiled for the chip, and its abstract state."""
    sharding = jax.sharding.SingleDeviceSharding(chip())

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    params = parameters.abstract(CONFIG, jnp.bfloat16)
    model = Model("smollm2-4l", CONFIG, params, None, (2,))
    decoder = Decoder(model, ngram(), SpeculationConfig(GAMMA), batch_size=ROWS)
    asked = [Request((1, 2, 3), SamplingParams(max_new_tokens=630, seed=1))] * ROWS
    state = jax.eval_shape(lambda: decoder.new_state(asked))
    with jax.default_matmul_precision("default"):
        lowered = run_chunk.trace(
            program=decoder._program,
            params=placed(params),
            drafter_params=(),
            state=placed(state),
            max_rounds=placed(jax.ShapeDtypeStruct((), jnp.int32)),
            until_finish=placed(jax.ShapeDtypeStruct((), jnp.bool_)),
        ).lower(lowering_platforms=("tpu",))
        return lowered.compile(), state


def test_caches_are_donated_and_scratch_is_small() -> None:
    chunk, state = compiled()
    memory = chunk.memory_analysis()
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    rest = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) - caches
    print(
        f"TPU v5e, compiled only: {memory.alias_size_in_bytes} bytes aliased (caches {caches}), "
        f"{memory.temp_size_in_bytes} scratch, {memory.argument_size_in_bytes} arguments"
    )
    # Small arrays of the state are padded to whole tiles; caches are not.
    assert caches <= memory.alias_size_in_bytes <= caches + rest + 32 * 4096
    # The logits and the sampler's intermediates of 8 nodes are the largest scratch there is.
    logits = ROWS * (GAMMA + 1) * CONFIG.vocab_size * 4
    assert memory.temp_size_in_bytes < 8 * logits


def test_no_cache_is_copied_in_a_round() -> None:
    chunk, state = compiled()
    sizes = {leaf.size for leaf in state.cache.keys}
    copies = [
        write
        for write in hlo.loop_writes(chunk.as_text())
        if write.op in ("copy", "transpose") and write.size in sizes
    ]
    assert copies == []


def test_no_weight_is_laid_out_anew_in_a_round() -> None:
    chunk, _ = compiled()
    weights = jax.tree.leaves(parameters.abstract(CONFIG, jnp.bfloat16))
    sizes = {leaf.size for leaf in weights if leaf.ndim > 1}
    copies = [
        write
        for write in hlo.loop_writes(chunk.as_text())
        if write.op in ("copy", "transpose", "convert") and write.size in sizes
    ]
    assert copies == []
