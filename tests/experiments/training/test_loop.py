from __future__ import annotations

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import optimizer, snapshots
from experiments.training.batches import Corpus
from experiments.training.loop import Order
from experiments.training.optimizer import Plan
from experiments.training.progress import Progress, read
from jspec.errors import InputError


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
    plan = Plan(steps=110, warmup=10, learning_rate=0.2, final_rate=0.1)
    assert optimizer.rate(plan, 10) == pytest.approx(0.2)
    assert optimizer.rate(plan, 5) == pytest.approx((0.2 / 11 + 0.2) / 2)
    assert optimizer.rate(plan, 60) == pytest.approx(0.11)
    assert optimizer.rate(plan, 110) == pytest.approx(0.02)
    assert optimizer.rate(plan, 35) == pytest.approx(0.11 + 0.09 * math.cos(math.pi / 4), rel=1e-5)


def test_a_step_is_adamw_on_the_clipped_mean() -> None:
    plan = Plan(steps=10, warmup=0, learning_rate=0.5, weight_decay=0.1, clip=1.0)
    params = {"matrix": jnp.array([[3.0, -1.0]]), "norm": jnp.array([2.0])}
    gradient = {"matrix": jnp.array([[6.0, 0.0]]), "norm": jnp.array([8.0])}
    state, norm = optimizer.move(plan, optimizer.begin(plan, params), gradient, 2)
    # The mean of both batches has norm 5; a first step of Adam goes by the gradient's sign.
    assert float(norm) == pytest.approx(5)
    expected = [3.0 - 0.5 * (1 + 0.1 * 3), -1.0 - 0.5 * 0.1 * -1]
    np.testing.assert_allclose(state.params["matrix"][0], expected, rtol=1e-4)
    np.testing.assert_allclose(state.params["norm"], [1.5], rtol=1e-4)  # no decay
    assert int(state.step) == 1


def test_every_conversation_comes_once_a_pass() -> None:
    length = np.random.default_rng(0).integers(5, 300, 90)
    rows = np.stack([np.zeros(90, np.int64), np.arange(90)], axis=1)
    corpus = Corpus((), rows, length)
    order = Order(corpus, 1024, seed=3)
    passes: list[list[list[int]]] = [[]]
    number = 0
    while len(passes) < 3:
        rows_taken = order.batch(number).rows
        passes[-1].append(rows_taken[rows_taken >= 0].tolist())
        number += 1
        if sum(map(len, passes[-1])) == 90:
            passes.append([])
    for taken in passes[:2]:
        assert sorted(row for batch in taken for row in batch) == list(range(90))
    assert passes[0] != passes[1]
    again = Order(corpus, 1024, seed=3)  # asked in another order, as after a kill
    for place in (number - 1, 0, 5):
        assert again.batch(place).rows.tolist() == order.batch(place).rows.tolist()
    first = Order(corpus, 1024, seed=4).batch(0).rows.tolist()
    assert first != again.batch(0).rows.tolist()


def test_only_so_many_checkpoints_stay_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        snapshots.save(tmp_path, step, {"a": jnp.full(3, step), "b": (jnp.int32(step),)}, keep=2)
    assert snapshots.steps(tmp_path) == [2, 3]
    like = {"a": jnp.zeros(3, jnp.int32), "b": (jnp.int32(0),)}
    found = snapshots.load(tmp_path, like)
    assert found is not None
    assert (found[0], found[1]["a"].tolist(), int(found[1]["b"][0])) == (3, [3, 3, 3], 3)
    for file in (tmp_path / "checkpoints" / "step-00000003").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    (tmp_path / "checkpoints" / ".step-00000004.partial").mkdir()
    found = snapshots.load(tmp_path, like)
    assert found is not None
    assert found[0] == 2
    with pytest.raises(InputError, match="shape"):
        snapshots.load(tmp_path, {"a": jnp.zeros(4, jnp.int32), "b": (jnp.int32(0),)})
    assert snapshots.load(tmp_path / "elsewhere", like) is None


def test_lines_beyond_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    with Progress(tmp_path, 0) as progress:
        for step in (1, 2, 3):
            progress.write({"step": step, "tokens": 10 * step, "seconds": step / 2})
            progress.write({"step": step, "held_out": {}})
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')
    with Progress(tmp_path, 2) as progress:
        assert progress.history.tokens == 20
        assert progress.history.seconds == 1
        progress.write({"step": 3, "tokens": 31, "seconds": 1.5})
    history = read(tmp_path)
    assert [line["step"] for line in history.steps] == [1, 2, 3]
    assert [line["step"] for line in history.measured] == [1, 2]
    assert history.tokens == 31
