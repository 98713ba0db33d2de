from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver

import jspec
from experiments import acceptance_drafters
from experiments.acceptance_drafters import Spec
from experiments.tree_flags import Choice
from jspec.errors import InputError
from tests import tiny

ITEMS = (
    "ngram,early-exit:26@3,2,1,eagle3+int8+lookup@dynamic:16,medusa@parents:-1,0,0,1,a/b@chain:6,"
    "early-exit:9+sure:.4,eagle3+int8+sure:0.3+lookup"
)


@pytest.fixture
def parsed_flags() -> Iterator[None]:
    with flagsaver.flagsaver():
        flags.FLAGS(["jspec"])
        yield


def test_commas_of_a_tree_are_its_own() -> None:
    found = acceptance_drafters.parse(ITEMS.split(","))
    assert found == [
        Spec("ngram", "ngram", "", False, "same", 0, None, None),
        Spec(
            "early-exit:26@3,2,1",
            "early-exit",
            "26",
            False,
            "same",
            0,
            None,
            Choice("static", (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9), 15, 0, 0),
        ),
        Spec(
            "eagle3+int8+lookup@dynamic:16",
            "trained",
            "eagle3",
            True,
            "int8",
            0,
            None,
            Choice("dynamic", (), 16, 5, 4),
        ),
        Spec(
            "medusa@parents:-1,0,0,1",
            "trained",
            "medusa",
            False,
            "same",
            0,
            None,
            Choice("static", (-1, 0, 0, 1), 3, 0, 0),
        ),
        Spec("a/b@chain:6", "trained", "a/b", False, "same", 0, 6, None),
        Spec("early-exit:9+sure:.4", "early-exit", "9", False, "same", 0.4, None, None),
        Spec("eagle3+int8+sure:0.3+lookup", "trained", "eagle3", True, "int8", 0.3, None, None),
    ]
    # A name after a tree's comma is a drafter of its own.
    assert [spec.text for spec in acceptance_drafters.parse(["a@3", "2", "b"])] == ["a@3,2", "b"]
    (sized,) = acceptance_drafters.parse(["eagle3@dynamic:20/6/8"])
    assert sized.tree == Choice("dynamic", (), 20, 6, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no drafter"),
        ("3,2", "is no drafter"),
        ("ngram,", "is no drafter"),
        ("ngram,ngram", "names one twice"),
        ("ngram:3", "is no drafter"),
        ("ngram+lookup", "cannot have"),
        ("early-exit:3+int8", "cannot have"),
        ("ngram+sure:0.3", "cannot have .sure"),
        ("eagle3+sure:0.3@2,1", "cannot have .sure"),
        ("eagle3+sure:0.3@dynamic", "cannot have .sure"),
        ("ngram@3,2", "lookups"),
        ("early-exit", "after how many layers"),
        ("early-exit:x", "after how many layers"),
        ("draft-model:", "which model"),
        ("eagle3@", "is no drafter"),
        ("@3,2", "is no drafter"),
        ("eagle3@3,0", "level without children"),
        ("eagle3@dynamic:0", "no such number"),
        ("eagle3@dynamic:200", "no such number"),
        ("eagle3@dynamic:16/", "is no tree"),
        ("eagle3@chain:x", "no such number"),
        ("eagle3@parents:-1,5", "is no tree"),
    ],
)
def test_what_is_not_in_the_notation(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        acceptance_drafters.parse(text.split(",") if text else [""])
    assert caught.value.field == "acceptance_drafters"


def test_nothing_at_all() -> None:
    with pytest.raises(InputError, match="is empty"):
        acceptance_drafters.parse([])


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("eagle3", {"lookup": False, "weights": "same"}),
        ("eagle3+lookup", {"lookup": True, "weights": "same"}),
        ("eagle3+int8", {"lookup": False, "weights": "int8"}),
        ("eagle3+sure:0.3", {"lookup": False, "weights": "same", "min_confidence": 0.3}),
        (
            "eagle3@dynamic:16",
            {
                "tree": "dynamic",
                "nodes": 16,
                "depth": 5,
                "width": 4,
                "lookup": False,
                "weights": "same",
            },
        ),
        (
            "eagle3@2,1",
            {"tree": (-1, 0, 0, 1, 2), "lookup": False, "weights": "same"},
        ),
    ],
)
def test_trained_ones_are_loaded_as_they_are_asked_for(
    text: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, parsed_flags: None
) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_drafter(target: jspec.Model, name: str, **more: Any) -> jspec.BoundDrafter:
        calls.append((target, name, more))
        return jspec.ngram()

    monkeypatch.setattr(jspec, "load_drafter", load_drafter, raising=False)
    (spec,) = acceptance_drafters.parse(text.split(","))
    assert acceptance_drafters.bind(tiny.model(), spec).name == text
    assert calls == [(tiny.model(), "eagle3", asked)]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ("ngram", None),
        ("ngram@dynamic:6", 6),
        ("early-exit:1", None),
        ("early-exit:1@2,1", 4),
        ("early-exit:1@dynamic:5/2/2", 5),
    ],
)
def test_drafters_of_the_target_itself(text: str, drafts: int | None, parsed_flags: None) -> None:
    (spec,) = acceptance_drafters.parse(text.split(","))
    bound = acceptance_drafters.bind(tiny.model(), spec)
    assert (bound.name, bound.drafts) == (text, drafts)


def test_what_cannot_be_bound_names_the_drafter(parsed_flags: None) -> None:
    (spec,) = acceptance_drafters.parse(["early-exit:9"])
    with pytest.raises(InputError, match=r"outside 1\.\.1") as caught:
        acceptance_drafters.bind(tiny.model(), spec)
    assert (caught.value.field, caught.value.value) == ("acceptance_drafters", "early-exit:9")
