"""Parameters of the transformer: one declaration a tensor.

A declaration (shape, logical axes, initializer) yields the abstract tree for loading, the shardings
for placement and the values for a random model. Matrices are stored (out, in): the product
`W @ x` with the residual stream as [D, rows] is what XLA:CPU does fastest, and layout assignment on
TPU and GPU makes it free there. Query, key and value are one matrix, grouped by key/value head so
that a tensor-parallel split of the groups keeps every group whole; gate and up are one matrix too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.config import ModelConfig
from jspec.quantization import Int8Matrix, Weights, map_matrices, quantize_matrix

Initializer = Literal["normal", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Declaration of one tensor.

    Attributes:
        shape: its static shape.
        axes: a logical name for each dimension, mapped to mesh axes by `sharding.rules`; None is
            never split.
        initializer: how a random model fills it; "normal" has standard deviation 1/sqrt(fan in).
        dtype: None is the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Initializer = "normal"
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.axes)} axes for shape {self.shape}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """One decoder layer. What a family does not have is None.

    Attributes:
        attention_norm: [D].
        qkv: [G, N/G + 2, H, D]; along axis 1 the group's queries, then its key, then its value.
        qkv_bias: [G, N/G + 2, H] or None.
        attention_out: [D, N * H]. (As [D, N, H], XLA:TPU would lay it out anew in every round.)
        mlp_norm: [D].
        gate_up: [2, F, D]; gate first.
        down: [D, F].
        q_norm: [H] or None.
        k_norm: [H] or None.
        post_attention_norm: [D] or None.
        post_mlp_norm: [D] or None.
    """

    attention_norm: Any
    qkv: Any
    qkv_bias: Any
    attention_out: Any
    mlp_norm: Any
    gate_up: Any
    down: Any
    q_norm: Any = None
    k_norm: Any = None
    post_attention_norm: Any = None
    post_mlp_norm: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransformerParams:
    """All parameters. `head` is None when the embedding is tied.

    Attributes:
        embedding: [V, D].
        layers: one `LayerParams` a layer; separate buffers, since slices of a stack get copied.
        final_norm: [D].
        head: [V, D] or None.
    """

    embedding: Any
    layers: tuple[LayerParams, ...]
    final_norm: Any
    head: Any


def declare(config: ModelConfig, weights: Weights = "same") -> TransformerParams:
    """Return the tree of `TensorSpec` that `config` asks for.

    Args:
        config: the architecture.
        weights: "int8" has an `Int8Matrix` of two specs in the place of each matrix.
    """
    v, d, f = config.vocab_size, config.hidden_size, config.intermediate_size
    g, per, h = config.num_kv_heads, config.queries_per_kv + 2, config.head_dim
    neutral: Initializer = "zeros" if config.norm_unit_offset else "ones"
    norm, head_norm = TensorSpec((d,), (None,), neutral), TensorSpec((h,), (None,), neutral)
    layer = LayerParams(
        attention_norm=norm,
        qkv=TensorSpec((g, per, h, d), ("kv_heads", None, None, "embed")),
        qkv_bias=(
            TensorSpec((g, per, h), ("kv_heads", None, None), "zeros")
            if config.attention_bias
            else None
        ),
        attention_out=TensorSpec((d, config.num_heads * h), ("embed", "heads")),
        mlp_norm=norm,
        gate_up=TensorSpec((2, f, d), (None, "mlp", "embed")),
        down=TensorSpec((d, f), ("embed", "mlp")),
        q_norm=head_norm if config.qk_norm else None,
        k_norm=head_norm if config.qk_norm else None,
        post_attention_norm=norm if config.post_norms else None,
        post_mlp_norm=norm if config.post_norms else None,
    )
    params = TransformerParams(
        embedding=TensorSpec((v, d), ("vocab", "embed")),
        layers=(layer,) * config.num_layers,
        final_norm=norm,
        head=None if config.tie_embeddings else TensorSpec((v, d), ("vocab", "embed")),
    )
    return params if weights == "same" else map_matrices(_quantized, params, is_spec)


def _quantized(spec: TensorSpec) -> Int8Matrix:
    """Return the specs of a quantised matrix: its scales are split as its outputs are."""
    return Int8Matrix(
        values=dataclasses.replace(spec, dtype=jnp.int8),
        scales=TensorSpec(spec.shape[:-1], spec.axes[:-1], "ones", jnp.float32),
    )


def is_spec(node: object) -> bool:
    """True for the leaves of `declare`'s tree."""
    return isinstance(node, TensorSpec)


def abstract(config: ModelConfig, dtype: DTypeLike, weights: Weights = "same") -> TransformerParams:
    """Return `declare(config, weights)` as `jax.ShapeDtypeStruct` leaves.

    Args:
        config: the architecture.
        dtype: of every tensor whose spec names none.
        weights: as for `declare`.
    """

    def struct(spec: TensorSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, dtype if spec.dtype is None else spec.dtype)

    return cast(TransformerParams, jax.tree.map(struct, declare(config, weights), is_leaf=is_spec))


def named(tree: TransformerParams) -> Mapping[str, Any]:
    """Return the tree's leaves by dotted path, as "layers.3.qkv", in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def initialize(
    config: ModelConfig, key: jax.Array, dtype: DTypeLike, weights: Weights = "same"
) -> TransformerParams:
    """Return random parameters.

    Args:
        config: the architecture.
        key: a typed PRNG key; every tensor folds in its own index.
        dtype: dtype of every tensor.
        weights: "int8" quantises the matrices, from the same float32 numbers.
    """
    specs, treedef = jax.tree.flatten(declare(config), is_leaf=is_spec)
    values = []
    for index, spec in enumerate(specs):
        value = filled(spec, jax.random.fold_in(key, index))
        if spec.initializer == "normal" and weights == "int8":
            values.append(quantize_matrix(value))
        else:
            values.append(value.astype(dtype))
    return cast(TransformerParams, jax.tree.unflatten(treedef, values))


def filled(spec: TensorSpec, key: jax.Array) -> jax.Array:
    """Return a float32 tensor as its declaration's initializer fills it, from a typed PRNG key."""
    if spec.initializer == "normal":
        return jax.random.normal(key, spec.shape, jnp.float32) * spec.shape[-1] ** -0.5
    return jnp.full(spec.shape, spec.initializer == "ones", jnp.float32)
