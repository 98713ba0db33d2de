"""What the supported families of Hugging Face checkpoints have of their own.

A config.json leaves out what its family's class in transformers has as a default, and what all
models of the family have in common. Both are written here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jspec.checkpoints.fields import CHECK, count, flag, integer, number
from jspec.checkpoints.huggingface_rope import LOCAL, layer_ropes
from jspec.errors import require

_FULL = "full_attention"
_LAYER_TYPES = (LOCAL, _FULL)
_MOST_LAYERS = 10_000
_NO_WINDOWS = "use a checkpoint without sliding windows"
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _every_layer(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _layers_from_a_first(config: Mapping[str, Any], layer: int) -> bool:
    return layer >= integer(config, "max_window_layers")


def _all_but_the_last_of(period: int) -> Callable[[Mapping[str, Any], int], bool]:
    def is_local(config: Mapping[str, Any], layer: int) -> bool:
        return (layer + 1) % count(config, "sliding_window_pattern", period) != 0

    return is_local


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: short name, as transformers' model_type.
        defaults: values of keys that config.json may leave out; those it gives as null stay null.
        fixed: fields of `ModelConfig` that no key speaks of.
        is_local: whether a layer (by index) has the sliding window where config.json doesn't list
            the layers' types; None: the architecture has no windows.
        gemma: the conventions that Gemma models share: GELU, norms, scales and soft caps.
        local_theta: default rope base of layers with a window, where they have one of their own.
    """

    name: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_local: Callable[[Mapping[str, Any], int], bool] | None = None
    gemma: bool = False
    local_theta: float | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        "mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        is_local=_every_layer,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", _QWEN, {"attention_bias": True}, is_local=_layers_from_a_first
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", _QWEN | {"head_dim": 128}, {"qk_norm": True}, is_local=_layers_from_a_first
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        is_local=_all_but_the_last_of(2),
        gemma=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        _GEMMA
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
        },
        {"qk_norm": True},
        is_local=_all_but_the_last_of(6),
        gemma=True,
        local_theta=1e4,
    ),
}


def family_fields(family: Family, config: Mapping[str, Any], max_context: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` in which families differ.

    Args:
        family: of the checkpoint.
        config: its config.json over the family's defaults.
        max_context: longest sequence, in tokens.

    Raises:
        InputError: a value is not supported.
    """
    key, wanted = "hidden_act", "silu"
    if family.gemma:  # its files have hidden_act too, which transformers does not read
        key, wanted = "hidden_activation", "gelu_pytorch_tanh"
    require(
        config.get(key, wanted) == wanted,
        key,
        config.get(key),
        "is not supported",
        f"use a checkpoint with {wanted}",
    )
    rope, local_rope = layer_ropes(config, max_context, family.local_theta)
    windows = _windows(family, config, max_context)
    if local_rope is None:
        # A window that no sequence outgrows is none, unless its layer has a rope of its own.
        windows = tuple(None if w is None or w >= max_context else w for w in windows)
        windows = windows if any(windows) else ()
    fields = {"rope": rope, "local_rope": local_rope, "windows": windows, **family.fixed}
    return fields | (_gemma_fields(config) if family.gemma else {})


def _gemma_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    require(
        not config.get("use_bidirectional_attention"),
        "use_bidirectional_attention",
        config.get("use_bidirectional_attention"),
        "is not supported",
        "use a checkpoint whose tokens see earlier ones only",
    )
    scalar = number(config, "query_pre_attn_scalar")
    require(scalar > 0, "query_pre_attn_scalar", scalar, "is not positive", CHECK)

    def cap(key: str) -> float | None:
        return None if config.get(key) is None else number(config, key)

    return {
        "activation": "gelu_tanh",
        "norm_unit_offset": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(integer(config, "hidden_size")),
        "attention_scale": None if scalar == integer(config, "head_dim") else scalar**-0.5,
        "attention_softcap": cap("attn_logit_softcapping"),
        "logit_softcap": cap("final_logit_softcapping"),
    }


def _windows(family: Family, config: Mapping[str, Any], max_context: int) -> tuple[int | None, ...]:
    """Return each layer's window as transformers derives it; () where no layer has one."""
    layers = count(config, "num_hidden_layers")
    require(  # before anything is built for so many
        layers <= _MOST_LAYERS, "num_hidden_layers", layers, f"is above {_MOST_LAYERS}", CHECK
    )
    window = integer(config, "sliding_window", 0)
    if not flag(config, "use_sliding_window", family.is_local is not _layers_from_a_first):
        window = 0
    uniform = family.is_local in (None, _every_layer)  # in transformers, whatever layer_types says
    require(
        family.is_local is not None or not 0 < window < max_context,
        "sliding_window",
        window,
        f"is smaller than the context ({max_context}), and this architecture has no windows",
        _NO_WINDOWS,
    )
    derived = [
        LOCAL if window and family.is_local and family.is_local(config, layer) else _FULL
        for layer in range(layers)
    ]
    kinds = config.get("layer_types")
    kinds = derived if kinds is None else kinds
    require(isinstance(kinds, list), "layer_types", kinds, "is no list", CHECK)
    for kind in kinds:
        require(
            kind == derived[0] if uniform else kind in _LAYER_TYPES,
            "layer_types",
            kind,
            f"is not supported in {family.name}",
            _NO_WINDOWS,
        )
    require(len(kinds) == layers, "layer_types", kinds, f"does not name {layers} layers", CHECK)
    require(
        LOCAL not in kinds or window > 0,
        "sliding_window",
        config.get("sliding_window"),
        "is off, but layer_types has sliding_attention",
        CHECK,
    )
    return tuple(window if kind == LOCAL else None for kind in kinds)
