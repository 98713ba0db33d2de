from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from experiments import memory
from jspec.drafting import draft_model
from tests import tiny

CAPACITY = 64
# Two layers of keys and values, 2 heads of 8 float32 numbers a token, and the row's length.
TARGET_CACHE = 2 * 2 * 2 * 8 * 4 * CAPACITY + 4


def bytes_of(*leaves: object) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in leaves)


def test_what_the_target_lends_is_no_weight_of_its_own() -> None:
    target = tiny.model()
    found = memory.measure(target, jspec.early_exit(target, 1), CAPACITY)
    whole = bytes_of(*jax.tree.leaves(target.params))
    second = bytes_of(*jax.tree.leaves(target.params.layers[1]))
    assert (found.own, found.lent, found.target_weights) == (0, whole - second, whole)
    assert (found.state, found.target_cache) == ((TARGET_CACHE - 4) // 2 + 4, TARGET_CACHE)
    assert found.state_share == pytest.approx(0.5, abs=1e-3)


def test_a_head_that_borrows_the_embedding() -> None:
    target = tiny.model()
    own = tiny.params(seed=1)
    lent = dataclasses.replace(own, embedding=target.params.embedding)
    found = memory.measure(target, draft_model.draft_model(tiny.CONFIG, lent), CAPACITY)
    embedding = bytes_of(target.params.embedding)
    assert found.lent == embedding
    assert found.own == bytes_of(*jax.tree.leaves(own)) - embedding
    assert found.as_dict()["own_share"] == pytest.approx(found.own / found.target_weights)


def test_lookups_take_nothing() -> None:
    found = memory.measure(tiny.model(), jspec.ngram(), CAPACITY)
    assert (found.own, found.lent, found.state) == (0, 0, 0)
