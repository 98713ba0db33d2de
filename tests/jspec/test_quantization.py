"""Int8 weights against NumPy's integers, from loading to decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jspec
from jspec import checkpoints, quantization
from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model, early_exit
from jspec.drafting.ngram import ngram
from jspec.errors import InputError
from jspec.models import parameters
from jspec.models.parameters import TensorSpec, TransformerParams
from jspec.quantization import Int8Matrix, Weights
from tests import tiny
from tests.oracles.tiny_checkpoints import CONFIG, random_tensors, write_huggingface

MATRICES = {"embedding", "head", "qkv", "attention_out", "gate_up", "down"}


def rows(size: int) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    numbers = st.floats(-1e4, 1e4, width=32)
    return hnp.arrays(np.float32, (3, size), elements=numbers)


@settings(max_examples=50)
@given(weight=rows(7))
def test_a_matrix_is_rounded_to_the_nearest_of_255_numbers(
    weight: np.ndarray[Any, Any],
) -> None:
    matrix = quantization.quantize_matrix(jnp.asarray(weight))
    values, scales = np.asarray(matrix.values), np.asarray(matrix.scales)
    assert values.dtype == np.int8
    assert scales.dtype == np.float32
    largest = np.abs(weight).max(axis=1).astype(np.float64)
    usual = largest > 1e-20
    np.testing.assert_allclose(scales[usual], largest[usual] / 127, rtol=1e-6)
    assert (np.abs(values).max(axis=1)[usual] == 127).all()
    error = np.abs(values * scales[:, None].astype(np.float64) - weight)
    assert (error <= (0.5 + 1e-4) * scales[:, None] + 1e-30).all()
    np.testing.assert_allclose(
        quantization.dequantize(matrix), values * scales[:, None], rtol=1e-6, atol=1e-30
    )


@settings(max_examples=50)
@given(x=rows(9))
def test_two_digits_hold_sixteen_bits_of_a_row(x: np.ndarray[Any, Any]) -> None:
    digits, scales = map(np.asarray, jax.jit(quantization.two_digits)(jnp.asarray(x)))
    assert digits.shape == (6, 9)
    assert digits.dtype == np.int8
    first, second = digits[:3].astype(np.float64), digits[3:].astype(np.float64)
    assert np.abs(digits.astype(int)).max() <= 127
    found = (first + second / 254) * scales[:, None]
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(found - x) <= largest / 60_000 + 1e-30).all()


def test_zeros_and_what_is_not_finite() -> None:
    x = jnp.array([[0.0, 0.0], [1.0, jnp.nan], [jnp.inf, 1.0], [2.0, -1.0]], jnp.float32)
    digits, scales = quantization.two_digits(x)
    assert (digits[0] == 0).all()
    assert np.isfinite(scales).tolist() == [True, False, False, True]
    matrix = quantization.quantize_matrix(x[:1])
    np.testing.assert_array_equal(quantization.dequantize(matrix), [[0.0, 0.0]])


def test_every_matrix_and_nothing_else_is_quantised() -> None:
    config = dataclasses.replace(tiny.CONFIG, attention_bias=True, qk_norm=True)
    params = parameters.initialize(config, jax.random.key(0), jnp.bfloat16)
    found = quantization.quantize(params)
    names = {}
    for name, leaf in parameters.named(found).items():
        stem, _, part = name.rpartition(".")
        if part in ("values", "scales"):
            assert leaf.dtype == (jnp.int8 if part == "values" else jnp.float32)
            names[stem.rpartition(".")[2]] = True
        else:
            assert leaf.dtype == jnp.bfloat16
    assert set(names) == MATRICES
    declared = parameters.abstract(config, jnp.bfloat16, "int8")
    ours, theirs = parameters.named(found), parameters.named(declared)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in ours.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in theirs.items()
    }
    assert quantization.is_quantized(found)
    assert not quantization.is_quantized(params)
    again = quantization.quantize(found)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, again, found))


def assert_same(found: TransformerParams, expected: TransformerParams) -> None:
    theirs = parameters.named(expected)
    assert parameters.named(found).keys() == theirs.keys()
    for name, leaf in parameters.named(found).items():
        wanted = theirs[name]
        assert leaf.dtype == wanted.dtype, name
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted), name)


def test_initial_and_loaded_weights_are_those_of_the_float32_model(tmp_path: Path) -> None:
    key = jax.random.key(3)
    drawn = parameters.initialize(tiny.CONFIG, key, jnp.float32, "int8")
    plain = parameters.initialize(tiny.CONFIG, key, jnp.float32)
    assert_same(drawn, quantization.quantize(plain))

    write_huggingface(tmp_path / "m", random_tensors(CONFIG, 0), CONFIG)
    exact = checkpoints.load(tmp_path / "m", "float32").params
    for dtype in ("float32", "bfloat16"):
        found = checkpoints.load(tmp_path / "m", dtype, weights="int8").params
        assert found.final_norm.dtype == dtype
        wanted = quantization.quantize(exact)
        same = [(found.embedding, wanted.embedding), (found.layers[1].qkv, wanted.layers[1].qkv)]
        for ours, theirs in same:
            np.testing.assert_array_equal(ours.values, theirs.values)
            np.testing.assert_array_equal(ours.scales, theirs.scales)
    with pytest.raises(InputError, match=r"weights='int4'.*int8"):
        checkpoints.load(tmp_path / "m", "float32", weights="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_model_is_saved_and_loaded_as_it_is(tmp_path: Path, dtype: str) -> None:
    params = parameters.initialize(tiny.CONFIG, jax.random.key(1), dtype, "int8")
    checkpoints.save(tmp_path / "a", tiny.CONFIG, params)
    assert_same(checkpoints.load(tmp_path / "a", dtype).params, params)


def on_two_devices(spec: TensorSpec) -> jax.sharding.NamedSharding:
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split = ["model" if axis in ("kv_heads", "mlp") else None for axis in spec.axes]
    return jax.sharding.NamedSharding(mesh, jax.P(*split))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("stored", ["same", "int8"])
def test_a_saved_model_is_loaded_as_int8(tmp_path: Path, stored: Weights, spread: bool) -> None:
    key = jax.random.key(1)
    params = parameters.initialize(tiny.CONFIG, key, jnp.float32, stored)
    checkpoints.save(tmp_path / "a", tiny.CONFIG, params)
    declared = parameters.declare(tiny.CONFIG, "int8")
    placed = jax.tree.map(on_two_devices, declared, is_leaf=parameters.is_spec) if spread else None
    found = checkpoints.load(tmp_path / "a", "float32", weights="int8", shardings=placed).params
    assert_same(found, quantization.quantize(params))
    shape = found.layers[0].qkv.scales.addressable_shards[0].data.shape
    assert shape == ((1, 4, 8) if spread else (2, 4, 8))


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def target(dtype: str, weights: str) -> jspec.Model:
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny.params())
    if weights == "int8":
        params = quantization.quantize(params)
    return dataclasses.replace(tiny.model(), name=f"{dtype}-{weights}", params=params)


def drafters(model: jspec.Model) -> dict[str, BoundDrafter]:
    near = tiny.nearby(tiny.params(), 0.05)
    return {
        "ngram": ngram(2, 1),
        "plain": draft_model(tiny.CONFIG, near),
        "int8": draft_model(tiny.CONFIG, quantization.quantize(near)),
        "early-exit": early_exit(tiny.CONFIG, model.params, 1),
    }


@pytest.mark.parametrize(
    ("dtype", "weights", "drafter"),
    [
        ("float32", "int8", "ngram"),
        ("float32", "int8", "early-exit"),
        ("float32", "same", "int8"),
        ("bfloat16", "int8", "plain"),
    ],
)
def test_greedy_speculation_gives_the_plain_tokens(dtype: str, weights: str, drafter: str) -> None:
    model = target(dtype, weights)
    sampling = jspec.SamplingParams(max_new_tokens=12)
    prompts = tiny.prompts(3)
    plain = jspec.generate(model, prompts, sampling=sampling)
    found = jspec.generate(
        model,
        prompts,
        drafter=drafters(model)[drafter],
        sampling=sampling,
        speculation=SpeculationConfig(gamma=3),
    )
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    if drafter in ("plain", "int8"):
        assert sum(c.counts.rounds for c in found) < sum(c.counts.rounds for c in plain)


def test_samples_are_reproducible() -> None:
    model = target("float32", "int8")
    sampling = jspec.SamplingParams(max_new_tokens=10, temperature=0.8, seed=5)
    one, other = (
        jspec.generate(model, tiny.prompts(3), drafter=ngram(2, 1), sampling=sampling)
        for _ in range(2)
    )
    assert [c.token_ids for c in one] == [c.token_ids for c in other]


def test_early_exit_shares_the_quantised_weights() -> None:
    model = target("float32", "int8")
    shared = early_exit(tiny.CONFIG, model.params, 1).params.model
    assert shared.embedding is model.params.embedding
    assert isinstance(shared.layers[0].qkv, Int8Matrix)
    assert shared.layers[0].qkv.values is model.params.layers[0].qkv.values


def test_the_cache_is_float32_on_a_cpu_and_can_be_chosen() -> None:
    model = target("bfloat16", "int8")
    assert model.dtype == jnp.bfloat16
    assert model.cache_dtype == jnp.float32
    described = dataclasses.replace(
        model, params=parameters.abstract(tiny.CONFIG, jnp.bfloat16, "int8")
    )
    assert described.cache_dtype == jnp.bfloat16
    decoder = jspec.Decoder(model, cache_dtype=jnp.bfloat16)
    request = jspec.Request(tiny.prompts(2)[1], jspec.SamplingParams(max_new_tokens=4))
    assert decoder.new_state([request]).cache.keys[0].dtype == jnp.bfloat16
    assert len(decoder.generate([request])[0].token_ids) == 4


def test_logits_that_are_not_finite_end_a_request() -> None:
    model = target("float32", "int8")
    broken = dataclasses.replace(model.params, final_norm=model.params.final_norm.at[0].set(np.nan))
    (found,) = jspec.generate(
        dataclasses.replace(model, params=broken),
        tiny.prompts(1),
        sampling=jspec.SamplingParams(max_new_tokens=4),
    )
    assert found.finish_reason == "error"
