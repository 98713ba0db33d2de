"""What users give to train on: prompts that the target answers, and text as it stands."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.paths import expanded
from experiments.prompts import is_turn
from experiments.training import text as texts
from experiments.training.text import Recipe, Text
from jspec.errors import InputError, require
from jspec.generation import Decoder
from jspec.model import Model
from jspec.requests import Request
from jspec.sampling_params import SamplingParams

_FIELD = "train_input"
_KINDS = ("prompt", "messages", "turns", "text")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")
_SHORTEST = 8  # tokens of a text that teach anything
_STREAM = 1 << 32  # seeds of given prompts are apart from those of self-written ones


@dataclasses.dataclass(frozen=True)
class Source:
    """A file that is trained on.

    Attributes:
        name: without its folder.
        sha256: of its content, uncompressed.
        items: what it holds, in its order.
    """

    name: str
    sha256: str
    items: tuple[Item, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """A line of a file, or a whole text.

    Attributes:
        field: where it stands, for messages: "chats.jsonl:3".
        chat: turns that are there already.
        questions: of the user, asked one after the other; each is answered by the target.
        text: plain text, for which there is neither chat nor question.
        token_ids: a piece of such a text, in the target's tokens.
    """

    field: str
    chat: tuple[Mapping[str, str], ...] = ()
    questions: tuple[str, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] = ()


def read(paths: Sequence[str]) -> list[Source]:
    """Return the files of --train_input.

    Args:
        paths: .txt files, each a text as it stands; .jsonl or .jsonl.gz files with one of `prompt`
            (a question), `turns` (questions one after the other), `messages` (a chat, which is
            answered unless it ends with an answer) and `text` (as it stands) a line; other fields
            have no effect.

    Raises:
        InputError: a file or one of its lines is wrong.
    """
    return [_read(expanded(_FIELD, path), path) for path in paths]


def shards(sources: Sequence[Source], target: Model, recipe: Recipe) -> list[tuple[Item, ...]]:
    """Return what belongs to each shard of given text: texts are cut, prompts stay whole.

    Args:
        sources: the files.
        target: whose tokenizer counts.
        recipe: a shard has its `conversations`.
    """
    items = [item for source in sources for item in source.items]
    count = recipe.conversations
    cut = [piece for item in items for piece in _pieces(item, target, recipe)]
    return [tuple(cut[at : at + count]) for at in range(0, len(cut), count)]


def shard(target: Model, recipe: Recipe, number: int, items: Sequence[Item]) -> Text | None:
    """Return a shard of given text with the target's answers, None where no item fits.

    Args:
        target: with a tokenizer, and a chat template where there are prompts.
        recipe: how answers are made.
        number: the shard's.
        items: of the shard; those too long for the target's context are left out.
    """
    assert target.tokenizer is not None
    rows: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for place, item in enumerate(items):
        if item.token_ids:
            rows[place] = (), item.token_ids
        elif not item.questions and item.chat[-1]["role"] == "assistant":
            rows[place] = _as_it_stands(target, item)
    rows |= _answered(target, recipe, number, items, set(rows))
    whole = target.config.max_context
    fitting = [rows[at] for at in sorted(rows) if sum(map(len, rows[at])) <= whole]
    return texts.of_rows(fitting) if fitting else None


def _answered(
    target: Model, recipe: Recipe, number: int, items: Sequence[Item], done: set[int]
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ask the questions in turn, all items at once; returns the last prompt and answer of each."""
    assert target.tokenizer is not None
    decoder = Decoder(target, batch_size=recipe.conversations)
    temperature = recipe.temperatures[number % len(recipe.temperatures)]
    chats = {
        place: [dict(turn) for turn in item.chat]
        for place, item in enumerate(items)
        if place not in done
    }
    found: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    turn = 0
    while chats:
        requests: dict[int, Request] = {}
        for place, chat in chats.items():
            questions = items[place].questions
            if questions:
                chat.append({"role": "user", "content": questions[turn]})
            ids = tuple(target.tokenizer.encode(target.tokenizer.apply_chat_template(chat)))
            if len(ids) + recipe.answer_tokens <= target.config.max_context:
                seed = texts.seed_of(recipe, _STREAM + number, place + len(items) * turn)
                sampling = SamplingParams(
                    temperature=temperature, max_new_tokens=recipe.answer_tokens, seed=seed
                )
                requests[place] = Request(ids, sampling)
        answers = decoder.generate(list(requests.values()))
        going: dict[int, list[dict[str, str]]] = {}
        for (place, request), answer in zip(requests.items(), answers, strict=True):
            if answer.error is not None:
                continue
            found[place] = request.token_ids, answer.token_ids
            if turn + 1 < len(items[place].questions):
                going[place] = [*chats[place], {"role": "assistant", "content": answer.text}]
        chats = going
        turn += 1
    return found


