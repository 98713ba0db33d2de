"""What training starts from: drafters made of the target's own layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.models import eagle, medusa
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.models.parameters import LayerParams, TransformerParams


def eagle_head(config: EagleConfig, target: TransformerParams) -> EagleParams:
    """Return an EAGLE head that begins as the target's last layer on its own features.

    Of what joins feature and embedding, the feature's half is passed on as it is and the
    embedding's is 0; so at first the head repeats what the target said, and learns to go on.

    Args:
        config: of the head, whose layer has the target's sizes.
        target: the target's parameters, float32.
    """
    d = config.layer.hidden_size
    last = target.layers[-1]
    nothing = eagle.declare(config)
    zeros, eye = jnp.zeros((d, d), jnp.float32), jnp.eye(d, dtype=jnp.float32)
    ones = jnp.ones(d, jnp.float32)
    fused = config.kind == "eagle3"
    layer = LayerParams(
        attention_norm=None,
        qkv=jnp.concatenate([jnp.zeros_like(last.qkv), last.qkv], axis=-1) if fused else last.qkv,
        qkv_bias=last.qkv_bias,
        attention_out=last.attention_out,
        mlp_norm=last.mlp_norm,
        gate_up=last.gate_up,
        down=last.down,
    )
    parts = len(config.feature_layers)
    return dataclasses.replace(
        nothing,
        fc=jnp.concatenate([*[zeros] * (parts - 1), eye] if fused else [zeros, eye], axis=1),
        fc_bias=jnp.zeros(d, jnp.float32) if config.fc_bias else None,
        embedding_norm=ones if fused else None,
        feature_norm=last.attention_norm if fused else None,
        layer=layer,
        norm=target.final_norm if fused else None,
    )


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
