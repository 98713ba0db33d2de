"""The code that the documents show, run as it stands on a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jspec
from tests import tiny
from tests.experiments.conftest import write_model

ROOT = Path(__file__).parents[1]


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> jspec.Model:
    return jspec.load(write_model(tmp_path_factory.mktemp("docs") / "tiny"))


def test_the_drafter_of_the_guide_works_and_is_short(
    model: jspec.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    define, use, branch = blocks("docs/writing_a_drafter.md")
    drafter_lines = re.search(r"@dataclasses.*?(?=\n\n\ndef )", define, re.DOTALL)
    assert drafter_lines is not None
    assert len(drafter_lines[0].splitlines()) < 40
    monkeypatch.setattr(jspec, "load", lambda: model)
    names: dict[str, Any] = {}
    exec(define + use, names)
    assert capsys.readouterr().out

    # A table made of the model's own output drafts well, and changes nothing.
    prompts = ["the cat sat on", "abab"]
    plain = jspec.generate(model, prompts)
    corpus = [*jspec.to_token_ids(model, prompts[0]), *plain[0].token_ids]
    drafter = names["successors"](corpus, model.config.vocab_size)
    drafted = jspec.generate(model, prompts, drafter=drafter)
    assert [d.token_ids for d in drafted] == [p.token_ids for p in plain]
    assert drafted[0].counts.accepted.sum() > 0
    assert drafted[0].counts.rounds < plain[0].counts.rounds

    # The tree's second guesses are right where the first ones are made not to be.
    exec(branch, names)
    table = np.stack([np.zeros_like(drafter.params), drafter.params], axis=1)
    guessed = jspec.generate(model, prompts, drafter=names["first_or_second"](table))
    assert [d.token_ids for d in guessed] == [p.token_ids for p in plain]
    assert guessed[0].counts.accepted.sum() > 0


@pytest.mark.parametrize("document", ["README.md"])
def test_the_library_as_the_readme_shows_it(
    document: str,
    model: jspec.Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jspec, "load", lambda: model)
    for block in blocks(document):
        exec(block, {})
    assert capsys.readouterr().out


def test_every_file_that_a_document_links_is_there() -> None:
    for document in ROOT.glob("**/*.md"):
        if ".venv" in document.parts or "results" in document.parts:
            continue
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links {link}"


def test_the_vocabulary_of_the_guide(model: jspec.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    _, reduced = blocks("docs/trained_drafters.md")
    monkeypatch.setattr(jspec, "load", lambda: model)
    names: dict[str, Any] = {}
    exec(reduced, names)
    assert names["drafter"].params.vocabulary.shape == (64,)
