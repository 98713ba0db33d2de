"""From logical axes to a device mesh.

Tensors are declared with logical axes (`jspec.models.parameters.TensorSpec`); rules say which mesh
axis splits each of them. The result is a tree of shardings in the shape of the parameters, for
`jspec.checkpoints.load`, `jax.device_put` or a jitted program.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding

from jspec.config import ModelConfig
from jspec.errors import InputError
from jspec.models.parameters import TensorSpec, TransformerParams, declare, is_spec
from jspec.quantization import Weights

Rules = Mapping[str, str | None]

# Megatron's tensor parallelism: split heads and feed-forward columns, reduce once a block.
TENSOR_PARALLEL: Rules = {
    "vocab": "model",
    "kv_heads": "model",
    "heads": "model",
    "mlp": "model",
    "embed": None,
}
REPLICATED: Rules = dict.fromkeys(TENSOR_PARALLEL)


def partition(spec: TensorSpec, rules: Rules, mesh: Mesh) -> jax.P:
    """Return the partition of one tensor.

    Args:
        spec: its declaration.
        rules: mesh axis of each logical axis, None to keep it whole.
        mesh: the devices.

    Raises:
        InputError: a logical axis has no rule, two dimensions ask for one mesh axis, the mesh lacks
            an axis, or a dimension does not divide by its mesh axis.
    """
    axes: list[str | None] = []
    for size, name in zip(spec.shape, spec.axes, strict=True):
        if name is not None and name not in rules:
            raise InputError("rules", name, "has no rule", "map it to a mesh axis or to None")
        axis = None if name is None else rules[name]
        if axis is not None:
            if axis not in mesh.shape:
                raise InputError(
                    "rules",
                    axis,
                    f"is no axis of the mesh {dict(mesh.shape)}",
                    "name one of the mesh's axes",
                )
            if axis in axes:
                raise InputError(
                    "rules",
                    axis,
                    f"would split two dimensions of one tensor {spec.axes}",
                    "map one of them to None",
                )
            if size % mesh.shape[axis]:
                raise InputError(
                    "mesh",
                    dict(mesh.shape),
                    f"does not divide {name} = {size} by its axis {axis}",
                    "use an axis size that divides it, or map it to None",
                )
        axes.append(axis)
    return jax.P(*axes)


def shardings(
    config: ModelConfig, mesh: Mesh, rules: Rules = TENSOR_PARALLEL, weights: Weights = "same"
) -> TransformerParams:
    """Return a `NamedSharding` for every parameter of `config`, in the parameters' tree.

    Args:
        config: the model.
        mesh: the devices.
        rules: mesh axis of each logical axis.
        weights: "int8" for quantised parameters; scales are split as their outputs are.

    Raises:
        InputError: as `partition`.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, partition(spec, rules, mesh)),
        declare(config, weights),
        is_leaf=is_spec,
    )
