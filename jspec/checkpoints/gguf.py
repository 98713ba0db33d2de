"""Architecture and weights of a GGUF file, dequantised while they are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import gguf.quants
import numpy as np

from jspec.checkpoints.gguf_header import GgufHeader, GgufTensor
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError, require

SUPPORTED = ("llama",)
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
_REMEDY = f"use a file of a supported architecture: {', '.join(SUPPORTED)}"
_CHECK = "convert the model to GGUF again"
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FREQUENCIES = "rope_freqs.weight"


def read_config(header: GgufHeader) -> ModelConfig:
    """Return the architecture that the metadata and the tensor directory describe.

    Raises:
        InputError: a key is missing, or the file asks for something the model does not compute.
    """
    _refuse_unsupported(header.metadata)
    num_heads = _integer(header, "attention.head_count")
    hidden_size = _integer(header, "embedding_length")
    head_dim = _integer(header, "attention.key_length", hidden_size // max(1, num_heads))
    value_dim = _integer(header, "attention.value_length", head_dim)
    rotated = _integer(header, "rope.dimension_count", head_dim)
    for key, size in (("attention.value_length", value_dim), ("rope.dimension_count", rotated)):
        require(
            size == head_dim,
            f"llama.{key}",
            size,
            f"differs from the head size {head_dim}",
            _REMEDY,
        )
    max_context = _integer(header, "context_length")
    window = _integer(header, "attention.sliding_window", 0)
    require(
        not 0 < window < max_context,
        "llama.attention.sliding_window",
        window,
        f"is smaller than the context ({max_context}), and windows are not supported",
        _REMEDY,
    )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor", "token_embd.weight", "is missing", "fetch the file again")
    return ModelConfig(
        name="llama",
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_integer(header, "feed_forward_length"),
        num_layers=_integer(header, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_integer(header, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=max_context,
        norm_eps=_number(header, "attention.layer_norm_rms_epsilon"),
        rope=_rope(header, head_dim),
        tie_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
    )


def read_eos_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """Return the ids that end a sequence: end of sequence, of turn and of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids: list[int] = []
    for key in keys:
        value = header.metadata.get(f"tokenizer.ggml.{key}")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        require(isinstance(token, int), "eos_token_id", token, "is not a token id", _CHECK)
    return tuple(dict.fromkeys(ids))


class GgufSource:
    """The tensors of one file, as a `WeightSource` with float32 values.

    The converter stores the rows of each query and key head in the order that pairs neighbouring
    dimensions for rotation; `read` returns them in the order that pairs the two halves.
    """

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        with header.path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._head_dim = config.head_dim
        self._stored = {
            _hugging_face_name(name): name for name in header.tensors if name != _FREQUENCIES
        }
        self._tensors = header.tensors
        for name, tensor in header.tensors.items():
            _refuse_storage(name, tensor)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every stored tensor."""
        return {name: self._tensors[stored].shape for name, stored in self._stored.items()}

    def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows start:stop as float32."""
        tensor = self._tensors[self._stored[name]]
        # A vector is one row of blocks; a slice of it need not be whole blocks.
        rows = 1 if len(tensor.shape) == 1 else math.prod(tensor.shape[:-1])
        raw = np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.offset)
        raw = raw.reshape(rows, -1)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return _dequantize(raw[self._stored_rows(start, stop)], tensor)
        if len(tensor.shape) > 1:
            return _dequantize(raw[start:stop], tensor)
        values: np.ndarray[Any, Any] = _dequantize(raw, tensor).reshape(-1)
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            values = values[self._stored_rows(start, stop)]
            return values
        return values[start:stop]

    def stored_name(self, name: str) -> str:
        """Return the file's name of the tensor that Hugging Face calls `name`."""
        return _gguf_name(name)

    def release(self) -> None:
        """Drop the file's pages that were read; reading again maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def _stored_rows(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows of the file that hold rows start:stop in half-rotation order.

        Within a head, dimension t * H/2 + i of the half rotation is stored as 2 * i + t.
        """
        head, dim = np.divmod(np.arange(start, stop), self._head_dim)
        half, pair = np.divmod(dim, self._head_dim // 2)
        rows: np.ndarray[Any, Any] = head * self._head_dim + 2 * pair + half
        return rows


def _dequantize(raw: np.ndarray[Any, Any], tensor: GgufTensor) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = gguf.quants.dequantize(np.ascontiguousarray(raw), tensor.kind)
    return values


def _refuse_storage(name: str, tensor: GgufTensor) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    try:  # one block of zeros tells whether the package knows the type
        gguf.quants.dequantize(
            np.zeros((1, block_bytes * (4 if block == 1 else 1)), np.uint8), tensor.kind
        )
    except NotImplementedError:
        raise InputError(
            "tensor",
            name,
            f"is stored as {tensor.kind.name}, which is not supported",
            "quantise the model to another type",
        ) from None


def _hugging_face_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor, or `name` itself when there is none."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in _TOP.items():
        if stem == ours:
            return f"{theirs}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk":
        for theirs, ours in _LAYER.items():
            if parts[2] == ours:
                return f"model.layers.{parts[1]}.{theirs}.{kind}"
    return name


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".", 3)
    if stem.startswith("model.layers.") and parts[3] in _LAYER:
        return f"blk.{parts[2]}.{_LAYER[parts[3]]}.{kind}"
    return name


def _refuse_unsupported(metadata: Mapping[str, Any]) -> None:
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
        return
    raise InputError("general.architecture", architecture, problem, _REMEDY)


def _rope(header: GgufHeader, head_dim: int) -> RopeConfig:
    theta = _number(header, "rope.freq_base", 10000.0)
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    old_factor = _number(header, "rope.scale_linear", 1.0)  # the key of files before 2023-12
    frequencies = header.tensors.get(_FREQUENCIES)
    if kind == "linear" or (kind == "none" and old_factor != 1):
        factor = _number(header, "rope.scaling.factor", old_factor)
        require(
            frequencies is None,
            "tensor",
            _FREQUENCIES,
            "scales positions that llama.rope.scaling.type scales too",
            _CHECK,
        )
        return RopeConfig(theta=theta, scaling="linear", factor=factor)
    require(
        kind == "none",
        "llama.rope.scaling.type",
        kind,
        "is not supported",
        "use a file with none, linear or Llama 3's frequencies",
    )
    if frequencies is None:
        return RopeConfig(theta=theta)
    with header.path.open("rb") as file:
        file.seek(frequencies.offset)
        raw = np.frombuffer(file.read(frequencies.num_bytes), np.uint8)
    divisors = _dequantize(raw.reshape(1, -1), frequencies).reshape(-1)
    return _llama3_rope(divisors, theta, head_dim)


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
        divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4),
        "tensor",
        _FREQUENCIES,
        "is not Llama 3's scaling (low 1, high 4, original context 8192), the only one supported",
        "use the safetensors checkpoint, whose config names the scaling",
    )
    return rope


def _short(value: Any) -> float:
    """The shortest decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _value(header: GgufHeader, key: str, default: float | None) -> Any:
    full = f"llama.{key}"
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
    return int(_value(header, key, default))


def _number(header: GgufHeader, key: str, default: float | None = None) -> float:
    return _short(_value(header, key, default))
