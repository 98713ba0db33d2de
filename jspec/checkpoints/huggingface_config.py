"""Architecture and end-of-sequence ids from a Hugging Face directory's JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError, require

SUPPORTED = ("LlamaForCausalLM",)
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba",
    "mamba2",
    "nemotron_h",
    "plamo2",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "xlstm",
    "zamba",
    "zamba2",
)
_REMEDY = f"use a checkpoint of a supported architecture: {', '.join(SUPPORTED)}"
_CHECK = "use the config.json that was published with the weights"


def read_config(directory: Path) -> ModelConfig:
    """Return the architecture that `directory`/config.json describes.

    Raises:
        InputError: the file is corrupt, or asks for something that the model does not compute.
    """
    config = read_json(directory / "config.json")
    architecture = _refuse_unsupported(config)
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    max_context = _integer(config, "max_position_embeddings", 2048)
    _refuse_windows(config, max_context)
    head_dim = _integer(config, "head_dim", 0)
    if not head_dim:
        require(
            num_heads > 0 and hidden_size % num_heads == 0,
            "num_attention_heads",
            num_heads,
            f"does not divide hidden_size ({hidden_size}), and head_dim is not given",
            _CHECK,
        )
        head_dim = hidden_size // num_heads
    return ModelConfig(
        name=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_context),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
    )


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids; generation_config.json goes before config.json.

    Returns:
        The ids in the order given, or () where neither file names any.
    """
    for filename in ("generation_config.json", "config.json"):
        path = directory / filename
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            require(
                isinstance(token, int) and not isinstance(token, bool) and token >= 0,
                "eos_token_id",
                token,
                f"in {filename} is not a token id",
                "give an id of the vocabulary, or a list of them",
            )
        return tuple(ids)
    return ()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise `InputError` where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "path", str(path), "does not exist", "fetch the checkpoint again, with all its files"
        ) from None
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise InputError(
            "path", str(path), f"is not valid JSON ({error})", "fetch the file again"
        ) from None
    require(isinstance(value, dict), "path", str(path), "holds no JSON object", "fetch it again")
    result: dict[str, Any] = value
    return result


def _refuse_unsupported(config: Mapping[str, Any]) -> str:
    """Return the family's name, or raise with the most specific reason there is."""
    names = config.get("architectures") or [None]
    architecture = names[0] if isinstance(names, list) else names
    family = config.get("model_type")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise InputError(
            "quantization_config",
            method or quantization,
            "is a quantised weight format that is not supported",
            "use the unquantised checkpoint, or a GGUF file",
        )
    experts = [key for key in _EXPERT_KEYS if isinstance(config.get(key), int) and config[key] > 1]
    if experts:
        raise InputError(
            experts[0],
            config[experts[0]],
            f"makes {architecture!r} a mixture of experts, which is not supported",
            _REMEDY,
        )
    if config.get("kv_lora_rank"):
        raise InputError(
            "kv_lora_rank",
            config["kv_lora_rank"],
            f"makes {architecture!r} use multi-head latent attention, which is not supported",
            _REMEDY,
        )
    if family in _RECURRENT:
        raise InputError(
            "model_type",
            family,
            "keeps a recurrent state, which speculation cannot rewind",
            _REMEDY,
        )
    if architecture is None and family == "llama":
        architecture = SUPPORTED[0]
    require(
        architecture in SUPPORTED, "architecture", architecture, "is not supported yet", _REMEDY
    )
    require(
        config.get("hidden_act", "silu") == "silu",
        "hidden_act",
        config.get("hidden_act"),
        "is not supported",
        "use a checkpoint with silu",
    )
    require(
        not config.get("mlp_bias"),
        "mlp_bias",
        config.get("mlp_bias"),
        "is not supported",
        "use a checkpoint without biases in the feed-forward block",
    )
    return "llama"


def _refuse_windows(config: Mapping[str, Any], max_context: int) -> None:
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < max_context:
        raise InputError(
            "sliding_window",
            window,
            f"is smaller than the context ({max_context}), and windows are not supported",
            _REMEDY,
        )
    for kind in config.get("layer_types") or ():
        require(kind == "full_attention", "layer_types", kind, "is not supported", _REMEDY)


def _rope(config: Mapping[str, Any], max_context: int) -> RopeConfig:
    """Read rope_scaling (to transformers 4) or rope_parameters (from 5 on, with the base)."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(isinstance(scaling, dict), "rope_scaling", scaling, "is not an object", _CHECK)
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    partial = config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    require(partial == 1, "partial_rotary_factor", partial, "is not supported", _REMEDY)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=_number(scaling, "factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=_number(scaling, "factor"),
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
            original_context=_integer(scaling, "original_max_position_embeddings", max_context),
        )
    raise InputError(
        "rope_type", kind, "is not supported", "use a checkpoint with default, linear or llama3"
    )


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int) and not isinstance(value, bool), key, value, "is no integer", _CHECK
    )
    return int(value)  # type: ignore[arg-type]


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    require(
        isinstance(value, int | float) and not isinstance(value, bool),
        key,
        value,
        "is no number",
        _CHECK,
    )
    return float(value)  # type: ignore[arg-type]


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    require(value is None or isinstance(value, bool), key, value, "is no boolean", _CHECK)
    return bool(value)
