"""GGUF files: header against the format's own reader, values against what was quantised."""

from __future__ import annotations

import contextlib
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jspec import checkpoints
from jspec.checkpoints.gguf_header import read_header
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError
from jspec.models.parameters import abstract, named
from tests.oracles import smollm2
from tests.oracles import tiny_checkpoints as tiny

QUANT = gguf.GGMLQuantizationType


def assert_loads_as(path: Path, tensors: tiny.Arrays, dtype: Any = np.float32) -> None:
    loaded = checkpoints.load(path, dtype)
    expected = tiny.fused(tensors, loaded.config)
    leaves = named(loaded.params)
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(leaf), expected[name].astype(dtype), name)


def dequantisable() -> list[QUANT]:
    """Every block type that the package can dequantise."""
    found = []
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size if block > 1 else 4), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def random_blocks(kind: QUANT, shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Random bytes of one type, drawn again where they stand for a NaN or an infinity."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
    while True:
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=-1)
        if not bad.any():
            return blocks.reshape(shape[0], -1)
        blocks[bad] = rng.integers(0, 256, (int(bad.sum()), size), np.uint8)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_come_back_in_half_rotation_order(tmp_path: Path, tied: bool, bias: bool) -> None:
    config = tiny.CONFIG | {"tie_word_embeddings": tied, "attention_bias": bias}
    tensors = tiny.random_tensors(config)
    path = tiny.write_gguf(tmp_path / "model.gguf", tensors, config)
    assert checkpoints.read_config(path) == ModelConfig(
        "llama", 40, 64, 96, 2, 4, 2, 32, 128, tie_embeddings=tied, attention_bias=bias
    )
    assert_loads_as(path, tensors)
    assert_loads_as(path, tensors, "bfloat16")
    assert checkpoints.load(tmp_path, "float32").eos_token_ids == (2,)


def test_the_list_of_types_is_the_whole_of_what_the_package_knows() -> None:
    names = {kind.name for kind in dequantisable()}
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"} <= names
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ4_NL", "IQ4_XS"} <= names


@pytest.mark.parametrize("kind", dequantisable(), ids=lambda kind: kind.name)
def test_every_type(tmp_path: Path, kind: QUANT) -> None:
    # Rows of 256 make whole blocks of every type.
    config = tiny.CONFIG | {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 64,
    }
    tensors = tiny.random_tensors(config)
    raw = {}
    for seed, (name, values) in enumerate(tensors.items()):
        if values.ndim < 2:
            continue
        part = name.split(".")[-2]
        heads = {"q_proj": 4, "k_proj": 2}.get(part)
        stored = tiny.interleave(values, heads) if heads else values
        try:
            blocks = gguf.quants.quantize(stored, kind)
        except NotImplementedError:
            blocks = random_blocks(kind, (values.shape[0], values.shape[1]), seed)
        raw[tiny.gguf_name(name)] = (blocks, kind)
        loaded = gguf.quants.dequantize(blocks, kind)
        if heads:  # undo the converter's order, head by head, pair by pair
            loaded = np.concatenate(
                [
                    np.concatenate([head[0::2], head[1::2]])
                    for head in np.split(loaded, heads, axis=0)
                ]
            )
        tensors[name] = loaded
    path = tiny.write_gguf(tmp_path / "model.gguf", tensors, config, raw=raw)
    assert_loads_as(path, tensors)


def test_the_header_is_what_the_format_s_own_reader_sees(tmp_path: Path) -> None:
    metadata = {
        "test.strings": ["a", "", "é🙂"],
        "test.floats": [0.5, -1.0],
        "test.integers": [1, -2, 3],
        "test.flag": True,
        "test.text": "text",
        "general.alignment": 64,
    }
    path = tiny.write_gguf(tmp_path / "a.gguf", tiny.random_tensors(), metadata=metadata)
    header, reference = read_header(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key
    assert {**header.metadata, **metadata} == header.metadata
    assert [(name, *dict(vars(tensor)).values()) for name, tensor in header.tensors.items()] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type, t.data_offset, t.n_bytes)
        for t in reference.tensors
    ]


