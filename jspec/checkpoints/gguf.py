"""Weights of a GGUF file, dequantised while they are read."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import gguf.quants
import numpy as np

from jspec.checkpoints.gguf_header import GgufHeader, GgufTensor
from jspec.config import ModelConfig
from jspec.errors import InputError

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The same file's names mean other norms where each block has one after it too.
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Its converter reorders the rows of queries and keys; those of the others leave them.
_INTERLEAVED = "llama"
FREQUENCIES = "rope_freqs.weight"


class GgufSource:
    """The tensors of one file, as a `WeightSource` with float32 values.

    `read` returns what the Hugging Face checkpoint has. Llama's converter stores the rows of each
    query and key head in the order that pairs neighbouring dimensions for rotation, not the two
    halves; Gemma's converters add 1 to the weights of norms.
    """

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        with header.path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._head_dim = config.head_dim
        self._interleaved = header.metadata.get("general.architecture") == _INTERLEAVED
        self._norm_offset = config.norm_unit_offset
        self._layer_names = _LAYER | (_POST_NORMS if config.post_norms else {})
        self._stored = {
            self._hugging_face_name(name): name for name in header.tensors if name != FREQUENCIES
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
        if self._interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            return dequantize(raw[self._stored_rows(start, stop)], tensor)
        if len(tensor.shape) > 1:
            return dequantize(raw[start:stop], tensor)
        values: np.ndarray[Any, Any] = dequantize(raw, tensor).reshape(-1)
        if self._interleaved and name.endswith(("q_proj.bias", "k_proj.bias")):
            values = values[self._stored_rows(start, stop)]
            return values
        if self._norm_offset and name.endswith("norm.weight"):
            # Exact: adding the 1 again gives the very number that the file holds.
            values = values - np.float32(1)
        return values[start:stop]

    def stored_name(self, name: str) -> str:
        """Return the file's name of the tensor that Hugging Face calls `name`."""
        return self._gguf_name(name)

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

    def _hugging_face_name(self, name: str) -> str:
        """Return the Hugging Face name of a GGUF tensor, or `name` itself when there is none."""
        stem, _, kind = name.rpartition(".")
        for theirs, ours in _TOP.items():
            if stem == ours:
                return f"{theirs}.{kind}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk":
            for theirs, ours in self._layer_names.items():
                if parts[2] == ours:
                    return f"model.layers.{parts[1]}.{theirs}.{kind}"
        return name

    def _gguf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        parts = stem.split(".", 3)
        if stem.startswith("model.layers.") and parts[3] in self._layer_names:
            return f"blk.{parts[2]}.{self._layer_names[parts[3]]}.{kind}"
        return name


def dequantize(raw: np.ndarray[Any, Any], tensor: GgufTensor) -> np.ndarray[Any, Any]:
    """Return the float32 values of some stored rows of blocks."""
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
