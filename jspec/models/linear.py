"""Products of weights and activations, and what XLA needs to compute them well.

Weights are stored (out, in), activations are [in, rows]; see `jspec.models.transformer`. A weight
is an array of the activations' dtype, or an `Int8Matrix`, for which activations are split into two
int8 digits here.

In float32 XLA:CPU is fastest at `W @ x`. Its 16-bit and 8-bit products want the activations first,
`x^T W^T`, and two rows at least: a single row becomes a product of vectors, for which all weights
are converted to 32 bits in every call. So one row is padded to two, which XLA does not undo (the
two digits are two rows anyway). Which of the two is compiled depends on the platform that is
compiled for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.quantization import DIGIT, Int8Matrix, two_digits

Weight = jax.Array | Int8Matrix


def matmul(weight: Weight, x: jax.Array) -> jax.Array:
    """Return the product of a weight and activations.

    Args:
        weight: [..., in]; the leading dimensions are flattened to the outputs.
        x: [in, rows].

    Returns:
        [out, rows] in x's dtype; accumulated in float32, with an `Int8Matrix` exactly in int32.
    """
    return _product(weight, x, rows_first=False).astype(x.dtype)


def embed(embedding: Weight, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return [D, rows] of `dtype`, the columns of embedding [V, D] for tokens [rows] int32."""
    if isinstance(embedding, Int8Matrix):
        rows = jnp.take(embedding.values, tokens, axis=0).astype(jnp.float32)
        return (rows * jnp.take(embedding.scales, tokens)[:, None]).astype(dtype).T
    return jnp.take(embedding, tokens, axis=0).astype(dtype).T


def head(weight: Weight, hidden: jax.Array) -> jax.Array:
    """Return float32 scores [rows, V] of weight [V, D] and hidden [D, rows]."""
    return _product(weight, hidden, rows_first=True)


def _product(weight: Weight, x: jax.Array, rows_first: bool) -> jax.Array:
    """Return the float32 product, [rows, out] if `rows_first`, else [out, rows]."""
    if not isinstance(weight, Int8Matrix):
        return _dot(weight.reshape(-1, weight.shape[-1]), x, rows_first)
    values, of_outputs = weight.values.reshape(-1, x.shape[0]), weight.scales.reshape(-1)
    digits, of_rows = two_digits(x.T)
    sums = _dot(values, digits.T, rows_first).astype(jnp.float32)
    high, low = jnp.split(sums, 2, axis=0 if rows_first else 1)
    sums = high + low * jnp.float32(1 / DIGIT)
    if rows_first:
        return sums * of_rows[:, None] * of_outputs[None, :]
    return sums * of_rows[None, :] * of_outputs[:, None]


def _dot(weight: jax.Array, x: jax.Array, rows_first: bool) -> jax.Array:
    """Return weight [out, in] times x [in, rows] of one dtype, in float32 or for int8 in int32."""
    wide = jnp.int32 if weight.dtype == jnp.int8 else jnp.float32

    def weights_first(weight: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.matmul(weight, x, preferred_element_type=wide)
        # Transposed after the product, not in it: XLA:CPU's [rows, D] x [D, V] of float32 is
        # several times slower at 2 to 8 rows.
        return jax.lax.optimization_barrier(y).T if rows_first else y

    def activations_first(weight: jax.Array, x: jax.Array) -> jax.Array:
        rows = x.shape[1]
        # The barriers keep XLA from moving a transpose into the product.
        x = jax.lax.optimization_barrier(jnp.pad(x.T, ((0, 2 - rows if rows == 1 else 0), (0, 0))))
        y = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=wide)
        y = jax.lax.optimization_barrier(y)[:rows]
        return y if rows_first else y.T

    if weight.dtype.itemsize > 2:
        return weights_first(weight, x)
    return jax.lax.platform_dependent(weight, x, cpu=activations_first, default=weights_first)
