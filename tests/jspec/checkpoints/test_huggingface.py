"""Hugging Face directories: every tensor against the arrays that were written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jspec import checkpoints
from jspec.checkpoints import assembly
from jspec.checkpoints.huggingface import SafetensorsSource
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError
from jspec.models.parameters import TransformerParams, declare, is_spec, named
from tests.oracles import tiny_checkpoints as tiny


def assert_tree(params: TransformerParams, expected: Mapping[str, Any], dtype: Any) -> None:
    leaves = named(params)
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == dtype, name
        np.testing.assert_array_equal(np.asarray(leaf), expected[name].astype(dtype), name)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_tensors_land_where_the_layout_says(
    tmp_path: Path, shards: int, tied: bool, bias: bool
) -> None:
    config = tiny.CONFIG | {"tie_word_embeddings": tied, "attention_bias": bias}
    tensors = tiny.random_tensors(config)
    tiny.write_huggingface(tmp_path, tensors, config, shards=shards)
    loaded = checkpoints.load(tmp_path, "float32")
    assert loaded.config == ModelConfig(
        "llama", 40, 64, 96, 2, 4, 2, 32, 128, tie_embeddings=tied, attention_bias=bias
    )
    assert loaded.config == checkpoints.read_config(tmp_path)
    assert_tree(loaded.params, tiny.fused(tensors, loaded.config), np.float32)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(tmp_path: Path, stored: Any, wanted: Any) -> None:
    tensors = {name: value.astype(stored) for name, value in tiny.random_tensors().items()}
    loaded = checkpoints.load(tiny.write_huggingface(tmp_path, tensors), wanted)
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    assert_tree(loaded.params, tiny.fused(wide, loaded.config), wanted)


def test_shardings_place_every_tensor(tmp_path: Path) -> None:
    tensors = tiny.random_tensors()
    config = checkpoints.read_config(tiny.write_huggingface(tmp_path, tensors))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(spec: Any) -> jax.sharding.NamedSharding:
        names = ("model" if axis in ("kv_heads", "mlp") else None for axis in spec.axes)
        return jax.sharding.NamedSharding(mesh, jax.P(*names))

    shardings = jax.tree.map(place, declare(config), is_leaf=is_spec)
    params = checkpoints.load(tmp_path, "float32", shardings=shardings).params
    assert_tree(params, tiny.fused(tensors, config), np.float32)
    for name, leaf in named(params).items():
        assert leaf.sharding == named(shardings)[name], name
    assert params.layers[0].qkv.addressable_shards[0].data.shape == (1, 4, 32, 64)


def test_a_wrong_tree_of_shardings_is_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path, tiny.random_tensors())
    tied = ModelConfig("llama", 40, 64, 96, 2, 4, 2, 32, 128, tie_embeddings=True)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: default, declare(tied), is_leaf=is_spec)
    with pytest.raises(InputError, match=r"shardings.*not the tree"):
        checkpoints.load(tmp_path, "float32", shardings=shardings)


def test_tensors_are_read_in_bounded_blocks_and_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny.random_tensors()
    config = checkpoints.read_config(tiny.write_huggingface(tmp_path, tensors))
    monkeypatch.setattr(assembly, "_BLOCK_ELEMENTS", 5 * 64)
    largest, releases = 0, 0

    class Watched(SafetensorsSource):
        def read(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
            nonlocal largest
            rows = super().read(name, start, stop)
            largest = max(largest, rows.size)
            return rows

        def release(self) -> None:
            nonlocal releases
            releases += 1
            super().release()

    params = assembly.assemble(Watched(tmp_path), config, "float32")
    assert_tree(params, tiny.fused(tensors, config), np.float32)
    assert largest <= 5 * 64
    assert releases == len(named(params))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        (
            {"rope_theta": None}
            | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            LLAMA3_ROPE,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e4, "linear", 2.0)),
    ],
)
def test_rope_configs(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | changes))
    assert checkpoints.read_config(tmp_path).rope == expected


def test_defaults_are_those_of_the_library_that_writes_the_files(tmp_path: Path) -> None:
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = {key: tiny.CONFIG[key] for key in (*required, "model_type", "num_attention_heads")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoints.read_config(tmp_path) == ModelConfig(
        "llama", 40, 64, 96, 2, 4, 4, 16, 2048, norm_eps=1e-6
    )


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, [5, 7], (5, 7)),
        (None, 3, (3,)),
        (None, None, ()),
        ([1, 2], None, (1, 2)),
    ],
)
def test_eos_token_ids(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    tiny.write_huggingface(
        tmp_path, tiny.random_tensors(), tiny.CONFIG | {"eos_token_id": in_config}
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert checkpoints.load(tmp_path, "float32").eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM.*not supported yet.*LlamaFor"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture of experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "latent attention"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent state"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*quantised weight format"),
        ({"sliding_window": 64}, "sliding_window=64 is smaller than the context"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_size": "64"}, "hidden_size='64' is no integer"),
        ({"vocab_size": None}, "vocab_size=None is no integer"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 does not divide"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads=5 does not divide"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG | changes))
    with pytest.raises(InputError, match=message):
        checkpoints.read_config(tmp_path)


def test_a_window_that_never_bites_is_fine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(tiny.CONFIG | {"sliding_window": 64, "use_sliding_window": False})
    )
    assert checkpoints.read_config(tmp_path).max_context == 128


FIRST = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{FIRST}.k_proj.weight", None, "k_proj.weight' is missing"),
        (
            f"{FIRST}.k_proj.weight",
            np.zeros((32, 64), np.float32),
            r"k_proj.weight' has shape \(32, 64\), expected \(64, 64\)",
        ),
        ("model.layers.2.mlp.up_proj.weight", np.zeros((96, 64), np.float32), "change the result"),
        (f"{FIRST}.q_norm.weight", np.ones(32, np.float32), "change the result"),
        (f"{FIRST}.o_proj.bias", np.ones(64, np.float32), "change the result"),
        (f"{FIRST}.q_proj.weight", np.zeros((128, 64), np.int8), "dtype I8"),
        (f"{FIRST}.q_proj.weight", np.zeros((128, 64), ml_dtypes.float8_e4m3fn), "dtype F8_E4M3"),
    ],
)
def test_tensors_that_are_refused(
    tmp_path: Path, name: str, value: np.ndarray[Any, Any] | None, message: str
) -> None:
    tensors = tiny.random_tensors()
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    tiny.write_huggingface(tmp_path, tensors)
    with pytest.raises(InputError, match=message):
        checkpoints.load(tmp_path, "float32")


def test_tensors_that_change_nothing_are_ignored(tmp_path: Path) -> None:
    config = tiny.CONFIG | {"tie_word_embeddings": True}
    tensors = tiny.random_tensors(config)
    extra = {
        f"{FIRST}.rotary_emb.inv_freq": np.ones(16, np.float32),
        f"{FIRST}.o_proj.bias": np.zeros(64, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
    }
    loaded = checkpoints.load(tiny.write_huggingface(tmp_path, tensors | extra, config), "float32")
    assert_tree(loaded.params, tiny.fused(tensors, loaded.config), np.float32)


def test_a_head_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    config = tiny.CONFIG | {"tie_word_embeddings": True}
    tensors = tiny.random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    tiny.write_huggingface(tmp_path, tensors, config)
    with pytest.raises(InputError, match="differs from the embedding"):
        checkpoints.load(tmp_path, "float32")


def test_dtypes_that_cannot_hold_weights_are_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path, tiny.random_tensors())
    for dtype in ("int8", "float64", "no such"):
        with pytest.raises(InputError, match="dtype"):
            checkpoints.load(tmp_path, dtype)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights_are_refused(tmp_path: Path, kept: float) -> None:
    tiny.write_huggingface(tmp_path, tiny.random_tensors())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(InputError, match="truncated or corrupt"):
        checkpoints.load(tmp_path, "float32")


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path, tiny.random_tensors(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"00002-of-00003.*named by the index"):
        checkpoints.load(tmp_path, "float32")


def test_an_index_cannot_point_outside(tmp_path: Path) -> None:
    tiny.write_huggingface(tmp_path / "inside", tiny.random_tensors())
    (tmp_path / "inside" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (tmp_path / "inside" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="leaves the checkpoint's directory"):
        checkpoints.load(tmp_path / "inside", "float32")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1', "\x00"])
def test_corrupt_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        checkpoints.read_config(tmp_path)


@pytest.mark.parametrize(
    ("files", "named_path", "message"),
    [
        ([], "", "empty directory"),
        ([], "nothing", "does not exist"),
        (["notes.txt"], "", "holds no checkpoint"),
        (["notes.txt"], "notes.txt", "is no checkpoint"),
        (["config.json"], "", "neither model.safetensors nor"),
        (["config.json", "pytorch_model.bin"], "", "pickle.*convert it to safetensors"),
        (["pytorch_model.bin"], "pytorch_model.bin", "pickle.*convert it to safetensors"),
        (["consolidated.00.pth"], "", "pickle.*convert it to safetensors"),
        (["model.safetensors"], "model.safetensors", "give its directory"),
        (["a.gguf", "b.gguf"], "", "several GGUF files: a.gguf, b.gguf"),
    ],
)
def test_paths_that_hold_nothing_to_load(
    tmp_path: Path, files: list[str], named_path: str, message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text(json.dumps(tiny.CONFIG))
    with pytest.raises(InputError, match=message):
        checkpoints.load(tmp_path / named_path, "float32")
