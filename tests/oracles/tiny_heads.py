"""Tiny random drafters in their published layouts, written by name; no code under test is used.

Names and shapes are those of SafeAILab/EAGLE (eagle/model/cnets1.py and cnets.py), FasterDecoding/
Medusa (medusa/model) and transformers' Llama.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jspec.config import ModelConfig

Arrays = dict[str, np.ndarray[Any, Any]]
F, N, G, H = 48, 4, 2, 8  # of the drafters' layers


def llama(target: ModelConfig, **changes: Any) -> dict[str, Any]:
    """Return the config.json of one Llama layer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": G,
        "head_dim": H,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | changes


def _block(prefix: str, width: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (N * H, inputs),
        f"{prefix}self_attn.k_proj.weight": (G * H, inputs),
        f"{prefix}self_attn.v_proj.weight": (G * H, inputs),
        f"{prefix}self_attn.o_proj.weight": (width, N * H),
        f"{prefix}mlp.gate_proj.weight": (F, width),
        f"{prefix}mlp.up_proj.weight": (F, width),
        f"{prefix}mlp.down_proj.weight": (width, F),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=s) * 0.2).astype(np.float32) for name, s in shapes.items()}


def _maps(ids: np.ndarray, vocab: int) -> Arrays:
    member = np.zeros(vocab, bool)
    member[ids] = True
    return {"d2t": (ids - np.arange(len(ids))).astype(np.int64), "t2d": member}


def eagle(target: ModelConfig, bias: bool = True) -> tuple[dict[str, Any], Arrays]:
    """Return config.json and tensors of an EAGLE head, as EAGLE-LLaMA2-chat's."""
    d = target.hidden_size
    shapes = _block("layers.0.", d, d) | {
        "embed_tokens.weight": (target.vocab_size, d),
        "fc.weight": (d, 2 * d),
    }
    if bias:
        shapes["fc.bias"] = (d,)
    return llama(target, bias=bias), _random(shapes, 1)


def lower(target: ModelConfig) -> tuple[dict[str, Any], Arrays]:
    """Return those of an EAGLE head that reads lower layers too, which is jspec's own layout."""
    config, tensors = eagle(target, bias=False)
    d = target.hidden_size
    more = {"fuse.weight": (d, 2 * d), "layers.0.input_layernorm.weight": (d,)}
    return config | {"lower_layers": [1, 4]}, tensors | _random(more, 6)


def eagle3(target: ModelConfig, ids: np.ndarray) -> tuple[dict[str, Any], Arrays]:
    """Return config.json and tensors of an EAGLE-3 head, as EAGLE3-LLaMA3.1's."""
    d = target.hidden_size
    shapes = _block("midlayer.", d, 2 * d) | {
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.input_layernorm.weight": (d,),
        "norm.weight": (d,),
        "fc.weight": (d, 3 * d),
        "lm_head.weight": (len(ids), d),
    }
    config = llama(
        target,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(ids),
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
    )
    return config, _random(shapes, 2) | _maps(ids, target.vocab_size)


def medusa(
    target: ModelConfig, heads: int = 3, blocks: int = 2, own: bool = True
) -> tuple[dict[str, Any], Arrays]:
    """Return config.json and tensors of Medusa heads, with heads of their own or without."""
    d = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        for j in range(blocks):
            shapes |= {f"{k}.{j}.linear.weight": (d, d), f"{k}.{j}.linear.bias": (d,)}
        if own:
            shapes[f"{k}.{blocks}.weight"] = (target.vocab_size, d)
    config = {
        "base_model_name_or_path": "some/target",
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "transformers_version": "4.31.0",
    }
    return config, _random(shapes, 3)


def draft_model(target: ModelConfig, ids: np.ndarray) -> tuple[dict[str, Any], Arrays]:
    """Return config.json and tensors of a draft model whose embedding and head are the target's."""
    d = target.hidden_size
    shapes = _block("model.layers.0.", d, d) | {
        "model.layers.0.input_layernorm.weight": (d,),
        "model.norm.weight": (d,),
    }
    return llama(target), _random(shapes, 4) | _maps(ids, target.vocab_size)


def write(
    folder: Path, config: Mapping[str, Any], tensors: Arrays, name: str = "model.safetensors"
) -> Path:
    """Write a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / name)
    return folder


def grouped(tensors: Arrays, prefix: str) -> np.ndarray[Any, Any]:
    """Return query, key and value as one [G, N / G + 2, H, inputs], head by head."""
    q, k, v = (tensors[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    per = N // G
    groups = []
    for g in range(G):
        heads = [q[(g * per + j) * H : (g * per + j + 1) * H] for j in range(per)]
        groups.append([*heads, k[g * H : (g + 1) * H], v[g * H : (g + 1) * H]])
    return np.array(groups)
