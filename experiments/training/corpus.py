"""The folder of training data: text, and the target's features of it, in shards.

    settings.json        what the shards follow from; whoever uses the folder must agree with it
    text/NAME            tokens: text-00000 the target's own, input-00000 what a user gave
    features/NAME        features of the text of that name

Several drafters of one target can be trained from a folder. A shard has its name only when it is
whole, and follows from the settings and its number alone, so a job that was killed makes the
missing ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from experiments import journal, runs, tables
from experiments.status import Status
from experiments.training import features, fingerprint, sources
from experiments.training import text as texts
from experiments.training.sources import Item, Source
from experiments.training.text import Recipe
from jspec.errors import InputError, require
from jspec.model import Model

TEXT = "text"
FEATURES = "features"
_FORMAT = 1
_SUFFIX = ".safetensors"
_SAME = "give what it was begun with, or another --data"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What is to be in the folder.

    Attributes:
        folder: where.
        target: whose text and features.
        recipe: of its own text.
        tokens: of its own text, at least; 0 for none.
        given: the user's files.
        layers: target layers whose outputs are kept.
    """

    folder: Path
    target: Model
    recipe: Recipe
    tokens: int
    given: Sequence[Source]
    layers: tuple[int, ...]


def build(corpus: Corpus, status: Status) -> list[Path]:
    """Make the shards that are missing; returns those of features, in order.

    Text beyond `corpus.tokens`, as made for another job, is left out.

    Raises:
        InputError: the folder was made with other settings, is another process's at this time or
            cannot be written.
    """
    with _named(), journal.locked(corpus.folder):
        _settle(corpus)
        (corpus.folder / TEXT).mkdir(exist_ok=True)
        (corpus.folder / FEATURES).mkdir(exist_ok=True)
        # Given text first: how much there is of the other may change, and no shard's place should.
        names = [*_given(corpus, status), *_own(corpus, status)]
        require(
            len(names) > 0,
            "text_tokens",
            corpus.tokens,
            "asks for no text, and no given text fits",
            "ask for some tokens, or give --train_input=FILE",
        )
        _extract(corpus, names, status)
    return [corpus.folder / FEATURES / f"{name}{_SUFFIX}" for name in names]


def _settle(corpus: Corpus) -> None:
    """Compare the settings with those that the folder was begun with."""
    wanted: dict[str, Any] = {
        "format": _FORMAT,
        "target": fingerprint.of(corpus.target),
        "recipe": dataclasses.asdict(corpus.recipe),
        "layers": list(corpus.layers),
        "train_input": [[source.name, source.sha256] for source in corpus.given],
    }
    wanted = json.loads(runs.to_json(wanted))
    path = corpus.folder / journal.SETTINGS
    made = any(corpus.folder.glob(f"*/*{_SUFFIX}"))
    if not made:
        journal.write_json(path, wanted | {"model": corpus.target.name})
        return
    stored = journal.read_json(path)
    require(
        stored is not None,
        "data",
        str(corpus.folder),
        f"holds shards without a {journal.SETTINGS}: what they were made with is not known",
        "give another --data",
    )
    assert stored is not None
    for name in ("format", "target", "layers", "train_input"):
        require(
            stored.get(name) == wanted[name],
            "model" if name == "target" else name,
            corpus.target.name if name == "target" else wanted[name],
            f"is not what the data in {corpus.folder} were made with: "
            f"{stored.get('model' if name == 'target' else name)!r}",
            _SAME,
        )
    journal.require_same(stored.get("recipe") or {}, wanted["recipe"], _SAME)


def _own(corpus: Corpus, status: Status) -> Iterator[str]:
    """Make the target's own text; yields the names of its shards."""
    progress = _Progress(status, "Text of the target's own", corpus.tokens)
    done = number = 0
    while done < corpus.tokens:
        name = f"text-{number:05}"
        path = corpus.folder / TEXT / f"{name}{_SUFFIX}"
        made = not path.exists()
        if made:
            progress.show(done)
            turns = texts.user_turns(corpus.target, corpus.recipe, number)
            text = texts.answer(corpus.target, corpus.recipe, number, turns)
            with _disk(path):
                texts.write(path, text)
        tokens = _tokens(path)
        done += tokens
        progress.count(tokens, made)
        number += 1
        yield name


def _given(corpus: Corpus, status: Status) -> Iterator[str]:
    """Make the shards of given text; yields their names."""
    if not corpus.given:
        return
    shards = sources.shards(corpus.given, corpus.target, corpus.recipe)
    progress = _Progress(status, "Given text, shards", len(shards))
    for number, items in enumerate(shards):
        name = f"input-{number:05}"
        path = corpus.folder / TEXT / f"{name}{_SUFFIX}"
        made = not path.exists()
        if made:
            progress.show(number)
            text = sources.shard(corpus.target, corpus.recipe, number, items)
            if text is None:
                status.say(f"Nothing fits the model's context from {_span(items)}")
                continue
            if len(text.length) < len(items):
                left = len(items) - len(text.length)
                status.say(f"{left} rows from {_span(items)} do not fit the model's context")
            with _disk(path):
                texts.write(path, text)
        progress.count(1, made)
        yield name


def _span(items: Sequence[Item]) -> str:
    return f"{items[0].field} to {items[-1].field}"


def _extract(corpus: Corpus, names: Sequence[str], status: Status) -> None:
    """Make the features that are missing."""
    counts = [_tokens(corpus.folder / TEXT / f"{name}{_SUFFIX}") for name in names]
    progress = _Progress(status, "Features, tokens", sum(counts))
    done = 0
    for name, tokens in zip(names, counts, strict=True):
        path = corpus.folder / FEATURES / f"{name}{_SUFFIX}"
        made = not path.exists()
        if made:
            progress.show(done)
            text = texts.read(corpus.folder / TEXT / f"{name}{_SUFFIX}")
            found = features.extract(corpus.target, text, corpus.layers)
            with _disk(path):
                features.write(path, found)
        done += tokens
        progress.count(tokens, made)
    status.clear()


def _tokens(path: Path) -> int:
    with safe_open(path, "numpy") as file:
        return int(file.get_tensor("length").sum())


class _Progress:
    """Says how far it is, by what this process did itself."""

    def __init__(self, status: Status, what: str, total: int) -> None:
        self._status, self._what, self._total = status, what, total
        self._begun = time.monotonic()
        self._ours = 0

    def show(self, done: int) -> None:
        said = f"{self._what}: {done} of {self._total}"
        elapsed = time.monotonic() - self._begun
        if self._ours:
            left = tables.seconds(elapsed / self._ours * (self._total - done))
            said += f", {tables.rate(self._ours / elapsed)} a second, {left} left"
        self._status.busy(said)

    def count(self, more: int, made: bool) -> None:
        if made:
            self._ours += more
        elif not self._ours:
            self._begun = time.monotonic()  # what was there already took no time


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What a job's folder is to others, --data is here."""
    try:
        yield
    except InputError as error:
        if error.field != "output":
            raise
        remedy = error.remedy.replace("--output", "--data")
        raise InputError("data", error.value, error.problem, remedy) from error


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise InputError(
            "data",
            str(path),
            f"cannot be written ({error})",
            "free some space and run the same command again: what is finished is kept",
        ) from error
