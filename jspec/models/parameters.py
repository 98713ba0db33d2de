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

Initializer = Literal["normal", "ones", "zeros"]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Declaration of one tensor.

    Attributes:
        shape: its static shape.
        axes: a logical name for each dimension, mapped to mesh axes by `sharding.rules`; None is
            never split.
        initializer: how a random model fills it; "normal" has standard deviation 1/sqrt(fan in).
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initializer: Initializer = "normal"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.axes)} axes for shape {self.shape}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerParams:
    """One decoder layer. `qkv_bias` is None where the family has none.

    Attributes:
        attention_norm: [D].
        qkv: [G, N/G + 2, H, D]; along axis 1 the group's queries, then its key, then its value.
        qkv_bias: [G, N/G + 2, H] or None.
        attention_out: [D, N * H]. (As [D, N, H], XLA:TPU would lay it out anew in every round.)
        mlp_norm: [D].
        gate_up: [2, F, D]; gate first.
        down: [D, F].
    """

    attention_norm: Any
    qkv: Any
    qkv_bias: Any
    attention_out: Any
    mlp_norm: Any
    gate_up: Any
    down: Any


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


def declare(config: ModelConfig) -> TransformerParams:
    """Return the tree of `TensorSpec` that `config` asks for."""
    v, d, f = config.vocab_size, config.hidden_size, config.intermediate_size
    g, per, h = config.num_kv_heads, config.queries_per_kv + 2, config.head_dim
    layer = LayerParams(
        attention_norm=TensorSpec((d,), (None,), "ones"),
        qkv=TensorSpec((g, per, h, d), ("kv_heads", None, None, "embed")),
        qkv_bias=(
            TensorSpec((g, per, h), ("kv_heads", None, None), "zeros")
            if config.attention_bias
            else None
        ),
        attention_out=TensorSpec((d, config.num_heads * h), ("embed", "heads")),
        mlp_norm=TensorSpec((d,), (None,), "ones"),
        gate_up=TensorSpec((2, f, d), (None, "mlp", "embed")),
        down=TensorSpec((d, f), ("embed", "mlp")),
    )
    return TransformerParams(
        embedding=TensorSpec((v, d), ("vocab", "embed")),
        layers=(layer,) * config.num_layers,
        final_norm=TensorSpec((d,), (None,), "ones"),
        head=None if config.tie_embeddings else TensorSpec((v, d), ("vocab", "embed")),
    )


def is_spec(node: object) -> bool:
    """True for the leaves of `declare`'s tree."""
    return isinstance(node, TensorSpec)


def abstract(config: ModelConfig, dtype: DTypeLike) -> TransformerParams:
    """Return `declare(config)` as `jax.ShapeDtypeStruct` leaves of `dtype`."""
    return cast(
        TransformerParams,
        jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), declare(config), is_leaf=is_spec
        ),
    )


def named(tree: TransformerParams) -> Mapping[str, Any]:
    """Return the tree's leaves by dotted path, as "layers.3.qkv", in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def initialize(config: ModelConfig, key: jax.Array, dtype: DTypeLike) -> TransformerParams:
    """Return random parameters.

    Args:
        config: the architecture.
        key: a typed PRNG key; every tensor folds in its own index.
        dtype: dtype of every tensor.
    """
    specs, treedef = jax.tree.flatten(declare(config), is_leaf=is_spec)
    values = []
    for index, spec in enumerate(specs):
        if spec.initializer == "normal":
            noise = jax.random.normal(jax.random.fold_in(key, index), spec.shape, jnp.float32)
            values.append((noise * spec.shape[-1] ** -0.5).astype(dtype))
        else:
            values.append(jnp.full(spec.shape, spec.initializer == "ones", dtype))
    return cast(TransformerParams, jax.tree.unflatten(treedef, values))
