"""Tiny random Llama checkpoints in the published formats, and the tree they must load as.

The fused layout is written out index by index from the documented shapes, and the row order of GGUF
queries and keys as its converter makes it: nothing here uses the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from jspec.config import ModelConfig

Arrays = dict[str, np.ndarray[Any, Any]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 2,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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


def random_tensors(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> Arrays:
    """Return float32 tensors by Hugging Face name."""
    rng = np.random.default_rng(seed)
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, g = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (d,),
            f"model.layers.{i}.self_attn.q_proj.weight": (n * h, d),
            f"model.layers.{i}.self_attn.k_proj.weight": (g * h, d),
            f"model.layers.{i}.self_attn.v_proj.weight": (g * h, d),
            f"model.layers.{i}.self_attn.o_proj.weight": (d, n * h),
            f"model.layers.{i}.post_attention_layernorm.weight": (d,),
            f"model.layers.{i}.mlp.gate_proj.weight": (f, d),
            f"model.layers.{i}.mlp.up_proj.weight": (f, d),
            f"model.layers.{i}.mlp.down_proj.weight": (d, f),
        }
        if config["attention_bias"]:
            shapes |= {
                f"model.layers.{i}.self_attn.q_proj.bias": (n * h,),
                f"model.layers.{i}.self_attn.k_proj.bias": (g * h,),
                f"model.layers.{i}.self_attn.v_proj.bias": (g * h,),
            }
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return {
        name: rng.standard_normal(shape).astype(np.float32) * 0.1 for name, shape in shapes.items()
    }


def fused(tensors: Arrays, config: ModelConfig) -> Arrays:
    """Return the tensors of the documented parameter tree by dotted path, in float32."""
    g_count, per, h = config.num_kv_heads, config.queries_per_kv, config.head_dim
    tree = {
        "embedding": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        tree["head"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        for kind, name in (("weight", "qkv"), ("bias", "qkv_bias")):
            if f"{old}self_attn.q_proj.{kind}" not in tensors:
                continue
            q, k, v = (tensors[f"{old}self_attn.{x}_proj.{kind}"] for x in "qkv")
            groups = []
            for g in range(g_count):
                heads = [q[(g * per + j) * h : (g * per + j + 1) * h] for j in range(per)]
                groups.append([*heads, k[g * h : (g + 1) * h], v[g * h : (g + 1) * h]])
            tree[new + name] = np.array(groups)
        tree |= {
            new + "attention_norm": tensors[old + "input_layernorm.weight"],
            new + "attention_out": tensors[old + "self_attn.o_proj.weight"],
            new + "mlp_norm": tensors[old + "post_attention_layernorm.weight"],
            new + "gate_up": np.stack(
                [tensors[old + "mlp.gate_proj.weight"], tensors[old + "mlp.up_proj.weight"]]
            ),
            new + "down": tensors[old + "mlp.down_proj.weight"],
        }
    return tree


def write_huggingface(
    directory: Path,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    config: Mapping[str, Any] = CONFIG,
    *,
    shards: int = 1,
) -> Path:
    """Write config.json and the weights, in as many files as `shards`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        filename = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(part, directory / filename)
        weight_map |= dict.fromkeys(part, filename)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def interleave(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return query or key rows in GGUF's order: the converter's `permute`."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    config: Mapping[str, Any] = CONFIG,
    *,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    raw: Mapping[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file.

    Args:
        path: the file.
        tensors: float32 values by Hugging Face name, stored as they are.
        config: the config.json that they belong to.
        extra: further float32 tensors by GGUF name.
        raw: stored blocks by GGUF name, in place of what `tensors` holds for it.
        metadata: further keys; None removes one that would be written.
        architecture: general.architecture, and the prefix of the keys.
    """
    keys = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{architecture}.rope.freq_base": float(config["rope_theta"]),
        f"{architecture}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    } | dict(metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add(writer, key, value)
    raw = raw or {}
    for name, value in tensors.items():
        if gguf_name(name) in raw:
            continue
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = name.split(".")[-2]
        stored = interleave(value, config[heads[part]]) if part in heads else value
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    for name, (blocks, kind) in raw.items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
