"""Every field that makes no sense is refused with its name, its value and what to do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jspec.config import ModelConfig, RopeConfig, SpeculationConfig
from jspec.errors import InputError
from jspec.sampling_params import SamplingParams
from tests import tiny


def refused(make: Any, field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        make()
    error = caught.value
    assert error.field == field
    assert error.value is value or error.value == value
    assert error.problem
    assert error.remedy
    assert str(error).startswith(f"{field}={value!r} ")
    assert str(error).endswith(f"; {error.remedy}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("top_k", 0.5),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("seed", 3.0),
        ("stop_token_ids", 2),
    ],
)
def test_sampling(field: str, value: Any) -> None:
    refused(lambda: SamplingParams(**{field: value}), field, value)


def test_stop_ids() -> None:
    refused(lambda: SamplingParams(stop_token_ids=(3, -2)), "stop_token_ids", -2)
    refused(lambda: SamplingParams(stop_token_ids=(5.5,)), "stop_token_ids", 5.5)  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers() -> None:
    given: dict[str, Any] = {"top_k": np.int64(3), "seed": np.uint64(2**64 - 1)}
    params = SamplingParams(**given)
    assert (params.top_k, params.seed) == (3, 2**64 - 1)
    assert {type(params.top_k), type(params.seed)} == {int}
    narrow: dict[str, Any] = {"max_new_tokens": np.uint8(200), "stop_token_ids": [np.int8(100)]}
    assert 100 + SamplingParams(**narrow).max_new_tokens == 300
    assert 100 + SamplingParams(**narrow).stop_token_ids[0] == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", -1),
        ("gamma", 128),
        ("gamma", 2.0),
        ("verification", "nucleus"),
        ("rounds_per_chunk", 0),
    ],
)
def test_speculation(field: str, value: Any) -> None:
    refused(lambda: SpeculationConfig(**{field: value}), field, value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"theta": 0.0}, "rope.theta"),
        ({"factor": 0.5}, "rope.factor"),
        ({"scaling": "dynamic"}, "rope.scaling"),
        ({"scaling": "llama3", "high_freq_factor": 1.0}, "rope.high_freq_factor"),
    ],
)
def test_rope(changes: dict[str, Any], field: str) -> None:
    refused(lambda: RopeConfig(**changes), field, changes[field.removeprefix("rope.")])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f.name, 0) for f in dataclasses.fields(ModelConfig) if f.type == "int"),
        ("num_kv_heads", 3),
        ("head_dim", 7),
    ],
)
def test_model(field: str, value: int) -> None:
    changes: dict[str, Any] = {field: value}
    refused(lambda: dataclasses.replace(tiny.CONFIG, **changes), field, value)


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0.0, top_p=1.0, min_p=1.0, seed=2**64 - 1, max_new_tokens=1)
    SpeculationConfig(gamma=127, rounds_per_chunk=1, verification="block")
    RopeConfig(factor=1.0)
    assert tiny.CONFIG.queries_per_kv == 2


def test_configurations_are_hashable_values() -> None:
    # They are static arguments: equal ones must share a compiled program.
    again = dataclasses.replace(tiny.CONFIG)
    assert again is not tiny.CONFIG
    assert hash(again) == hash(tiny.CONFIG)
    assert len({SamplingParams(seed=1), SamplingParams(seed=1), SamplingParams(seed=2)}) == 2


def test_long_values_are_shortened() -> None:
    error = InputError("prompt", "x" * 5000, "is long", "cut it")
    assert len(str(error)) < 260
    assert "..." in str(error)
    assert isinstance(error, ValueError)
