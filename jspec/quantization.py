"""Int8 weights: symmetric, with a float32 scale for each output channel.

A quantised matrix stands in the parameters' tree where the matrix stood. Activations are quantised
as they come, with a scale for each token, so that a product is one of int8 numbers summed exactly
in int32 (`jspec.models.linear`). A token's activations are two int8 digits, about 16 bits: their
largest entries are 10 to 40 times the typical ones, and a single digit leaves so few levels to
those that the same token gets visibly other logits when it is verified among others, where sums
are rounded otherwise. With two, the result is that of the int8 weights in float32 but for about
1e-4, and one token's two digits cost no more than the row that they would be padded with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp

from jspec.errors import require

# What becomes of a checkpoint's matrices: "same" keeps them as they are stored.
Weights = Literal["same", "int8"]

# The matrices of `jspec.models.parameters`; norms and biases are never quantised.
MATRICES = frozenset({"embedding", "qkv", "attention_out", "gate_up", "down", "head"})

_LARGEST = 127
# Those of drafters that are heads on a target. A lent embedding is the target's own, of which a
# drafter reads few columns, and Medusa's blocks are small.
_OF_HEADS = MATRICES - {"embedding"} | {"fc", "fuse", "heads"}

# How many units of the second digit make one of the first: its remainder is within 1/2.
DIGIT = 2 * _LARGEST
# Keeps a row of zeros from dividing by zero.
_LEAST = 1e-30

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Matrix:
    """A matrix as small integers: values * scales[..., None].

    Attributes:
        values: [..., in] int8 in -127 .. 127; the other dimensions are outputs.
        scales: [...] float32.
    """

    values: Any
    scales: Any


def check_weights(weights: str) -> None:
    """Raise `InputError` unless `weights` is one of `Weights`."""
    choices = get_args(Weights)
    require(weights in choices, "weights", weights, "is not a choice", f"use one of {choices}")


def _scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 x with each row's largest magnitude brought to 127, and [...] the scales."""
    wide = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), jnp.float32(_LEAST))
    # One division a row, written out: it must not depend on how many rows there are.
    inverse = jnp.float32(_LARGEST) / largest
    return wide * inverse[..., None], largest * jnp.float32(1 / _LARGEST)


def two_digits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write each row as two int8 digits, the second worth 1 / 254 of the first.

    The error of an entry is at most about 1 / 65000 of the row's largest magnitude. A row that is
    not finite gets a scale that is not, so that what is computed from it is not finite either.

    Args:
        x: [rows, in], any floating dtype.

    Returns:
        Digits [2 * rows, in] int8, all the first ones and then all the second, and scales [rows]
        float32, with x close to (first + second / 254) * scales[:, None].
    """
    scaled, scales = _scaled(x)
    first = jnp.round(scaled)
    second = jnp.round((scaled - first) * jnp.float32(DIGIT))
    return jnp.concatenate([first, second]).astype(jnp.int8), scales


@jax.jit
def quantize_matrix(weight: jax.Array) -> Int8Matrix:
    """Quantise a matrix [..., in] of any floating dtype.

    Each row is rounded to 255 evenly spaced numbers, its largest magnitude at 127, so the error of
    an entry is at most half the row's scale.
    """
    scaled, scales = _scaled(weight)
    return Int8Matrix(jnp.round(scaled).astype(jnp.int8), scales)


def dequantize(matrix: Int8Matrix) -> jax.Array:
    """Return the float32 matrix [..., in] that `matrix` stands for."""
    return matrix.values.astype(jnp.float32) * matrix.scales[..., None]


def quantize(params: Tree) -> Tree:
    """Return loaded parameters with every matrix quantised, one at a time.

    Args:
        params: `TransformerParams`; what is quantised already stays as it is.
    """
    return map_matrices(_quantized, params)


def quantize_drafter(params: Tree) -> Tree:
    """Return a trained drafter's parameters with what it reads for every draft quantised.

    Its proposals are others than before, and the output's law is the target's as ever.

    Args:
        params: `EagleParams`, `MedusaParams` or `TransformerParams`, on the device.
    """
    return map_matrices(_quantized, params, names=_OF_HEADS)


def _quantized(leaf: Any) -> Any:
    return leaf if is_int8(leaf) else quantize_matrix(leaf)


def is_matrix_name(path: str, names: frozenset[str] = MATRICES) -> bool:
    """True where a parameter's dotted path, as "layers.3.qkv", is a matrix's of these names."""
    return path.rpartition(".")[2] in names


def is_quantized(params: object) -> bool:
    """True where a matrix of `params` is an `Int8Matrix`."""
    leaves = jax.tree.leaves(params, is_leaf=is_int8)
    return any(map(is_int8, leaves))


def map_matrices(
    function: Callable[[Any], Any],
    tree: Tree,
    is_leaf: Callable[[Any], bool] | None = None,
    names: frozenset[str] = MATRICES,
) -> Tree:
    """Return the parameters' tree with `function` applied to each matrix.

    Args:
        function: of a matrix, plain or quantised.
        tree: `TransformerParams`, or a drafter's, of arrays, specs or anything else.
        is_leaf: as for `jax.tree.map`.
        names: as for `is_matrix_name`.
    """

    def leaf(node: Any) -> bool:
        return is_int8(node) or (is_leaf is not None and is_leaf(node))

    def one(path: tuple[Any, ...], node: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return function(node) if is_matrix_name(name, names) else node

    return cast(Tree, jax.tree_util.tree_map_with_path(one, tree, is_leaf=leaf))


def is_int8(node: object) -> bool:
    """True for an `Int8Matrix`."""
    return isinstance(node, Int8Matrix)
