"""Loading trained drafters by name or directory, of every kind and for every shape of drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jspec
from jspec import quantization, trained
from jspec.errors import InputError
from jspec.generation import Decoder, default_speculation
from jspec.model import Model
from jspec.quantization import Int8Matrix
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import tiny
from tests.oracles import tiny_heads
from tests.oracles.tiny_heads import Arrays

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=4)
TARGET = Model("tiny", CONFIG, tiny.params(CONFIG), None, ())
IDS = np.arange(1, 60, 2)
TREE = (-1, 0, 0, 1)
MADE: dict[str, Callable[[], tuple[dict[str, Any], Arrays]]] = {
    "eagle": lambda: tiny_heads.eagle(CONFIG),
    "eagle3": lambda: tiny_heads.eagle3(CONFIG, IDS),
    "medusa": lambda: tiny_heads.medusa(CONFIG, blocks=1),
    "draft-model": lambda: tiny_heads.draft_model(CONFIG, IDS),
}


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {kind: tiny_heads.write(root / kind, *make()) for kind, make in MADE.items()}


def test_it_decodes_as_the_target_does(folders: dict[str, Path]) -> None:
    requests = [Request(p, SamplingParams(max_new_tokens=12)) for p in tiny.prompts(3)[1:]]
    bound = jspec.load_drafter(TARGET, folders["eagle3"])
    found = Decoder(TARGET, bound, default_speculation(bound), batch_size=2).generate(requests)
    plain = Decoder(TARGET, batch_size=2).generate(requests)
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]
    assert all(done.counts.proposed.sum() > 0 for done in found)


def test_chains_that_end_early(folders: dict[str, Path]) -> None:
    requests = [Request(p, SamplingParams(max_new_tokens=12)) for p in tiny.prompts(3)[1:]]
    plain = Decoder(TARGET, batch_size=2).generate(requests)
    for kind in ("eagle", "medusa", "draft-model"):  # EAGLE-3 heads draft as EAGLE heads do
        proposed = []
        for confidence in (0.0, 1.0):
            bound = jspec.load_drafter(TARGET, folders[kind], min_confidence=confidence)
            found = Decoder(TARGET, bound, default_speculation(bound), batch_size=2)
            done = found.generate(requests)
            assert [one.token_ids for one in done] == [one.token_ids for one in plain]
            proposed.append(sum(int(one.counts.proposed.sum()) for one in done))
        assert proposed[0] > 0
        assert proposed[1] == 0, kind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_confidence": 1.5}, "is no probability"),
        ({"min_confidence": True}, "is no probability"),
        ({"min_confidence": float("nan")}, "is no probability"),
        ({"min_confidence": "0.3"}, "is no probability"),
        ({"min_confidence": 0.3, "tree": TREE}, "a tree is asked for"),
    ],
)
def test_confidences_that_make_no_sense(
    given: dict[str, Any], words: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        jspec.load_drafter(TARGET, folders["eagle"], **given)
    assert caught.value.field == "min_confidence"
    if "tree" not in given:
        with pytest.raises(InputError, match=words):
            jspec.draft_model(TARGET, TARGET, **given)


def test_drafters_of_int8_weights(folders: dict[str, Path]) -> None:
    for kind in MADE:
        whole = jspec.load_drafter(TARGET, folders[kind])
        bound = jspec.load_drafter(TARGET, folders[kind], weights="int8")
        assert quantization.is_quantized(bound.params)

        def near(rounded: Any, exact: Any) -> None:
            given = np.asarray(exact, np.float64)
            if isinstance(rounded, Int8Matrix):
                largest = np.abs(given).max(axis=-1, keepdims=True)
                error = np.abs(quantization.dequantize(rounded) - given)
                assert (error <= 0.51 * largest / 127).all()
            else:
                np.testing.assert_array_equal(rounded, exact)

        jax.tree.map(near, bound.params, whole.params, is_leaf=quantization.is_int8)
    requests = [Request(p, SamplingParams(max_new_tokens=8)) for p in tiny.prompts(3)[1:]]
    bound = jspec.load_drafter(TARGET, folders["eagle"], weights="int8")
    found = Decoder(TARGET, bound, default_speculation(bound), batch_size=2).generate(requests)
    plain = Decoder(TARGET, batch_size=2).generate(requests)
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]


def test_the_shapes_of_drafts(folders: dict[str, Path]) -> None:
    def load(kind: str, **settings: Any) -> jspec.BoundDrafter:
        return jspec.load_drafter(TARGET, folders[kind], **settings)

    for kind in MADE:
        assert load(kind).drafts is None
        assert load(kind, lookup=True).name.startswith("hybrid-")
        assert load(kind, tree=TREE).drafts == 3
        assert load(kind, tree=TREE, lookup=True).drafts == 3
        if kind != "medusa":
            grown = load(kind, tree="dynamic", nodes=6, depth=3, width=2)
            assert grown.drafts == 6
            assert load(kind, tree=TREE, draws="independent").drafts == 3
    assert load("medusa").most_drafts == 3
    assert trained.most_drafts(folders["medusa"]) == 3
    assert trained.most_drafts(folders["eagle3"]) is None


@pytest.mark.parametrize(
    ("kind", "settings", "field", "problem"),
    [
        ("medusa", {"tree": "dynamic"}, "tree", "cannot be honoured by Medusa heads"),
        ("medusa", {"tree": (-1, 0, 1, 2, 3)}, "parents", "is 4 drafts deep"),
        ("medusa", {"tree": TREE, "draws": "independent"}, "draws", "by Medusa heads"),
        ("eagle", {"tree": TREE, "draws": "independent", "lookup": True}, "draws", "a hybrid"),
        ("eagle", {"tree": "optimal"}, "tree", "is no tree"),
        ("eagle", {"tree": (0, 1)}, "parents", "is no tree"),
        ("eagle", {"tree": "dynamic", "nodes": 200}, "nodes", "is outside 1..127"),
        ("eagle3", {"tree": TREE, "draws": "any"}, "draws", "is not a choice"),
        ("eagle3", {"lookup": 1}, "lookup", "is no boolean"),
        ("eagle3", {"weights": "int4"}, "weights", "is not a choice"),
    ],
)
def test_what_cannot_be_drafted(
    kind: str, settings: dict[str, Any], field: str, problem: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        jspec.load_drafter(TARGET, folders[kind], **settings)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["nowhere", "", 3, None, b"eagle3", "a\0b", "m" * 5000])
def test_no_such_drafter(name: Any) -> None:
    with pytest.raises(InputError, match="name=") as caught:
        jspec.load_drafter(TARGET, name)
    assert "eagle, medusa" in caught.value.remedy


def test_shipped_names_come_before_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    monkeypatch.setattr(trained, "_FOLDER", tmp_path)
    with pytest.raises(InputError, match="does not come with this installation"):
        trained.locate("medusa")
    tiny_heads.write(tmp_path / "medusa", *MADE["medusa"]())
    monkeypatch.chdir(folders["medusa"].parent)
    assert trained.locate("medusa") == tmp_path / "medusa"
    assert trained.locate("./medusa") == Path("medusa")
    assert jspec.load_drafter(TARGET, "medusa").name == "medusa-3"


def test_a_target_that_is_none() -> None:
    with pytest.raises(InputError, match="target="):
        jspec.load_drafter("smollm2", "eagle3")  # type: ignore[arg-type]
