"""Rows of a batch job: a JSON object each, what it asks for and what has been answered."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import jspec
from experiments import flags, input_files
from experiments.input_files import InputFile, Line
from experiments.prompts import Source, is_turn
from jspec.errors import InputError, require
from jspec.requests import Request
from jspec.sampling_params import SamplingParams, from_mapping

KINDS = ("prompt", "messages", "token_ids", "turns")
# Spec-Bench's fields about a question; they go into its result as they are.
_COPIED = ("category", "subcategory", "source", "reference")
_NAMED = ("id", "question_id", *KINDS, *_COPIED)


@dataclasses.dataclass
class Row:
    """A row on its way.

    Attributes:
        index: among all rows of the job.
        id: its own, or the line's name.
        copied: fields that the result has too.
        kind: which of `KINDS` it is, "" while that is not known.
        content: under that name: text, a chat, token ids, or the user's turns.
        sampling: parameters, with the row's own seed; None while they are not known.
        answers: what is answered: one, or one a turn.
        error: why it failed, None unless it did.
    """

    index: int
    id: str | int
    copied: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = ""
    content: Any = None
    sampling: SamplingParams | None = None
    answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def turns(self) -> int:
        """Answers that it asks for."""
        return len(self.content) if self.kind == "turns" else 1

    @property
    def finished(self) -> bool:
        """Nothing is left to answer."""
        return self.error is not None or len(self.answers) == self.turns

    def fail(self, error: InputError) -> None:
        """End it with an error, on one line whatever a library's message brought along."""
        self.error = " ".join(str(error).split())

    def request(self, model: jspec.Model, raw: bool) -> Request:
        """Return what is to be decoded next.

        Args:
            model: whose tokenizer and chat template apply.
            raw: a text is continued as it stands.

        Raises:
            InputError: the chat template refuses the row; the field is "model" where the model has
                none.
        """
        assert self.sampling is not None
        if self.kind == "token_ids":
            return Request(tuple(self.content), self.sampling)
        if self.kind != "turns":
            prompt = self.content if self.kind == "prompt" else tuple(self.content)
            return Request(Source(self.kind, prompt).token_ids(model, raw), self.sampling)
        turn = len(self.answers)
        chat = []
        for text, answer in zip(self.content, self.answers, strict=False):
            chat.append({"role": "user", "content": text})
            chat.append({"role": "assistant", "content": answer["text"]})
        chat.append({"role": "user", "content": self.content[turn]})
        ids = Source(f"turns[{turn}]", tuple(chat)).token_ids(model, raw=False)
        seed = _seed_of_turn(self.sampling.seed, turn)
        return Request(ids, dataclasses.replace(self.sampling, seed=seed))


def parse(line: Line, base: SamplingParams, raw: bool) -> Row:
    """Return the row of a line; what is wrong with it is its error.

    Args:
        line: a JSON object with exactly one of `KINDS`.
        base: what holds where the row says nothing; its seed is the job's, from which the row's
            own follows with the row's index alone.
        raw: texts are continued as they stand, so chats make no sense.
    """
    row = Row(line.index, line.name)
    try:
        value = _read(line.data)
        row.copied = {name: value[name] for name in _COPIED if name in value}
        row.id = _identity(value, line.name)
        row.kind, row.content = _content(value, raw)
        asked = {name: item for name, item in value.items() if name not in _NAMED}
        sampling = from_mapping(asked, flags.of_prompt(base, line.index))
        require(
            row.kind != "turns" or sampling.n == 1,
            "n",
            sampling.n,
            "asks for several samples, and the next turn needs one answer to follow",
            "give n=1, or a row with messages",
        )
        row.sampling = sampling
    except InputError as error:
        row.fail(error)
    return row


def check_ids(files: Sequence[InputFile]) -> None:
    """Raise `InputError` where two rows have the same id.

    Sixteen bytes a row are kept, so a million rows take 16 MB.
    """
    digests = bytearray()
    for line in input_files.lines(files):
        digests += hashlib.blake2b(json.dumps(_id(line)).encode(), digest_size=16).digest()
    halves = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 0], halves[:, 1]))
    twice = np.flatnonzero((halves[order[1:]] == halves[order[:-1]]).all(axis=1))
    if len(twice):
        pair = order[twice[0] : twice[0] + 2].tolist()
        first, second = (line for line in input_files.lines(files) if line.index in pair)
        raise InputError(
            "id",
            _id(second),
            f"is that of {first.name} and of {second.name}",
            "give every row an id of its own, or none",
        )


def _id(line: Line) -> str | int:
    """Return a line's id, whatever else is wrong with it."""
    try:
        return _identity(_read(line.data), line.name)
    except InputError:
        return line.name


def _read(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "row", data, f"is not UTF-8 (byte {error.start})", "save the file as UTF-8"
        ) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(
            "row", text, "is not JSON", 'give an object, as {"prompt": text}'
        ) from None
    require(isinstance(value, dict), "row", value, "is no object", 'give {"prompt": text}')
    return value


def _identity(value: Mapping[str, Any], name: str) -> str | int:
    field = "id" if value.get("id") is not None else "question_id"
    given = value.get(field)
    if given is None:
        return name
    require(
        isinstance(given, str | int) and not isinstance(given, bool),
        field,
        given,
        "is neither a string nor an integer",
        "give one of them, or leave it out",
    )
    return given


def _content(value: Mapping[str, Any], raw: bool) -> tuple[str, Any]:
    kinds = [kind for kind in KINDS if kind in value]
    require(
        len(kinds) == 1,
        "row",
        dict(value),
        f"has not exactly one of {', '.join(KINDS)}",
        'give one, as {"prompt": text}',
    )
    (kind,) = kinds
    content = value[kind]
    if kind == "prompt":
        fits, remedy = isinstance(content, str) and content != "", "give some text"
    else:
        item, remedy = {
            "messages": (is_turn, 'give a list of {"role": ..., "content": ...}, both strings'),
            "token_ids": (_is_id, "give a list of token ids"),
            "turns": (_is_text, "give a list of the user's texts"),
        }[kind]
        fits = isinstance(content, list) and len(content) > 0 and all(map(item, content))
    require(fits, kind, content, "is of the wrong kind or empty", remedy)
    require(
        not raw or kind in ("prompt", "token_ids"),
        kind,
        content,
        "is a chat, which --raw cannot continue as it stands",
        'leave --raw out, or give {"prompt": text}',
    )
    return kind, content


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_text(item: Any) -> bool:
    return isinstance(item, str) and item != ""


def _seed_of_turn(seed: int | None, turn: int) -> int | None:
    """Turns draw from streams of their own."""
    if turn == 0 or seed is None:
        return seed
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