def _as_it_stands(target: Model, item: Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a chat that ends with an answer as prompt and answer."""
    assert target.tokenizer is not None
    prompt = target.tokenizer.encode(target.tokenizer.apply_chat_template(item.chat[:-1]))
    answer = target.tokenizer.encode(item.chat[-1]["content"], parse_special_tokens=False)
    return tuple(prompt), (*answer, *target.eos_token_ids[:1])


def _pieces(item: Item, target: Model, recipe: Recipe) -> Iterator[Item]:
    """Cut a text into pieces as long as a conversation may be."""
    if item.text is None:
        yield item
        return
    assert target.tokenizer is not None
    longest = min(recipe.material_tokens + recipe.answer_tokens, target.config.max_context)
    ids = target.tokenizer.encode(item.text, parse_special_tokens=False)
    for begin in range(0, len(ids), longest):
        part = tuple(ids[begin : begin + longest])
        if len(part) >= _SHORTEST:
            yield Item(item.field, token_ids=part)


def _read(path: Path, given: str) -> Source:
    require(
        path.name.endswith(_SUFFIXES),
        _FIELD,
        given,
        f"is none of {', '.join(_SUFFIXES)}",
        "give JSON lines, or plain text",
    )
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        content = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            _FIELD, given, f"is not UTF-8 (byte {error.start})", "save it as UTF-8"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise InputError(_FIELD, given, f"cannot be read ({problem})", "check the path") from None
    if path.suffix == ".txt":
        items = [Item(path.name, text=content)] if content.strip() else []
    else:
        lines = enumerate(content.split("\n"), start=1)
        items = [_item(f"{path.name}:{number}", line) for number, line in lines if line.strip()]
    require(len(items) > 0, _FIELD, given, "is empty", "give a file with something to train on")
    return Source(path.name, hashlib.sha256(data).hexdigest(), tuple(items))


def _item(field: str, line: str) -> Item:
    remedy = f"give an object with one of {', '.join(_KINDS)}"
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(field, line, "is not JSON", remedy) from None
    kinds = [kind for kind in _KINDS if isinstance(value, dict) and kind in value]
    require(len(kinds) == 1, field, line, f"has not exactly one of {', '.join(_KINDS)}", remedy)
    (kind,) = kinds
    content = value[kind]
    if kind in ("prompt", "text"):
        fits, remedy = _is_text(content), "give some text"
    else:
        single, remedy = {
            "messages": (is_turn, 'give a list of {"role": ..., "content": ...}, both strings'),
            "turns": (_is_text, "give a list of the user's texts"),
        }[kind]
        fits = isinstance(content, list) and len(content) > 0 and all(map(single, content))
    require(fits, field, content, f"has {kind} of the wrong kind or empty", remedy)
    if kind == "text":
        return Item(field, text=content)
    if kind == "messages":
        return Item(field, chat=tuple(content))
    return Item(field, questions=(content,) if kind == "prompt" else tuple(content))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""
