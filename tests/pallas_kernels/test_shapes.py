"""The list of real models' shapes."""

from __future__ import annotations

import pytest

from pallas_kernels import shapes


def test_every_combination_is_there_once() -> None:
    assert len(set(shapes.CASES)) == len(shapes.CASES) == 7 * 4 * 4 * 3


@pytest.mark.parametrize("model", shapes.MODELS, ids=lambda model: model.name)
def test_heads_divide(model: shapes.AttentionShape) -> None:
    assert model.heads % model.groups == 0


def test_bytes_of_a_cache() -> None:
    # Llama 3.1 8B at 8k tokens: 32 MiB a layer in bfloat16, 1 GiB over its 32 layers.
    (llama,) = (model for model in shapes.MODELS if model.name == "llama-3.1-8b")
    assert shapes.Case(llama, 1, 1, 8192).cache_bytes(2) * 32 == 2**30


@pytest.mark.parametrize("count", [7, 30, 84])
def test_a_spread_has_some_of_everything(count: int) -> None:
    cases = shapes.spread(count)
    assert len(set(cases)) == count
    assert {case.model for case in cases} == set(shapes.MODELS)
    assert {case.batch for case in cases} == set(shapes.BATCHES)
    assert {case.nodes for case in cases} == set(shapes.NODES)
    assert {case.slots for case in cases} == set(shapes.SLOTS)
