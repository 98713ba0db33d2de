"""Malformed GGUF files: their metadata, and their bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import jspec
from tests.malformed.cases import Case, World, begins, given, raised, shown
from tests.oracles import tiny_checkpoints as tiny
from tests.oracles.tiny_vocabularies import byte_level

_AGAIN = "fetch the file again"
_CONVERT = "convert the model to GGUF again"
_FREQUENCIES = "rope_freqs.weight"

_GGUF_CONFIG = tiny.CONFIG | {"vocab_size": 259, "num_hidden_layers": 1}
_METADATA = byte_level([("a", "b")]) | {"tokenizer.chat_template": "{{ messages }}"}
# Metadata in place of the file's own, None for none; field; value; remedy.
_KEYS: list[tuple[dict[str, Any], str, Any, str]] = [
    *(
        ({f"llama.{key}": None}, f"llama.{key}", None, _CONVERT)
        for key in (
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.layer_norm_rms_epsilon",
        )
    ),
    ({"llama.block_count": 0}, "llama.block_count", 0, _CONVERT),
    ({"llama.block_count": 2**31}, "llama.block_count", 2**31, _CONVERT),
    ({"llama.block_count": 2**30}, "llama.block_count", 2**30, _CONVERT),
    ({"llama.block_count": "1"}, "llama.block_count", "1", _CONVERT),
    ({"llama.block_count": 1.5}, "llama.block_count", 1.5, _CONVERT),
    ({"llama.block_count": True}, "llama.block_count", True, _CONVERT),
    ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count", [4, 4], _CONVERT),
    ({"llama.attention.head_count_kv": 3}, "num_kv_heads", 3, "check the checkpoint's config"),
    ({"llama.attention.key_length": 0}, "llama.attention.value_length", 32, "supported"),
    ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count", 16, "supported"),
    ({"llama.rope.freq_base": math.nan}, "llama.rope.freq_base", math.nan, _CONVERT),
    ({"llama.rope.freq_base": math.inf}, "llama.rope.freq_base", math.inf, _CONVERT),
    ({"llama.rope.freq_base": -1.0}, "rope.theta", -1.0, "give a base"),
    ({"llama.rope.scaling.type": "dynamic"}, "llama.rope.scaling.type", "dynamic", "yarn"),
    ({"llama.rope.scaling.type": 3}, "llama.rope.scaling.type", 3, "yarn"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor", None, _CONVERT),
    ({"llama.expert_count": 8}, "general.architecture", "llama", "supported architecture"),
    ({"general.alignment": 0}, "path", ..., _AGAIN),
    ({"general.alignment": "32"}, "path", ..., _AGAIN),
    ({"general.alignment": 2**31}, "path", ..., _AGAIN),
    ({"split.count": 3}, "path", ..., "llama-gguf-split"),
    ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id", "x", _CONVERT),
    ({"tokenizer.ggml.eos_token_id": 259}, "tokenizer.ggml.eos_token_id", 259, _CONVERT),
    ({"tokenizer.ggml.eot_token_id": 2**32 - 1}, "eos_token_id", 2**32 - 1, "with these weights"),
]


def write(w: World, metadata: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a whole file, but for what the arguments change."""
    found = _METADATA | (metadata or {})
    tensors = tiny.random_tensors(_GGUF_CONFIG)
    return tiny.write_gguf(w.folder / "m.gguf", tensors, _GGUF_CONFIG, metadata=found, **more)


def _keys(metadata: dict[str, Any]) -> Callable[[World], object]:
    return lambda w: jspec.load(write(w, metadata))


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = write(w)
        path.write_bytes(change(path.read_bytes()))
        return jspec.load(path)

    return run


