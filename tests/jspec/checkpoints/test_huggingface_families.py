"""The families' config.json files, as published and as transformers 5 writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec import checkpoints
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError
from jspec.models.parameters import named
from tests.oracles import families

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
# The text part of the 4B model leaves most to the defaults.
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
PUBLISHED = {
    "qwen2.5": (
        QWEN25,
        ModelConfig(
            *("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, RopeConfig(1e6)),
            tie_embeddings=True,
            attention_bias=True,
        ),
    ),
    "qwen2.5 with yarn": (
        QWEN25
        | {
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            }
        },
        ModelConfig(
            *("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 131072, 1e-6),
            RopeConfig(
                1e6,
                "yarn",
                4.0,
                original_context=32768,
                attention_factor=0.1 * math.log(4) + 1,
            ),
            tie_embeddings=True,
            attention_bias=True,
        ),
    ),
    "qwen3": (
        QWEN3,
        ModelConfig(
            *("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, RopeConfig(1e6)),
            tie_embeddings=True,
            qk_norm=True,
        ),
    ),
    "mistral 0.1": (
        MISTRAL,
        ModelConfig(
            *("mistral", 32000, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5), windows=(4096,) * 32
        ),
    ),
    "mistral 0.3": (
        MISTRAL | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768},
        ModelConfig(*("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, RopeConfig(1e6))),
    ),
    "gemma2": (
        GEMMA2,
        ModelConfig(
            *("gemma2", 256000, 2304, 9216, 26, 8, 4, 256, 8192, 1e-6),
            tie_embeddings=True,
            activation="gelu_tanh",
            post_norms=True,
            norm_unit_offset=True,
            embedding_scale=48.0,
            attention_softcap=50.0,
            logit_softcap=30.0,
            windows=(4096, None) * 13,
        ),
    ),
    "gemma3": (
        GEMMA3,
        ModelConfig(
            *("gemma3", 262208, 2560, 10240, 34, 8, 4, 256, 131072, 1e-6),
            RopeConfig(1e6, "linear", 8.0),
            tie_embeddings=True,
            activation="gelu_tanh",
            qk_norm=True,
            post_norms=True,
            norm_unit_offset=True,
            embedding_scale=math.sqrt(2560),
            windows=((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
            local_rope=RopeConfig(1e4),
        ),
    ),
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(tmp_path: Path, name: str) -> None:
    config, expected = PUBLISHED[name]
    assert checkpoints.read_config(write_config(tmp_path, config)) == expected


def test_gemma_2_27b_scales_by_its_own_number(tmp_path: Path) -> None:
    config = GEMMA2 | {"query_pre_attn_scalar": 144, "head_dim": 128}
    assert checkpoints.read_config(write_config(tmp_path, config)).attention_scale == 1 / 12


@pytest.mark.parametrize("name", families.NAMES)
def test_the_older_form_of_a_config_says_the_same(tmp_path: Path, name: str) -> None:
    config = json.loads((families.directory(name) / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config.pop("layer_types", None)
    if name == "gemma3":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    found = checkpoints.read_config(write_config(tmp_path, config))
    assert found == checkpoints.read_config(families.directory(name))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma_3(tmp_path: Path, prefix: str) -> None:
    source = families.directory("gemma3")
    text = json.loads((source / "config.json").read_text())
    write_config(tmp_path, GEMMA3 | {"text_config": text})
    inner = prefix.removesuffix("language_model.")  # "model." of the whole, or nothing
    tensors = {
        prefix + (name.removeprefix("model.") if inner else name): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors[f"{inner}vision_tower.embeddings.weight"] = np.ones((2, 3), np.float32)
    tensors[f"{inner}multi_modal_projector.norm.weight"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    found, expected = checkpoints.load(tmp_path, "float32"), checkpoints.load(source, "float32")
    assert found.config == expected.config
    assert found.eos_token_ids == (1, 106)
    for name, leaf in named(found.params).items():
        np.testing.assert_array_equal(leaf, named(expected.params)[name], name)


@pytest.mark.parametrize("name", families.NAMES)
def test_saving_and_loading_keeps_everything(tmp_path: Path, name: str) -> None:
    expected = checkpoints.load(families.directory(name), "float32")
    checkpoints.save(tmp_path / "a", expected.config, expected.params)
    found = checkpoints.load(tmp_path / "a", "float32")
    assert found.config == expected.config
    assert hash(found.config) == hash(expected.config)
    for path, leaf in named(found.params).items():
        np.testing.assert_array_equal(leaf, named(expected.params)[path], path)


@pytest.mark.parametrize(
    ("config", "changes", "window"),
    [
        (QWEN25, {"use_sliding_window": True}, None),  # never outgrown
        (QWEN25, {"use_sliding_window": True, "sliding_window": 512}, (None,) * 21 + (512,) * 3),
        (
            QWEN25 | {"num_hidden_layers": 2},
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (512, None),
        ),
        (MISTRAL, {"sliding_window": 32768}, None),
        (GEMMA2, {"sliding_window": None}, None),
        (
            {key: value for key, value in MISTRAL.items() if key != "sliding_window"},
            {"num_hidden_layers": 1},
            (4096,),
        ),
    ],
)
def test_windows(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], window: Any
) -> None:
    found = checkpoints.read_config(write_config(tmp_path, config | changes))
    assert found.windows == (window or ())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN25 | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60}, "mixture of"),
        (QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "mixture of"),
        (
            QWEN25
            | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {1: 2}},
            "'Qwen2_5_VLForConditionalGeneration' is multimodal",
        ),
        (GEMMA2 | {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*not supported yet"),
        (GEMMA2 | {"architectures": ["Gemma3nForCausalLM"]}, "Gemma3nForCausalLM.*not supported"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.0 is not positive"),
        (
            GEMMA2 | {"attn_logit_softcapping": "x"},
            "attn_logit_softcapping='x' is no finite number",
        ),
        (GEMMA3 | {"text_config": None}, "text_config=None is no object"),
        (GEMMA2 | {"layer_types": ["chunked_attention"] * 26}, "layer_types='chunked_attention'"),
        (GEMMA2 | {"layer_types": ["full_attention"]}, "does not name 26 layers"),
        (GEMMA2 | {"layer_types": 7}, "layer_types=7 is no list"),
        (
            QWEN3 | {"layer_types": ["sliding_attention"] * 28},
            "sliding_window=None is off, but layer_types has sliding_attention",
        ),
        (MISTRAL | {"layer_types": ["full_attention"] * 32}, "not supported in mistral"),
        (
            GEMMA2 | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "is by layer type",
        ),
        (
            QWEN25 | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "mscale=1.0 is not supported",
        ),
        (QWEN25 | {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checkpoints.read_config(write_config(tmp_path, config))
