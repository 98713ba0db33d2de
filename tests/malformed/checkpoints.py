"""Malformed checkpoints: Hugging Face directories, GGUF files, directories of our own."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

import jspec
from jspec import checkpoints
from tests.malformed.cases import Case, World, begins, given, raised, shown, write_json

_HUGE = 10**400
_PUBLISHED = "published with the weights"
_SUPPORTED = "LlamaForCausalLM"
_ROPE = "check the checkpoint's rope scaling"
_AGAIN = "fetch the file again"

_GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "hidden_act": ..., "rope_theta": 1e4}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 2.0}

# Changes to config.json (... takes a key out); field and value; remedy.
_CONFIGS: list[tuple[dict[str, Any], str, Any, str]] = [
    *(
        ({key: ...}, key, None, _PUBLISHED)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    ),
    *(
        ({"num_hidden_layers": value}, "num_hidden_layers", value, _PUBLISHED)
        for value in (None, 0, -1, "2", 2.0, True, [2], 10**9, 2**31, _HUGE)
    ),
    ({"vocab_size": 0}, "vocab_size", 0, _PUBLISHED),
    ({"hidden_size": "64"}, "hidden_size", "64", _PUBLISHED),
    ({"hidden_size": -64}, "hidden_size", -64, _PUBLISHED),
    ({"intermediate_size": {}}, "intermediate_size", {}, _PUBLISHED),
    ({"num_attention_heads": 0}, "num_attention_heads", 0, _PUBLISHED),
    ({"num_attention_heads": 5, "head_dim": ...}, "num_attention_heads", 5, _PUBLISHED),
    ({"num_key_value_heads": 3}, "num_kv_heads", 3, "check the checkpoint's config"),
    ({"num_key_value_heads": -2}, "num_key_value_heads", -2, _PUBLISHED),
    ({"head_dim": 31}, "head_dim", 31, "check the checkpoint's config"),
    ({"head_dim": -32}, "head_dim", -32, "check the checkpoint's config"),
    ({"head_dim": 32.5}, "head_dim", 32.5, _PUBLISHED),
    ({"max_position_embeddings": 0}, "max_position_embeddings", 0, _PUBLISHED),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings", 10**30, _PUBLISHED),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps", "tiny", _PUBLISHED),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps", math.nan, _PUBLISHED),
    ({"rms_norm_eps": -1e-5}, "norm_eps", -1e-5, "check the checkpoint's config"),
    ({"rope_theta": math.inf}, "rope_theta", math.inf, _PUBLISHED),
    ({"rope_theta": _HUGE}, "rope_theta", _HUGE, _PUBLISHED),
    ({"rope_theta": 0}, "rope.theta", 0.0, "give a base > 1"),
    ({"rope_theta": [1e4]}, "rope_theta", [1e4], _PUBLISHED),
    ({"rope_scaling": "linear"}, "rope_scaling", "linear", _PUBLISHED),
    ({"rope_scaling": [2.0]}, "rope_scaling", [2.0], _PUBLISHED),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_type", "dynamic", "llama3 or yarn"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type", ["yarn"], "llama3 or yarn"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor", None, _PUBLISHED),
    ({"rope_scaling": _YARN | {"factor": 0.5}}, "rope.factor", 0.5, "give a factor"),
    ({"rope_scaling": _YARN | {"factor": 1e308}}, "rope.factor", 1e308, "give a factor"),
    ({"rope_scaling": _YARN | {"beta_fast": 0}}, "rope.beta_fast", 0.0, _ROPE),
    ({"rope_scaling": _YARN | {"mscale": 1.0}}, "mscale", 1.0, "llama3 or yarn"),
    ({"rope_scaling": _LLAMA3 | {"high_freq_factor": 1}}, "rope.high_freq_factor", 1.0, _ROPE),
    ({"rope_scaling": _LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor", None, _PUBLISHED),
    (
        {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 0}},
        "original_max_position_embeddings",
        0,
        _PUBLISHED,
    ),
    ({"rope_parameters": 3}, "rope_scaling", 3, _PUBLISHED),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5, "whole heads"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu", "with silu"),
    ({"hidden_act": ["silu"]}, "hidden_act", ["silu"], "with silu"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "no", _PUBLISHED),
    ({"attention_bias": 0}, "attention_bias", 0, _PUBLISHED),
    ({"mlp_bias": True}, "mlp_bias", True, "without biases"),
    ({"sliding_window": 64}, "sliding_window", 64, "without sliding windows"),
    ({"sliding_window": "64"}, "sliding_window", "64", _PUBLISHED),
    ({"layer_types": "full_attention"}, "layer_types", "full_attention", _PUBLISHED),
    ({"layer_types": [{}, {}]}, "layer_types", {}, "without sliding windows"),
    ({"layer_types": ["full_attention"]}, "layer_types", ["full_attention"], _PUBLISHED),
    ({"eos_token_id": "2"}, "eos_token_id", "2", "id of the vocabulary"),
    ({"eos_token_id": [[2]]}, "eos_token_id", [2], "id of the vocabulary"),
    ({"eos_token_id": -1}, "eos_token_id", -1, "id of the vocabulary"),
    ({"eos_token_id": 2**40}, "eos_token_id", 2**40, "published with these weights"),
    ({"architectures": ["PhiForCausalLM"]}, "architecture", "PhiForCausalLM", _SUPPORTED),
    ({"architectures": [3]}, "architectures", [3], _PUBLISHED),
    ({"architectures": [["x"]]}, "architectures", [["x"]], _PUBLISHED),
    ({"architectures": {"x": 1}}, "architectures", {"x": 1}, _PUBLISHED),
    ({"architectures": [], "model_type": "bert"}, "architecture", None, _SUPPORTED),
    ({"architectures": ..., "model_type": {}}, "architecture", None, _SUPPORTED),
    ({"model_type": "mamba"}, "model_type", "mamba", _SUPPORTED),
    ({"num_local_experts": 8}, "num_local_experts", 8, _SUPPORTED),
    ({"kv_lora_rank": 512}, "kv_lora_rank", 512, _SUPPORTED),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "awq", "GGUF"),
    ({"quantization_config": "gptq"}, "quantization_config", "gptq", "GGUF"),
    (
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": [1]},
        "text_config",
        [1],
        _PUBLISHED,
    ),
    (_GEMMA2 | {"sliding_window_pattern": 0}, "sliding_window_pattern", 0, _PUBLISHED),
    (_GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", 0.0, _PUBLISHED),
    (_GEMMA2 | {"attn_logit_softcapping": 0}, "attention_softcap", 0.0, "give None"),
    (_GEMMA2 | {"sliding_window": -1}, "sliding_window", -1, _PUBLISHED),
    # The weights are those of another config.
    ({"vocab_size": 300}, "tensor", "model.embed_tokens.weight", "published with these weights"),
    ({"intermediate_size": 2**30}, "tensor", ..., "published with these weights"),
    ({"num_hidden_layers": 3}, "tensor", "model.layers.2.input_layernorm.weight", "all its files"),
    ({"num_hidden_layers": 1}, "tensor", ..., "as it was published"),
    ({"num_hidden_layers": 9999}, "num_layers", 9999, "published with these weights"),
    ({"tie_word_embeddings": True}, "tensor", "lm_head.weight", "tie_word_embeddings to false"),
]

_INDEX = "model.safetensors.index.json"


def _header(header: Any, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


def _entry(dtype: str, shape: list[int], end: int) -> bytes:
    return _header({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}) + b"\0" * 4


# Files put in place of the checkpoint's own (None: a directory; ...: nothing); remedy.
_FILES: list[tuple[str, dict[str, Any], str]] = [
    ("no config", {"config.json": ...}, "give a directory with config.json"),
    ("config a directory", {"config.json": None}, "check the file"),
    ("config empty", {"config.json": b""}, _AGAIN),
    ("config cut", {"config.json": b'{"vocab_size": 257,'}, _AGAIN),
    ("config Latin", {"config.json": b'{"name": "\xfc"}'}, _AGAIN),
    ("config UTF-16", {"config.json": "{}".encode("utf-16")}, _AGAIN),
    ("config deep", {"config.json": b"[" * 100_000}, _AGAIN),
    ("config a list", {"config.json": b"[]"}, "fetch it again"),
    ("config null", {"config.json": b"null"}, "fetch it again"),
    ("generation config", {"generation_config.json": b"{"}, _AGAIN),
    ("no weights", {"model.safetensors": ...}, "with its weights"),
    ("weights a directory", {"model.safetensors": None}, _AGAIN),
    ("weights empty", {"model.safetensors": b""}, _AGAIN),
    ("weights short", {"model.safetensors": b"\x08\0\0"}, _AGAIN),
    ("weights header huge", {"model.safetensors": _header({}, 2**62)}, _AGAIN),
    ("weights header long", {"model.safetensors": _header({}, 2**20)}, _AGAIN),
    ("weights header no JSON", {"model.safetensors": _header(b"{{}}")}, _AGAIN),
    ("weights header list", {"model.safetensors": _header([1])}, _AGAIN),
    ("weights header Latin", {"model.safetensors": _header(b'{"\xfc": 1}')}, _AGAIN),
    ("weights without data", {"model.safetensors": _entry("F32", [9], 36)}, _AGAIN),
    ("weights overlong", {"model.safetensors": _entry("F32", [2**40, 2**40], 4)}, _AGAIN),
    ("weights too wide", {"model.safetensors": _entry("F32", [2], 4)}, _AGAIN),
    ("weights unknown dtype", {"model.safetensors": _entry("F3", [1], 4)}, _AGAIN),
    (
        "pickle",
        {"model.safetensors": ..., "pytorch_model.bin": b"\x80\x04."},
        "convert it to safetensors",
    ),
    *(
        (f"index {name}", {"model.safetensors": ..., _INDEX: text}, remedy)
        for name, text, remedy in (
            ("no JSON", b"{", _AGAIN),
            ("empty", b"{}", _AGAIN),
            ("list", b'{"weight_map": []}', _AGAIN),
            ("numbers", b'{"weight_map": {"x": 1}}', _AGAIN),
            ("missing file", b'{"weight_map": {"x": "no.safetensors"}}', "with all its files"),
            ("itself", b'{"weight_map": {"x": "config.json"}}', _AGAIN),
        )
    ),
]
# Names in the index that are no file's.
_OUTSIDE = ("../model.safetensors", "..", "", "/etc/passwd", "a/b.safetensors")

_Q = "model.layers.0.self_attn.q_proj.weight"
# A tensor in place of the stored one, None for none; remedy.
_TENSORS: list[tuple[str, np.ndarray[Any, Any] | None, str]] = [
    (_Q, None, "with all its files"),
    (_Q, np.zeros((64, 128), np.float32), "published with these weights"),
    (_Q, np.zeros((8192,), np.float32), "published with these weights"),
    (_Q, np.zeros((0, 64), np.float32), "published with these weights"),
    (_Q, np.zeros((128, 64), np.int8), "F64, F32, F16, BF16"),
    (_Q, np.zeros((128, 64), np.complex64), "F64, F32, F16, BF16"),
    ("model.norm.weight", None, "with all its files"),
    ("model.layers.7.mlp.up_proj.weight", np.ones((96, 64), np.float32), "as it was published"),
    ("model.layers.0.self_attn.q_proj.bias", np.ones(128, np.float32), "as it was published"),
    ("something.else", np.ones(3, np.float32), "as it was published"),
]


def _config(changes: dict[str, Any]) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied()
        write_json(path / "config.json", changes)
        return jspec.load(path)

    return run


def _files(files: dict[str, Any]) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied()
        for name, data in files.items():
            (path / name).unlink(missing_ok=True)
            if data is None:
                (path / name).mkdir()
            elif data is not ...:
                (path / name).write_bytes(data)
        return jspec.load(path)

    return run


def _tensor(name: str, value: np.ndarray[Any, Any] | None) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied() / "model.safetensors"
        tensors = load_file(path)
        tensors.pop(name, None)
        save_file(tensors if value is None else tensors | {name: value}, path)
        return jspec.load(path.parent)

    return run


def _damaged_weights(keep: Callable[[int], int]) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied() / "model.safetensors"
        os.truncate(path, keep(path.stat().st_size))
        return jspec.load(path.parent)

    return run


def _saved(w: World) -> Path:
    path = w.folder / "saved"
    checkpoints.save(path, w.model.config, w.model.params, tokenizer=w.model.tokenizer)
    return path


def _manifest(changes: dict[str, Any], config: dict[str, Any]) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = _saved(w)
        manifest = json.loads((path / "jspec.json").read_text())
        changed = {"config": manifest["config"] | config} | changes
        write_json(path / "jspec.json", changed)
        return checkpoints.read_config(path)

    return run


def _without_params(w: World) -> object:
    path = _saved(w)
    shutil.rmtree(path / "params")
    return jspec.load(path)


def _empty_params(w: World) -> object:
    path = _saved(w)
    shutil.rmtree(path / "params")
    (path / "params").mkdir()
    return jspec.load(path)


def _other_params(w: World) -> object:
    path = _saved(w)
    manifest = json.loads((path / "jspec.json").read_text())
    write_json(path / "jspec.json", {"config": manifest["config"] | {"num_layers": 1}})
    return jspec.load(path)


_VERSION = "the version that wrote it"
# Changes to jspec.json and to its config; field and value; remedy.
_MANIFESTS: list[tuple[dict[str, Any], dict[str, Any], str, Any, str]] = [
    ({"format": 99}, {}, "format", 99, _VERSION),
    ({"format": ...}, {}, "format", None, _VERSION),
    ({"config": ...}, {}, "path", ..., _VERSION),
    ({"config": [1]}, {}, "path", ..., _VERSION),
    ({"config": "ab"}, {}, "path", ..., _VERSION),
    ({"config": {}}, {}, "path", ..., _VERSION),
    ({"eos_token_ids": ...}, {}, "path", ..., _VERSION),
    ({"eos_token_ids": 3}, {}, "path", ..., _VERSION),
    ({"eos_token_ids": ["3"]}, {}, "eos_token_ids", "3", "give an integer"),
    ({}, {"rope": 3}, "path", ..., _VERSION),
    ({}, {"rope": {"theta": "x"}}, "rope.theta", "x", _ROPE),
    ({}, {"rope": {"theatre": 1}}, "path", ..., _VERSION),
    ({}, {"windows": 3}, "path", ..., _VERSION),
    ({}, {"windows": [[1], 2]}, "windows", [1], "give an integer"),
    ({}, {"num_layers": "2"}, "num_layers", "2", "give an integer"),
    ({}, {"num_layers": 0}, "num_layers", 0, "check the checkpoint's config"),
    ({}, {"of_tomorrow": 1}, "path", ..., _VERSION),
]


def cases() -> list[Case]:
    """Return the table."""
    found = [
        (f"config {shown(changes)}", _config(changes), begins(field, value), remedy)
        for changes, field, value, remedy in _CONFIGS
    ]
    found += [(f"files {name}", _files(files), "path=", remedy) for name, files, remedy in _FILES]
    found += [
        (
            f"index names {name!r}",
            _files(
                {"model.safetensors": ..., _INDEX: json.dumps({"weight_map": {"x": name}}).encode()}
            ),
            given("weight_map", name),
            "a source that you trust",
        )
        for name in _OUTSIDE
    ]
    found += [
        (
            f"tensor {name} {value if value is None else (value.dtype, value.shape)}",
            _tensor(name, value),
            given("tensor", name),
            remedy,
        )
        for name, value, remedy in _TENSORS
    ]
    found += [
        (f"weights cut {name}", _damaged_weights(keep), "path=", _AGAIN)
        for name, keep in (
            ("in the header", lambda size: 100),
            ("in the data", lambda size: size // 2),
            ("by a byte", lambda size: size - 1),
        )
    ]
    found += [
        (
            f"jspec.json {shown(changes | config)}",
            _manifest(changes, config),
            begins(field, v),
            remedy,
        )
        for changes, config, field, v, remedy in _MANIFESTS
    ]
    found += [
        ("saved without parameters", _without_params, "path=", "the whole checkpoint directory"),
        ("saved with no parameters", _empty_params, "path=", "copy it again"),
        ("saved with others", _other_params, "tensor='layers.1.", "config of one model"),
    ]
    return [Case(name, raised(run), start, remedy) for name, run, start, remedy in found]
