"""Architecture and end-of-sequence ids from a GGUF file's metadata.

The keys say less than a config.json does: what they leave out, and which scale the largest Gemma
models have, is as llama.cpp's loader has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from jspec.checkpoints.gguf import FREQUENCIES
from jspec.checkpoints.gguf_header import GgufHeader
from jspec.checkpoints.huggingface_rope import extended_context, yarn_attention_factor
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError, require

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")  # Mistral's files say llama
_LATENT = ("deepseek2", "minicpm3", "plm")
_RECURRENT = (
    "arwkv7",
    "falcon-h1",
    "granitehybrid",
    "jamba",
    "kimi-linear",
    "lfm2",
    "mamba",
    "mamba2",
    "nemotron_h",
    "plamo2",
    "qwen3next",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
)
_LARGEST = float(np.finfo(np.float32).max)
_REMEDY = f"use a file of a supported architecture: {', '.join(SUPPORTED)}"
_CHECK = "convert the model to GGUF again"
# Layers of which the last sees all and the others have the window.
_PERIODS = {"gemma2": 2, "gemma3": 6}
# Number of layers by which the models are known whose query_pre_attn_scalar is the model's width
# over its heads, and not the head size: no key has it.
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
# Of the texts that end a turn in every model that has them, the one that files leave without key.
_END_OF_TURN = "<end_of_turn>"


def read_config(header: GgufHeader) -> ModelConfig:
    """Return the architecture that the metadata and the tensor directory describe.

    Raises:
        InputError: a key is missing, or the file asks for something the model does not compute.
    """
    architecture = _supported_architecture(header.metadata)
    num_heads = _count(header, "attention.head_count")
    hidden_size = _count(header, "embedding_length")
    head_dim = _integer(header, "attention.key_length", hidden_size // num_heads)
    value_dim = _integer(header, "attention.value_length", head_dim)
    rotated = _integer(header, "rope.dimension_count", head_dim)
    for key, size in (("attention.value_length", value_dim), ("rope.dimension_count", rotated)):
        require(
            size == head_dim,
            f"{architecture}.{key}",
            size,
            f"differs from the head size {head_dim}",
            _REMEDY,
        )
    num_layers = _count(header, "block_count")
    require(  # before anything is built for so many
        num_layers <= len(header.tensors),
        f"{architecture}.block_count",
        num_layers,
        f"is more than the {len(header.tensors)} tensors that are stored",
        _CHECK,
    )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor", "token_embd.weight", "is missing", "fetch the file again")
    max_context = _count(header, "context_length")
    fields: dict[str, Any] = {
        "rope": _rope(header, head_dim, max_context),
        "windows": _windows(header, architecture, num_layers, max_context),
        "qk_norm": architecture in ("qwen3", "gemma3"),
    }
    if architecture in _PERIODS:
        fields |= _gemma_fields(header, architecture, num_layers, hidden_size, num_heads, head_dim)
    return ModelConfig(
        name=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_count(header, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(header, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=extended_context(fields["rope"], max_context),
        norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        **fields,
    )


def read_eos_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """Return the ids that end a sequence: end of sequence, of turn and of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids: list[int] = []
    for key in keys:
        value = header.metadata.get(f"tokenizer.ggml.{key}")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        fits = isinstance(token, int) and not isinstance(token, bool)
        require(fits, "eos_token_id", token, "is not a token id", _CHECK)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and _END_OF_TURN in tokens:
        ids.append(tokens.index(_END_OF_TURN))
    return tuple(dict.fromkeys(ids))


def _supported_architecture(metadata: Mapping[str, Any]) -> str:
    architecture = metadata.get("general.architecture")
    experts = metadata.get(f"{architecture}.expert_count", 0)
    problem = "is not supported yet"
    if experts:
        problem = f"is a mixture of {experts} experts, which is not supported"
    elif architecture in _LATENT:
        problem = "uses multi-head latent attention, which is not supported"
    elif architecture in _RECURRENT:
        problem = "keeps a recurrent state, which speculation cannot rewind"
    elif architecture in SUPPORTED:
        return str(architecture)
    raise InputError("general.architecture", architecture, problem, _REMEDY)


def _gemma_fields(
    header: GgufHeader,
    architecture: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    head_dim: int,
) -> dict[str, Any]:
    scale_dim = head_dim
    if num_layers == _WIDE_SCALE[architecture]:
        scale_dim = hidden_size // num_heads
    second = architecture == "gemma2"
    fields: dict[str, Any] = {
        "activation": "gelu_tanh",
        "norm_unit_offset": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden_size),
        "attention_scale": None if scale_dim == head_dim else max(1, scale_dim) ** -0.5,
        "attention_softcap": _number(header, "attn_logit_softcapping", 50.0) if second else None,
        "logit_softcap": _number(header, "final_logit_softcapping", 30.0 if second else 0.0)
        or None,
    }
    if not second:
        fields["local_rope"] = RopeConfig(theta=_number(header, "rope.freq_base_swa", 10000.0))
    return fields


