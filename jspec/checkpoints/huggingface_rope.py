"""Rotary embeddings as a config.json describes them, up to transformers 4 and from 5 on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.fields import CHECK, count, number
from jspec.config import RopeConfig
from jspec.errors import InputError, require

LOCAL, _GLOBAL = "sliding_attention", "full_attention"  # transformers' names of layer types
_REMEDY = "use a checkpoint with default, linear, llama3 or yarn"


def layer_ropes(
    config: Mapping[str, Any], max_context: int, local_theta: float | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of most layers, and that of layers with a window.

    Args:
        config: the config.json.
        max_context: longest sequence, in tokens.
        local_theta: default base of layers with a window; None where all layers have one rope.

    Returns:
        The second is None where all layers have one rope.

    Raises:
        InputError: the kind is not supported, or the object has another form.
    """
    given = config.get("rope_parameters")  # transformers 5: with the base, maybe by layer type
    by_layer = isinstance(given, dict) and isinstance(given.get(_GLOBAL), dict)
    require(
        not given or by_layer == (local_theta is not None),
        "rope_parameters",
        given,
        "is not by layer type" if local_theta else "is by layer type, which is not supported",
        CHECK,
    )
    if local_theta is None:
        return _rope(config, given or config.get("rope_scaling"), max_context), None
    whole = given[_GLOBAL] if by_layer and given else config.get("rope_scaling")
    local = (given or {}).get(LOCAL) or {}
    base = number(config, "rope_local_base_freq", local_theta)
    return (
        _rope(config, whole, max_context),
        _rope({"rope_theta": base}, local, max_context),
    )


def _rope(config: Mapping[str, Any], scaling: Any, max_context: int) -> RopeConfig:
    scaling = scaling or {}
    require(isinstance(scaling, dict), "rope_scaling", scaling, "is not an object", CHECK)
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    partial = config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    require(
        partial == 1,
        "partial_rotary_factor",
        partial,
        "is not supported",
        "use a checkpoint that rotates whole heads",
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = number(scaling, "factor") if kind in ("linear", "llama3", "yarn") else 1.0
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=factor)
    context = count(scaling, "original_max_position_embeddings", max_context)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=factor,
            low_freq_factor=number(scaling, "low_freq_factor"),
            high_freq_factor=number(scaling, "high_freq_factor"),
            original_context=context,
        )
    if kind == "yarn":
        for key, neutral in (("truncate", True), ("mscale", None), ("mscale_all_dim", None)):
            found = scaling.get(key, neutral)
            require(found == neutral, key, found, "is not supported", _REMEDY)
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_context=context,
            beta_fast=number(scaling, "beta_fast", 32.0),
            beta_slow=number(scaling, "beta_slow", 1.0),
            attention_factor=number(scaling, "attention_factor", yarn_attention_factor(factor)),
        )
    raise InputError("rope_type", kind, "is not supported", _REMEDY)


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's temperature for a context `factor` times longer (arXiv 2309.00071, eq. 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def extended_context(rope: RopeConfig, max_context: int) -> int:
    """Return the longest sequence: YaRN is often switched on beside an unchanged context."""
    if rope.scaling != "yarn":
        return max_context
    return max(max_context, int(rope.original_context * rope.factor))
