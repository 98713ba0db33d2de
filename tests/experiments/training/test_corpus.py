from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jspec
from experiments.status import Status
from experiments.training import batches, corpus, features, fingerprint, methods, shards
from experiments.training import text as texts
from experiments.training.corpus import Corpus
from experiments.training.text import Recipe
from jspec.errors import InputError
from tests import tiny
from tests.experiments.training import jobs

RECIPE = Recipe(conversations=3, user_tokens=6, material_tokens=8, answer_tokens=5)


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> jspec.Model:
    return jspec.load(jobs.model(tmp_path_factory.mktemp("corpus") / "tiny"))


def build(folder: Path, model: jspec.Model, tokens: int, recipe: Recipe = RECIPE) -> list[Path]:
    layers = methods.feature_layers(model.config)
    wanted = Corpus(folder, model, recipe, tokens, [], layers)
    return corpus.build(wanted, Status(io.StringIO()))


def test_shards_are_made_once_and_follow_from_the_recipe(
    model: jspec.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A shard is 3 conversations of at most 25 + 6 + 12 + 5 tokens, so a second one is needed.
    paths = build(tmp_path / "data", model, 150)
    assert len(paths) >= 2
    first, second = (path.read_bytes() for path in paths[:2])
    counts = [features.read(path).total for path in paths]
    assert sum(counts) >= 150 > sum(counts[:-1])

    # Killed while the second shard was written: it alone is made again, and is the same.
    write = features.write
    made: list[str] = []

    def noted(path: Path, found: features.Features) -> None:
        made.append(path.stem)
        write(path, found)

    monkeypatch.setattr(features, "write", noted)
    for kind in ("text", "features"):
        (tmp_path / "data" / kind / paths[1].name).unlink()
    (tmp_path / "data" / "text" / f"{paths[1].name}.partial").write_bytes(b"half")
    assert build(tmp_path / "data", model, 150) == paths
    assert made == [paths[1].stem]
    assert [path.read_bytes() for path in paths[:2]] == [first, second]
    # Less text is the first shards of more.
    assert build(tmp_path / "data", model, 1) == paths[:1]
    assert made == [paths[1].stem]

    with pytest.raises(InputError, match=r"user_tokens.*another --data"):
        build(tmp_path / "data", model, 150, dataclasses.replace(RECIPE, user_tokens=7))
    params = dataclasses.replace(model.params, final_norm=model.params.final_norm * 2)
    with pytest.raises(InputError, match=r"model=.*another --data"):
        build(tmp_path / "data", dataclasses.replace(model, params=params), 150)
    (tmp_path / "data" / "settings.json").unlink()
    with pytest.raises(InputError, match=r"without a settings\.json"):
        build(tmp_path / "data", model, 150)


def test_features_are_mapped_as_they_are_read(model: jspec.Model, tmp_path: Path) -> None:
    text = texts.of_rows([((5, 6, 7), (8, 9)), ((4,), (3, 2, 1))])
    path = tmp_path / "a.safetensors"
    features.write(path, features.extract(model, text, methods.feature_layers(model.config)))
    read, mapped = features.read(path), shards.mapped(path)
    for field in dataclasses.fields(read):
        ours, theirs = getattr(mapped, field.name), getattr(read, field.name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    found = batches.corpus([mapped])
    assert shards.tokens(found, 1).tolist() == [4, 3, 2, 1]
    assert shards.answer(found, 0) == 3
    said = np.bincount(read.best, minlength=257)
    counted = np.array([0, *[1] * 9, *[0] * 247]) + said  # tokens 1 to 9 come once
    assert shards.counts(found, 257).tolist() == counted.tolist()
    kept, dropped = shards.without(found, lambda ids: 9 in ids)
    assert (kept.rows.tolist(), kept.total, dropped) == ([[0, 1]], 4, 1)


def test_what_is_held_out_stays_held_out() -> None:
    rows = np.array([[shard, row] for shard in range(7) for row in range(30)], np.int32)
    few = batches.Corpus((), rows[:60], np.full(60, 5))
    many = batches.Corpus((), rows, np.full(len(rows), 5))
    held = [{tuple(row) for row in shards.split(part)[1].rows.tolist()} for part in (few, many)]
    assert held[0] == {pair for pair in held[1] if pair[0] < 2}
    assert len(held[1]) == pytest.approx(len(rows) / 20, abs=4)
    train, kept = shards.split(many)
    assert len(train.rows) + len(kept.rows) == len(rows)
    assert not {tuple(row) for row in train.rows.tolist()} & held[1]


def test_a_fingerprint_is_of_the_model_and_not_of_its_dtype(model: jspec.Model) -> None:
    half = jspec.load(model.name, "bfloat16")
    assert fingerprint.of(half) == fingerprint.of(jspec.load(model.name))
    layers = model.params.layers
    moved = dataclasses.replace(layers[1], down=layers[1].down + 1)
    params = dataclasses.replace(model.params, layers=(layers[0], moved))
    assert fingerprint.of(dataclasses.replace(model, params=params)) != fingerprint.of(model)
