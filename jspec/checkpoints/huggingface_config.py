"""Architecture and end-of-sequence ids from a Hugging Face directory's JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.checkpoints.fields import CHECK, count, flag, integer, number
from jspec.checkpoints.huggingface_families import FAMILIES, Family, family_fields
from jspec.checkpoints.huggingface_rope import extended_context
from jspec.config import ModelConfig
from jspec.errors import InputError, require

# A multimodal architecture's config.json has its text part, of another architecture, inside.
_TEXT_PARTS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
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
_REMEDY = f"use a checkpoint of a supported architecture: {', '.join(FAMILIES)}"


def read_config(directory: Path) -> ModelConfig:
    """Return the architecture that `directory`/config.json describes.

    Raises:
        InputError: the file is corrupt, or asks for something that the model does not compute.
    """
    return parse(read_json(directory / "config.json"))


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture that a config.json's content describes.

    Raises:
        InputError: it asks for something that the model does not compute.
    """
    if is_text_part(config):
        text = config.get("text_config")
        require(isinstance(text, dict), "text_config", text, "is no object", CHECK)
        architectures = [_TEXT_PARTS[config["architectures"][0]]]
        config = dict(text or {}) | {"architectures": architectures}
    family = _supported_family(config)
    config = {**family.defaults, **config}
    num_heads = count(config, "num_attention_heads")
    hidden_size = count(config, "hidden_size")
    max_context = count(config, "max_position_embeddings")
    head_dim = integer(config, "head_dim", 0)
    if not head_dim:
        require(
            hidden_size % num_heads == 0,
            "num_attention_heads",
            num_heads,
            f"does not divide hidden_size ({hidden_size}), and head_dim is not given",
            CHECK,
        )
        head_dim = hidden_size // num_heads
    fields = {
        "attention_bias": flag(config, "attention_bias"),
        **family_fields(family, config, max_context),
    }
    return ModelConfig(
        name=family.name,
        vocab_size=count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(config, "intermediate_size"),
        num_layers=count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=count(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_context=extended_context(fields["rope"], max_context),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tie_embeddings=flag(config, "tie_word_embeddings"),
        **fields,
    )


def is_text_part(config: Mapping[str, Any]) -> bool:
    """True where the model to load is the text part of a multimodal checkpoint."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return False
    return names[0] in _TEXT_PARTS


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
    except OSError as error:
        raise InputError(
            "path", str(path), f"cannot be read ({error.strerror})", "check the file"
        ) from None
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors, absurd nesting
        raise InputError(
            "path", str(path), f"is not valid JSON ({error})", "fetch the file again"
        ) from None
    require(isinstance(value, dict), "path", str(path), "holds no JSON object", "fetch it again")
    result: dict[str, Any] = value
    return result


def _supported_family(config: Mapping[str, Any]) -> Family:
    """Return the family, or raise with the most specific reason there is."""
    names = config.get("architectures") or [None]
    architecture = names[0] if isinstance(names, list) else names
    require(
        architecture is None or isinstance(architecture, str),
        "architectures",
        names,
        "is no list of names",
        CHECK,
    )
    model_type = config.get("model_type")
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
    if model_type in _RECURRENT:
        raise InputError(
            "model_type",
            model_type,
            "keeps a recurrent state, which speculation cannot rewind",
            _REMEDY,
        )
    if architecture not in FAMILIES:
        parts = [key for key in ("vision_config", "audio_config") if config.get(key)]
        if parts:
            raise InputError(
                "architecture",
                architecture,
                f"is multimodal ({parts[0]}), which is not supported",
                _REMEDY,
            )
    if architecture is None:
        by_name = {family.name: name for name, family in FAMILIES.items()}
        architecture = by_name.get(str(model_type).removesuffix("_text"))
    if architecture not in FAMILIES:
        raise InputError("architecture", architecture, "is not supported yet", _REMEDY)
    require(
        not config.get("mlp_bias"),
        "mlp_bias",
        config.get("mlp_bias"),
        "is not supported",
        "use a checkpoint without biases in the feed-forward block",
    )
    return FAMILIES[architecture]