def _at(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + value + data[offset + len(value) :]


def _after(key: bytes, skip: int, value: bytes) -> Callable[[bytes], bytes]:
    """Change what stands `skip` bytes after the first occurrence of `key`."""
    return lambda data: _at(data.index(key) + len(key) + skip, value)(data)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


_TOKENS, _ARCHITECTURE = b"tokenizer.ggml.tokens", b"general.architecture"
_NAME = b"blk.0.attn_q.weight"
# Bytes in place of the file's own; remedy. All name the path.
_DAMAGES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("magic", _at(0, b"GGML"), "give a .gguf file"),
    ("big endian", _at(4, b"\0\0\0\3"), "little endian"),
    ("version 1", _at(4, b"\1\0\0\0"), "version 3"),
    ("version 99", _at(4, b"\x63\0\0\0"), "version 3"),
    ("tensors 2**63", _at(8, _u64(2**63)), _AGAIN),
    ("keys 2**63", _at(16, _u64(2**63)), _AGAIN),
    ("no keys", _at(16, _u64(0)), _AGAIN),
    ("key's length 2**62", _at(24, _u64(2**62)), _AGAIN),
    ("key no UTF-8", _at(32, b"\xff"), _AGAIN),
    ("unknown type of a value", _after(_ARCHITECTURE, 0, b"\x63\0\0\0"), _AGAIN),
    ("string 2**60", _after(_ARCHITECTURE, 4, _u64(2**60)), _AGAIN),
    ("array of arrays", _after(_TOKENS, 4, b"\x09\0\0\0"), _AGAIN),
    ("array of unknown", _after(_TOKENS, 4, b"\x63\0\0\0"), _AGAIN),
    ("array of 2**60", _after(_TOKENS, 8, _u64(2**60)), _AGAIN),
    ("array of numbers 2**60", _after(_TOKENS, 4, b"\x0a\0\0\0" + _u64(2**60)), _AGAIN),
    ("tensor of 2**31 dimensions", _after(_NAME, 0, struct.pack("<I", 2**31)), _AGAIN),
    ("tensor of no dimension", _after(_NAME, 0, struct.pack("<I", 0)), _AGAIN),
    ("tensor 2**62 wide", _after(_NAME, 4, _u64(2**62)), _AGAIN),
    ("tensor of unknown type", _after(_NAME, 20, struct.pack("<I", 999)), _AGAIN),
    ("tensor beyond the file", _after(_NAME, 24, _u64(2**62)), _AGAIN),
    *(
        (f"cut to {size}", lambda data, size=size: data[:size], _AGAIN)
        for size in (5, 8, 23, 24, 40, 100, 1000, 5000)
    ),
    ("cut in the tensors", lambda data: data[: len(data) // 2], _AGAIN),
    ("cut by a byte", lambda data: data[:-1], _AGAIN),
]


def _frequencies(value: np.ndarray[Any, Any]) -> Callable[[World], object]:
    return lambda w: jspec.load(write(w, extra={_FREQUENCIES: value.astype(np.float32)}))


def _unsupported(w: World) -> object:
    kind = gguf.GGMLQuantizationType.I32
    raw = {"output_norm.weight": (np.ones(64, np.int32), kind)}
    return jspec.load(write(w, raw=raw))


def _architecture(w: World) -> object:
    path = write(w)
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba", 1))
    return jspec.load(path)


def cases() -> list[Case]:
    """Return the table."""
    found = [
        (f"gguf {shown(metadata)}", _keys(metadata), begins(field, value), remedy)
        for metadata, field, value, remedy in _KEYS
    ]
    found += [
        (f"gguf {name}", _bytes(change), "path=", remedy) for name, change, remedy in _DAMAGES
    ]
    tensor = given("tensor", _FREQUENCIES)
    found += [
        ("gguf rope_freqs zeros", _frequencies(np.zeros(16)), tensor, _CONVERT),
        ("gguf rope_freqs NaN", _frequencies(np.full(16, math.nan)), tensor, _CONVERT),
        ("gguf rope_freqs short", _frequencies(np.ones(3)), tensor, _CONVERT),
        ("gguf rope_freqs other", _frequencies(np.arange(1, 17)), tensor, "safetensors"),
        ("gguf unsupported type", _unsupported, "tensor='output_norm.weight'", "another type"),
        ("gguf recurrent", _architecture, "general.architecture='mamba'", "supported"),
    ]
    return [Case(name, raised(run), start, remedy) for name, run, start, remedy in found]


def absurd() -> list[Callable[[World], object]]:
    """Return the loads of files whose counts and lengths no memory would hold."""
    return [_bytes(change) for name, change, _ in _DAMAGES if "2**" in name]
