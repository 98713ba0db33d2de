"""Writes GGUF files of each family as llama.cpp's converter does, from Hugging Face checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.oracles import tiny_checkpoints as tiny

NAMES = tiny.GGUF_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the converter writes, without the architecture before them."""
    rope = config["rope_parameters"]
    whole = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": whole["rope_theta"],
    }
    if whole["rope_type"] != "default":
        keys |= {
            "rope.scaling.type": whole["rope_type"],
            "rope.scaling.factor": whole["factor"],
        }
    if whole["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.original_context_length": whole["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": whole["beta_fast"],
        }
    if architecture in ("gemma2", "gemma3", "llama"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        keys |= {
            "attn_logit_softcapping": config["attn_logit_softcapping"],
            "final_logit_softcapping": config["final_logit_softcapping"],
        }
    if architecture == "gemma3":
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    return keys


def write(
    path: Path,
    directory: Path,
    architecture: str,
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint in `directory` as a GGUF file in float32.

    Args:
        path: the file.
        directory: Hugging Face checkpoint.
        architecture: general.architecture.
        changes: keys of config.json to replace.
        extra: whole keys of metadata to add or replace; None removes one.
    """
    config = json.loads((directory / "config.json").read_text()) | dict(changes or {})
    keys = {f"{architecture}.{key}": value for key, value in metadata(architecture, config).items()}
    names = GEMMA_NAMES if architecture.startswith("gemma") else NAMES
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (keys | dict(extra or {})).items():
        tiny.add(writer, key, value)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, stored in load_file(directory / "model.safetensors").items():
        values = stored.astype(np.float32)
        stem, _, kind = name.rpartition(".")
        part = stem.split(".")[-1]
        if architecture == "llama" and part in heads:
            values = tiny.interleave(values, config[heads[part]])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if stem in names:
            target = f"{names[stem]}.{kind}"
        else:
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{names[rest]}.{kind}"
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
