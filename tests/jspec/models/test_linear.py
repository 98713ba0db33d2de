"""Products against NumPy, and what is compiled for them on a CPU and on other platforms."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import trees
from jspec.config import ModelConfig
from jspec.models import linear, parameters
from jspec.models.transformer import Transformer
from jspec.quantization import Int8Matrix, Weights, quantize_matrix
from tests.oracles import hlo

RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


def integers(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(-127, 128, size=shape).astype(np.int8)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_int8_products_are_exact_sums_of_integers(rows: int) -> None:
    values, scales = integers(3, 4, 64), np.exp2(integers(3, 4) % 5).astype(np.float32)
    # Multiples of the scale, with 127 among them: the second digit is 0, and nothing is rounded.
    x = integers(64, rows).astype(np.float32)
    x[0] = 127
    matrix = Int8Matrix(jnp.asarray(values), jnp.asarray(scales))
    found = jax.jit(linear.matmul)(matrix, jnp.asarray(x))
    wanted = values.reshape(12, 64).astype(np.int64) @ x.astype(np.int64) * scales.reshape(12, 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found.dtype == jnp.float32
    transposed = jax.jit(linear.head)(
        Int8Matrix(matrix.values[0], matrix.scales[0]), jnp.asarray(x)
    )
    np.testing.assert_allclose(transposed, wanted[:4].T, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8"])
def test_products_match_numpy_for_any_number_of_rows(kind: str, rows: int) -> None:
    weight, x = drawn(2, 24, 48), drawn(48, rows)
    x[5] *= 30  # as the largest activations of a model are
    stored: Any = jnp.asarray(weight, "float32" if kind == "int8" else kind)
    given = jnp.asarray(x, "float32" if kind == "int8" else kind)
    exact = np.asarray(stored, np.float64).reshape(48, 48) @ np.asarray(given, np.float64)
    if kind == "int8":
        stored = quantize_matrix(stored)
        dense = np.asarray(stored.values, np.float64) * np.asarray(stored.scales)[..., None]
        exact = dense.reshape(48, 48) @ np.asarray(given, np.float64)
    found = jax.jit(linear.matmul)(stored, given)
    assert found.dtype == given.dtype
    tolerance = {"float32": 1e-5, "int8": 1e-3, "bfloat16": 2e-2, "float16": 2e-3}[kind]
    np.testing.assert_allclose(
        found.astype(jnp.float32), exact, rtol=tolerance, atol=tolerance * np.abs(exact).max()
    )
    # Scores stay float32, whatever the weights are.
    flat = jax.tree.map(lambda leaf: leaf[0], stored)
    scores = jax.jit(linear.head)(flat, given)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, exact[:24].T, rtol=1e-3, atol=1e-3 * np.abs(exact).max())


def test_a_column_does_not_depend_on_its_neighbours() -> None:
    weight = quantize_matrix(jnp.asarray(drawn(40, 64)))
    x = jnp.asarray(drawn(64, 8))
    product = jax.jit(linear.matmul)
    together = product(weight, x)
    for column in range(8):
        alone = product(weight, x[:, column : column + 1])
        np.testing.assert_allclose(alone[:, 0], together[:, column], rtol=1e-6, atol=1e-6)
    noisy = x.at[:, 3].set(jnp.nan)
    np.testing.assert_array_equal(product(weight, noisy)[:, 4:], together[:, 4:])


def test_embeddings_are_rows_of_the_table() -> None:
    table = drawn(9, 16)
    tokens = jnp.array([8, 0, 8], jnp.int32)
    found = linear.embed(jnp.asarray(table), tokens, jnp.float32)
    np.testing.assert_array_equal(found, table[[8, 0, 8]].T)
    matrix = quantize_matrix(jnp.asarray(table))
    found = linear.embed(matrix, tokens, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), table[[8, 0, 8]].T, atol=0.03)


# No two sizes are alike, so that a shape names what it belongs to.
CONFIG = ModelConfig(
    name="shapes",
    vocab_size=1031,
    hidden_size=128,
    intermediate_size=192,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=48,
    max_context=256,
)


@functools.cache
def compiled(dtype: str, weights: Weights, nodes: int = 1) -> tuple[Any, list[tuple[int, ...]]]:
    """Return one decoding step as compiled here, and the [out, in] shapes of its matrices."""
    model = Transformer(CONFIG)
    params = parameters.abstract(CONFIG, dtype, weights)

    def step(params: Any, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        hidden, cache, _ = model.forward(params, tokens, cache, trees.chain(nodes - 1))
        return model.logits(params, hidden), cache

    cache = jax.eval_shape(lambda: model.init_cache(1, 64, jnp.float32))
    tokens = jax.ShapeDtypeStruct((1, nodes), jnp.int32)
    shapes: list[tuple[int, ...]] = [
        (int(np.prod(leaf.shape[:-1])), leaf.shape[-1])
        for leaf in jax.tree.leaves(params)
        if leaf.ndim > 1 and leaf.dtype in (jnp.int8, jnp.bfloat16)
    ]
    assert len(shapes) == 6
    return jax.jit(step, donate_argnums=2).lower(params, tokens, cache).compile(), shapes


@pytest.mark.parametrize(("dtype", "weights"), [("bfloat16", "same"), ("float32", "int8")])
@pytest.mark.parametrize("nodes", [1, 8])
def test_no_weight_is_converted_in_a_step_on_a_cpu(
    dtype: str, weights: Weights, nodes: int
) -> None:
    program, shapes = compiled(dtype, weights, nodes)
    sizes = {int(np.prod(shape)) for shape in shapes}
    text = program.as_text()
    assert "conditional(" not in text  # the platform was chosen at lowering
    assert [write for write in hlo.entry_writes(text) if write.size in sizes] == []
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 4 * max(sizes)


@pytest.mark.parametrize(("dtype", "weights"), [("bfloat16", "same"), ("float32", "int8")])
def test_one_row_is_padded_to_two_on_a_cpu(dtype: str, weights: Weights) -> None:
    program, shapes = compiled(dtype, weights)
    kind = "s8" if weights == "int8" else "bf16"
    wide = "s32" if weights == "int8" else "f32"
    text = program.as_text()
    # Of the six matrices the embedding is only looked up.
    for out, inner in shapes[1:]:
        operands = rf"= {wide}\[2,{out}\]\S* dot\("
        assert re.search(operands, text), (out, inner)
    assert not re.search(rf"{kind}\[1,\d+\]\S* dot\(", text)


def test_the_unpadded_product_does_convert_the_weights() -> None:
    """Else the tests above would look for something that never happens."""
    weight = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((48, 1), jnp.bfloat16)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    text = jax.jit(product).lower(weight, x).compile().as_text() or ""
    assert [(w.dtype, w.op) for w in hlo.entry_writes(text) if w.size == 64 * 48] == [
        ("f32", "convert")
    ]


def test_other_platforms_get_the_plain_product() -> None:
    weight = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((48, 1), jnp.bfloat16)
    traced = jax.jit(linear.matmul).trace(weight, x)
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert re.search(r"dot_general.*tensor<64x48xbf16>, tensor<48x1xbf16>", text)
        assert "pad" not in text
    assert "2x48xbf16" in traced.lower(lowering_platforms=("cpu",)).as_text()