def _windows(
    header: GgufHeader, architecture: str, num_layers: int, max_context: int
) -> tuple[int | None, ...]:
    key = f"{architecture}.attention.sliding_window"
    window = _integer(header, "attention.sliding_window", 4096 if architecture == "gemma2" else 0)
    if architecture == "gemma3":
        require(window > 0, key, window, "is not positive", _CHECK)
    elif not 0 < window < max_context:
        return ()
    if architecture == "llama":
        return (window,) * num_layers
    require(
        architecture in _PERIODS,
        key,
        window,
        f"is smaller than the context ({max_context}), and the file can't say which layers have it",
        "use the safetensors checkpoint, whose config names them",
    )
    pattern = header.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, list):  # a flag for each layer
        local = [bool(flag) for flag in pattern]
        require(
            len(local) == num_layers,
            f"{architecture}.attention.sliding_window_pattern",
            pattern,
            f"is not one flag for each of {num_layers} layers",
            _CHECK,
        )
    else:
        period = _count(header, "attention.sliding_window_pattern", _PERIODS[architecture])
        local = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return tuple(window if has_window else None for has_window in local)


def _rope(header: GgufHeader, head_dim: int, max_context: int) -> RopeConfig:
    theta = _number(header, "rope.freq_base", 10000.0)
    key = f"{header.metadata['general.architecture']}.rope.scaling.type"
    kind = header.metadata.get(key, "none")
    old_factor = _number(header, "rope.scale_linear", 1.0)  # the key of files before 2023-12
    frequencies = header.tensors.get(FREQUENCIES)
    if kind == "linear" or (kind == "none" and old_factor != 1):
        factor = _number(header, "rope.scaling.factor", old_factor)
        require(
            frequencies is None,
            "tensor",
            FREQUENCIES,
            f"scales positions that {key} scales too",
            _CHECK,
        )
        return RopeConfig(theta=theta, scaling="linear", factor=factor)
    if kind == "yarn" and frequencies is None:
        return _yarn_rope(header, theta, max_context)
    require(
        kind == "none",
        key,
        kind,
        "is not supported",
        "use a file with none, linear, yarn or Llama 3's frequencies",
    )
    if frequencies is None:
        return RopeConfig(theta=theta)
    require(
        frequencies.shape == (head_dim // 2,) and frequencies.kind == GGMLQuantizationType.F32,
        "tensor",
        FREQUENCIES,
        f"of shape {frequencies.shape} is stored as {frequencies.kind.name}, expected "
        f"({head_dim // 2},) as F32",
        _CHECK,
    )
    with header.path.open("rb") as file:
        file.seek(frequencies.offset)
        raw = np.frombuffer(file.read(frequencies.num_bytes), np.uint8)
    divisors = raw.view("<f4")
    require(
        bool(np.all((divisors > 0) & np.isfinite(divisors))),
        "tensor",
        FREQUENCIES,
        "has entries that are no positive numbers",
        _CHECK,
    )
    return _llama3_rope(divisors, theta, head_dim)


def _yarn_rope(header: GgufHeader, theta: float, max_context: int) -> RopeConfig:
    for name, neutral in (
        ("attn_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_log_multiplier", 0.0),
    ):
        key = f"rope.scaling.{name}"
        found = _number(header, key, neutral)
        require(found == neutral, key, found, "is not supported", "use the safetensors checkpoint")
    factor = _number(header, "rope.scaling.factor")
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_context=_integer(header, "rope.scaling.original_context_length", max_context),
        beta_fast=_number(header, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_number(header, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_attention_factor(factor),
    )


def _llama3_rope(divisors: np.ndarray[Any, Any], theta: float, head_dim: int) -> RopeConfig:
    """Return the scaling whose frequency divisors these are.

    The file keeps the divisors [H/2] alone. The factor is their largest; the other constants are
    those of every Llama 3 release, and what they give must agree with the file.
    """
    if np.all(divisors == 1):
        return RopeConfig(theta=theta)
    rope = RopeConfig(theta=theta, scaling="llama3", factor=max(1.0, _short(divisors.max())))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0, 1)
    expected = 1 / ((1 - smooth) / rope.factor + smooth)
    require(
        np.allclose(divisors, expected, rtol=1e-4),
        "tensor",
        FREQUENCIES,
        "is not Llama 3's scaling (low 1, high 4, original context 8192), the only one supported",
        "use the safetensors checkpoint, whose config names the scaling",
    )
    return rope


def _short(value: Any) -> float:
    """The shortest decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _value(header: GgufHeader, key: str, default: float | None) -> Any:
    full = f"{header.metadata['general.architecture']}.{key}"
    value = header.metadata.get(full, default)
    require(value is not None, full, value, "is missing", _CHECK)
    # Per-layer arrays belong to models whose layers differ, which these are not.
    require(
        isinstance(value, int | float) and not isinstance(value, bool),
        full,
        value,
        "is no number",
        _CHECK,
    )
    return value


def _integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = _value(header, key, default)
    full = f"{header.metadata['general.architecture']}.{key}"
    require(isinstance(value, int), full, value, "is no integer", _CHECK)
    return int(value)


def _count(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = _integer(header, key, default)
    full = f"{header.metadata['general.architecture']}.{key}"
    require(1 <= value < 2**31, full, value, "is no size of a model", _CHECK)
    return value


def _number(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = _value(header, key, default)
    full = f"{header.metadata['general.architecture']}.{key}"
    # Of float64 values, too, it is the float32 that counts.
    require(abs(value) <= _LARGEST, full, value, "is no finite float32 number", _CHECK)
    return _short(value)