def llama3_divisors(factor: float, theta: float, head_dim: int) -> np.ndarray[Any, Any]:
    """What the converter writes for Llama 3.1 and later, wavelength by wavelength."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised(tmp_path: Path, factor: float) -> None:
    config = tiny.CONFIG | {"rope_theta": 5e5}
    path = tiny.write_gguf(
        tmp_path / "a.gguf",
        tiny.random_tensors(),
        config,
        extra={"rope_freqs.weight": llama3_divisors(factor, 5e5, 32)},
    )
    assert checkpoints.read_config(path).rope == RopeConfig(5e5, "llama3", factor, 1.0, 4.0, 8192)
    assert_loads_as(path, tiny.random_tensors())


@pytest.mark.parametrize("scale", [1.01, 0.9])
def test_other_scaling_is_refused(tmp_path: Path, scale: float) -> None:
    divisors = llama3_divisors(8.0, 1e4, 32)
    divisors[3] *= scale
    path = tiny.write_gguf(
        tmp_path / "a.gguf", tiny.random_tensors(), extra={"rope_freqs.weight": divisors}
    )
    with pytest.raises(InputError, match=r"rope_freqs\.weight.*not Llama 3's"):
        checkpoints.read_config(path)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "a.gguf",
        tiny.random_tensors(),
        extra={"rope_freqs.weight": np.ones(16, np.float32)},
    )
    assert checkpoints.read_config(path).rope == RopeConfig()


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_scaling(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = tiny.write_gguf(tmp_path / "a.gguf", tiny.random_tensors(), metadata=keys)
    assert checkpoints.read_config(path).rope == RopeConfig(1e4, "linear", 4.0)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("phi3", {}, "'phi3' is not supported yet.*supported architecture: llama, qwen2"),
        ("qwen2moe", {"qwen2moe.expert_count": 60}, "mixture of 60 experts"),
        ("gemma3n", {}, "'gemma3n' is not supported yet"),
        ("llama", {"llama.expert_count": 8}, "mixture of 8 experts"),
        ("deepseek2", {}, "latent attention"),
        ("mamba", {}, "recurrent state"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ("llama", {"llama.attention.value_length": 16}, "value_length=16 differs"),
        ("llama", {"llama.rope.dimension_count": 16}, "dimension_count=16 differs"),
        ("llama", {"llama.block_count": None}, "block_count=None is missing"),
        ("llama", {"llama.block_count": 1}, "blk.1.attn_norm.weight'.*change the result"),
        ("llama", {"llama.block_count": 3}, "blk.2.attn_norm.weight' is missing"),
        ("llama", {"llama.feed_forward_length": 95}, r"shape \(96, 64\), expected \(95, 64\)"),
        ("llama", {"split.count": 2}, "one of 2 parts"),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, architecture: str, keys: dict[str, Any], message: str
) -> None:
    path = tiny.write_gguf(
        tmp_path / "a.gguf", tiny.random_tensors(), metadata=keys, architecture=architecture
    )
    with pytest.raises(InputError, match=message):
        checkpoints.load(path, "float32")


def test_a_storage_type_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "a.gguf",
        tiny.random_tensors(),
        raw={"token_embd.weight": (np.zeros((40, 64), np.int32), QUANT.I32)},
    )
    with pytest.raises(InputError, match="stored as I32, which is not supported"):
        checkpoints.load(path, "float32")


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "a.gguf",
        tiny.random_tensors(),
        extra={"blk.0.attn_q_norm.weight": np.ones(32, np.float32)},
    )
    with pytest.raises(InputError, match=r"attn_q_norm.*change the result"):
        checkpoints.load(path, "float32")


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    metadata = {"test.strings": ["a", "b"], "test.integers": [1, 2]}
    return tiny.write_gguf(path, tiny.random_tensors(), metadata=metadata).read_bytes()


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_truncated_file_is_refused(
    tmp_path: Path, whole_file: bytes, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, 3000) | st.integers(0, len(whole_file) - 1))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_file[:end])
    with pytest.raises(InputError):
        checkpoints.load(path, "float32")


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_corrupt_header_is_refused_or_read(
    tmp_path: Path, whole_file: bytes, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, 2000))
    corrupt = bytearray(whole_file)
    corrupt[position : position + 8] = data.draw(st.binary(min_size=8, max_size=8))
    path = tmp_path / "corrupt.gguf"
    path.write_bytes(corrupt)
    with contextlib.suppress(InputError):
        checkpoints.load(path, "float32")


@pytest.mark.parametrize("version", [1, 4])
def test_other_versions_are_refused(tmp_path: Path, whole_file: bytes, version: int) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole_file[:4] + struct.pack("<I", version) + whole_file[8:])
    with pytest.raises(InputError, match=f"version {version}"):
        checkpoints.load(path, "float32")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(InputError, match="is not a GGUF file"):
        checkpoints.load(path, "float32")


def test_smollm2() -> None:
    path = smollm2.path_or_skip()
    loaded = checkpoints.load(path, "bfloat16")
    assert loaded.config == ModelConfig(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_context=8192,
        rope=RopeConfig(1e5),
        tie_embeddings=True,
    )
    assert loaded.eos_token_ids == (2,)
    expected = {
        name: leaf.shape for name, leaf in named(abstract(loaded.config, "bfloat16")).items()
    }
    assert {name: leaf.shape for name, leaf in named(loaded.params).items()} == expected
    # The published count of SmolLM2-135M's parameters.
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == 134_515_008
    # One query head and one key head against the format's own reader.
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor, head, place in (("attn_q", 4, (1, 1)), ("attn_k", 2, (2, 3))):
        stored = by_name[f"blk.7.{tensor}.weight"]
        rows = gguf.quants.dequantize(stored.data, stored.tensor_type)[64 * head : 64 * (head + 1)]
        halves = np.concatenate([rows[0::2], rows[1::2]]).astype(loaded.params.embedding.dtype)
        np.testing.assert_array_equal(np.asarray(loaded.params.layers[7].qkv[place]), halves)
