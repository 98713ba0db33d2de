"""The project's own checkpoints: what is written comes back, and nothing half-written stays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import checkpoints
from jspec.checkpoints import orbax
from jspec.config import ModelConfig, RopeConfig
from jspec.errors import InputError
from jspec.models.parameters import TransformerParams, declare, initialize, is_spec, named

CONFIG = ModelConfig(
    "llama", 40, 16, 24, 2, 4, 2, 8, 128, 1e-6, RopeConfig(5e5, "llama3", 8.0), attention_bias=True
)


@pytest.fixture(scope="module")
def params() -> TransformerParams:
    return initialize(CONFIG, jax.random.key(0), "float32")


def assert_same(actual: TransformerParams, expected: TransformerParams, dtype: Any) -> None:
    for name, leaf in named(actual).items():
        assert leaf.dtype == dtype
        wanted = np.asarray(named(expected)[name]).astype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), wanted, name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path: Path, tied: bool, dtype: str) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = initialize(config, jax.random.key(1), "float32")
    checkpoints.save(tmp_path / "a", config, params, eos_token_ids=(2, 5))
    loaded = checkpoints.load(tmp_path / "a", dtype)
    assert loaded.config == checkpoints.read_config(tmp_path / "a") == config
    assert loaded.eos_token_ids == (2, 5)
    assert named(loaded.params).keys() == named(params).keys()
    assert_same(loaded.params, params, dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_topology_may_change(tmp_path: Path, params: TransformerParams) -> None:
    def shardings(devices: int) -> Any:
        kind = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("model",), kind, devices=jax.devices()[:devices])
        return jax.tree.map(
            lambda spec: jax.sharding.NamedSharding(
                mesh,
                jax.P(*("model" if axis in ("kv_heads", "mlp") else None for axis in spec.axes)),
            ),
            declare(CONFIG),
            is_leaf=is_spec,
        )

    checkpoints.save(tmp_path / "a", CONFIG, jax.device_put(params, shardings(2)))
    assert_same(checkpoints.load(tmp_path / "a", "float32").params, params, "float32")
    split = checkpoints.load(tmp_path / "a", "float32", shardings=shardings(2)).params
    assert_same(split, params, "float32")
    assert split.layers[1].qkv.addressable_shards[1].data.shape == (1, 4, 8, 16)


def test_a_failed_write_leaves_nothing_that_loads(
    tmp_path: Path, params: TransformerParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        def save(self, directory: Path) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        orbax.save(tmp_path / "a", CONFIG, params, (), Tokenizer())
    assert not (tmp_path / "a").exists()
    checkpoints.save(tmp_path / "a", CONFIG, params)  # what was left is in nobody's way
    assert_same(checkpoints.load(tmp_path / "a", "float32").params, params, "float32")


def test_a_taken_directory_is_refused(tmp_path: Path, params: TransformerParams) -> None:
    (tmp_path / "a").mkdir()
    checkpoints.save(tmp_path / "a", CONFIG, params)
    with pytest.raises(InputError, match="exists already"):
        checkpoints.save(tmp_path / "a", CONFIG, params)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="exists already"):
        checkpoints.save(tmp_path / "file", CONFIG, params)


def test_parameters_of_another_config_are_refused(
    tmp_path: Path, params: TransformerParams
) -> None:
    wider = dataclasses.replace(CONFIG, vocab_size=48)
    with pytest.raises(InputError, match=r"embedding.*\(40, 16\), expected \(48, 16\)"):
        checkpoints.save(tmp_path / "a", wider, params)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 48, r"embedding.*shape \(40, 16\), expected \(48, 16\)"),
        ("num_layers", 3, r"layers\.2\..*shape None"),
        ("num_layers", 1, r"layers\.1\..*expected None"),
        ("head_dim", 7, "head_dim=7 is odd"),
        ("no_such_field", 1, "incomplete"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    tmp_path: Path, params: TransformerParams, field: str, value: int, message: str
) -> None:
    checkpoints.save(tmp_path / "a", CONFIG, params)
    path = tmp_path / "a" / "jspec.json"
    manifest = json.loads(path.read_text())
    manifest["config"][field] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=message):
        checkpoints.load(tmp_path / "a", "float32")


def test_another_format_and_missing_parameters_are_refused(
    tmp_path: Path, params: TransformerParams
) -> None:
    checkpoints.save(tmp_path / "a", CONFIG, params)
    (tmp_path / "a" / "params").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="does not exist"):
        checkpoints.load(tmp_path / "a", "float32")
    (tmp_path / "a" / "params").mkdir()
    with pytest.raises(InputError, match="no Orbax checkpoint"):
        checkpoints.load(tmp_path / "a", "float32")
    (tmp_path / "a" / "jspec.json").write_text('{"format": 9}')
    with pytest.raises(InputError, match="format=9"):
        checkpoints.read_config(tmp_path / "a")
