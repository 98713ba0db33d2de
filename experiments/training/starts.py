"""What training starts from: drafters made of the target's own layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig
from jspec.models import eagle, medusa
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.models.parameters import TransformerParams, filled, is_spec

# A random output would be read as certainty about some random token: it begins so much smaller.
_QUIET = 0.3
# What the layer adds to the guess of the linear maps is smaller still.
_SILENT = 0.05


def eagle_head(
    config: EagleConfig,
    target: TransformerParams,
    key: jax.Array,
    maps: Mapping[str, Any] | None = None,
    sizes: Any = None,
) -> EagleParams:
    """Return a random EAGLE head; only norms before the target's head are taken from the target.

    To begin with a layer of the target's was tried and learns no faster: its weights read another
    residual stream.

    Args:
        config: of the head, whose layer has the target's sizes.
        target: the target's parameters, float32.
        key: a typed PRNG key; every tensor folds in its own index.
        maps: of an "eagle" head, its linear maps as `linear.maps` finds them.
        sizes: with them, the typical size [D] of each of the target's features.
    """
    specs, treedef = jax.tree.flatten(eagle.declare(config), is_leaf=is_spec)
    random = jax.tree.unflatten(
        treedef, [filled(spec, jax.random.fold_in(key, i)) for i, spec in enumerate(specs)]
    )
    if config.kind == "eagle3":
        return dataclasses.replace(random, norm=target.final_norm * _QUIET)
    if maps is None:
        return dataclasses.replace(random, fc=random.fc * _QUIET)
    # Its residual stream is a guess at a feature: norms make all of it alike in size.
    alike = jnp.asarray(np.sqrt(np.mean(sizes * sizes)) / sizes, jnp.float32)
    layer = random.layer
    layer = dataclasses.replace(
        layer,
        attention_norm=None if layer.attention_norm is None else alike,
        mlp_norm=alike,
        qkv=_sized(layer.qkv),
        attention_out=_sized(layer.attention_out) * _SILENT,
        gate_up=_sized(layer.gate_up),
        down=_sized(layer.down) * _SILENT,
    )
    return dataclasses.replace(random, layer=layer, **jax.tree.map(jnp.asarray, dict(maps)))


def _sized(weight: jax.Array) -> jax.Array:
    """Return a random matrix (out, in) whose outputs are as large as its inputs."""
    return weight * (weight.shape[-1] ** -0.5 / jnp.std(weight))


def medusa_heads(config: MedusaConfig) -> MedusaParams:
    """Return Medusa heads that begin as the target's own head: blocks that add nothing."""
    blank = medusa.declare(config)
    return dataclasses.replace(
        blank,
        weights=jnp.zeros(blank.weights.shape, jnp.float32),
        biases=jnp.zeros(blank.biases.shape, jnp.float32),
    )


def draft_model(
    config: ModelConfig, target: TransformerParams, layers: tuple[int, ...]
) -> tuple[ModelConfig, TransformerParams]:
    """Return a model of some of the target's layers; embedding and head are left to the target.

    Args:
        config: the target's.
        target: its parameters.
        layers: which of them, in order.
    """
    windows = tuple(config.windows[layer] for layer in layers) if config.windows else ()
    params = TransformerParams(
        embedding=None,
        layers=tuple(target.layers[layer] for layer in layers),
        final_norm=target.final_norm,
        head=None,
    )
    return dataclasses.replace(config, num_layers=len(layers), windows=windows), params


def copied(params: Any) -> Any:
    """Return parameters whose buffers may be donated, though the target's were passed in."""
    return jax.tree.map(jnp.copy, params)
