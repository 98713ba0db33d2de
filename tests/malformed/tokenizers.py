"""Malformed tokenizers and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jspec
from jspec.tokenizers import from_gguf
from tests.malformed.cases import Case, World, begins, given, raised, write_json
from tests.oracles.tiny_vocabularies import byte_level, sentencepiece

_AGAIN = "fetch the file again"
_CONVERT = "convert the model to GGUF again"
_CHAT = [{"role": "user", "content": "p"}]

# tokenizer.json as it stands; all name its path.
_FILES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("cut", b'{"version": "1.0", "model":'),
    ("Latin", b'{"version": "\xfc"}'),
    ("list", b"[]"),
    ("null", b"null"),
    ("without model", b'{"version": "1.0"}'),
    ("deep", b"[" * 100_000),
]
# Entries of tokenizer.json in place of its own; all name its path.
_PARTS: list[tuple[str, Any]] = [
    ("model", {}),
    ("model", {"type": "BPE", "vocab": [], "merges": []}),
    ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    ("model", {"type": "BPE", "vocab": {"a": "0"}, "merges": []}),
    ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
    ("model", {"type": "Quantum", "vocab": {}}),
    ("pre_tokenizer", {"type": "Nothing"}),
    ("added_tokens", {"content": "x"}),
    ("added_tokens", [{"id": "x"}]),
    ("decoder", "ByteLevel"),
]
_DECODERS: list[Any] = [
    None,
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
    {"type": "BPEDecoder", "suffix": "</w>"},
]
# Other files of the tokenizer; field; remedy.
_OTHERS: list[tuple[str, bytes, str, str]] = [
    ("tokenizer_config.json", b"{", "path", _AGAIN),
    ("tokenizer_config.json", b"[]", "path", "fetch it again"),
    ("special_tokens_map.json", b"\xff", "path", _AGAIN),
    ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template=3", "template again"),
    ("tokenizer_config.json", b'{"chat_template": {}}', "chat_template={}", "template again"),
    ("tokenizer_config.json", b'{"chat_template": [1]}', "chat_template=[1]", "_config.json again"),
    (
        "tokenizer_config.json",
        b'{"chat_template": [{"name": "default", "template": [2]}]}',
        "chat_template=[2]",
        "template again",
    ),
    ("chat_template.jinja", b"\xff", "chat_template", _AGAIN),
]
_TURNS, _SOURCE = "that the model was trained with", "fix the checkpoint's file"
# Templates; field; remedy.
_TEMPLATES: list[tuple[str, str, str]] = [
    ("{% for m in messages %}", "chat_template='{%", _SOURCE),
    ("{{ messages", "chat_template='{{", _SOURCE),
    ("{% nonsense %}", "chat_template='{%", _SOURCE),
    ("{{ x | no_such_filter }}", "chat_template='{{", _SOURCE),
    ("{{" + "(" * 20_000, "chat_template='{{", _SOURCE),
    ("{{ no_such_function(messages) }}", "messages=[", _TURNS),
    ("{{ messages[3].content }}", "messages=[", _TURNS),
    ("{{ messages[0].content.no.such }}", "messages=[", _TURNS),
    ("{{ 1 / 0 }}", "messages=[", _TURNS),
    ("{{ 'a' + 1 }}", "messages=[", _TURNS),
    ("{{ raise_exception('no') }}", "messages=[", _TURNS),
    ("{{ strftime_now(3) }}", "messages=[", _TURNS),
    ("{{ ''.__class__.__mro__ }}", "messages=[", _TURNS),
    ("{{ messages.append(1) }}", "messages=[", _TURNS),
    ("{{ range(10000000) | list }}", "messages=[", _TURNS),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "messages=[", _TURNS),
    ("{% include 'x' %}", "messages=[", _TURNS),
    ("{{ messages | tojson(indent=[]) }}", "messages=[", _TURNS),
    ("{{ '%d' % 'x' }}", "messages=[", _TURNS),
]
_BYTES, _PIECES = byte_level([("a", "b")]), sentencepiece({"a": -1.0, "ab": -0.5, "b": -2.0})
# A vocabulary, what is in place of its own (under tokenizer.ggml); field; value; remedy.
_GGUF: list[tuple[Mapping[str, Any], dict[str, Any], str, Any, str]] = [
    (_BYTES, {"model": None}, "model", None, "gpt2 or llama"),
    (_BYTES, {"model": "bert"}, "model", "bert", "gpt2 or llama"),
    (_BYTES, {"model": ["gpt2"]}, "model", ["gpt2"], "gpt2 or llama"),
    (_BYTES, {"pre": "deepseek"}, "pre", "deepseek", "qwen2"),
    (_BYTES, {"pre": ["gpt-2"]}, "pre", ["gpt-2"], "qwen2"),
    (_BYTES, {"tokens": None}, "tokens", None, _CONVERT),
    (_BYTES, {"tokens": "abc"}, "tokens", "abc", _CONVERT),
    (_BYTES, {"tokens": [1, 2]}, "tokens", [1, 2], _CONVERT),
    (_BYTES, {"tokens": ["a"]}, "token_type", 259, _CONVERT),
    (_BYTES, {"merges": None}, "merges", None, _CONVERT),
    (_BYTES, {"merges": [3]}, "merges", [3], _CONVERT),
    (_BYTES, {"merges": ["ab"]}, "merges", [("ab",)], _CONVERT),
    (_BYTES, {"merges": ["a missing"]}, "merges", [("a", "missing")], _CONVERT),
    (_BYTES, {"token_type": 3}, "token_type", 3, _CONVERT),
    (_BYTES, {"token_type": ["normal"]}, "token_type", ["normal"], _CONVERT),
    (_BYTES, {"token_type": [1]}, "token_type", 1, _CONVERT),
    (_BYTES, {"bos_token_id": 999, "add_bos_token": True}, "bos_token_id", 999, _CONVERT),
    (_BYTES, {"bos_token_id": -1, "add_bos_token": True}, "bos_token_id", -1, _CONVERT),
    (_BYTES, {"bos_token_id": "0", "add_bos_token": True}, "bos_token_id", "0", _CONVERT),
    (_BYTES, {"eos_token_id": 1.0, "add_eos_token": True}, "eos_token_id", 1.0, _CONVERT),
    (_PIECES, {"scores": None}, "scores", None, _CONVERT),
    (_PIECES, {"scores": [0.5]}, "scores", 1, _CONVERT),
    (_PIECES, {"scores": ["x"] * 262}, "scores", ..., _CONVERT),
    (_PIECES, {"unknown_token_id": 10**9}, "unknown_token_id", 10**9, _CONVERT),
]


def _file(name: str, data: bytes) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied()
        (path / name).write_bytes(data)
        return jspec.load(path)

    return run


def _part(name: str, value: Any) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied()
        write_json(path / "tokenizer.json", {name: value})
        return jspec.load(path)

    return run


def _template(source: str) -> Callable[[World], object]:
    def run(w: World) -> object:
        path = w.copied()
        (path / "chat_template.jinja").write_text(source)
        return jspec.to_token_ids(jspec.load(path), _CHAT)

    return run


def _build(vocabulary: Mapping[str, Any], changes: dict[str, Any]) -> Callable[[World], object]:
    named = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return lambda _: from_gguf.build({**vocabulary, **named})


def _gone(w: World) -> object:
    path = w.copied()
    (path / "tokenizer.json").unlink()
    return jspec.load(path)


def _sentencepiece_alone(w: World) -> object:
    path = w.copied()
    (path / "tokenizer.json").rename(path / "tokenizer.model")
    return jspec.load(path)


def _directory(w: World) -> object:
    path = w.copied()
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").mkdir()
    return jspec.load(path)


def _too_many(w: World) -> object:
    path = w.copied()
    tokens = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    more = [tokens[0] | {"id": 257 + i, "content": f"<{i}>"} for i in range(3)]
    write_json(path / "tokenizer.json", {"added_tokens": tokens + more})
    return jspec.load(path)


def cases() -> list[Case]:
    """Return the table."""
    found = [
        (f"tokenizer.json {name}", _file("tokenizer.json", data), "path=", _AGAIN)
        for name, data in _FILES
    ]
    found += [
        (f"tokenizer.json {name} {value}", _part(name, value), "path=", _AGAIN)
        for name, value in _PARTS
    ]
    found += [
        (f"decoder {value}", _part("decoder", value), given("decoder", value), "byte fallback")
        for value in _DECODERS
    ]
    found += [
        (f"{name} {data!r}", _file(name, data), field if "=" in field else f"{field}=", remedy)
        for name, data, field, remedy in _OTHERS
    ]
    found += [
        (f"template {source[:60]}", _template(source), field, remedy)
        for source, field, remedy in _TEMPLATES
    ]
    found += [
        (
            f"gguf {changes}"[:70],
            _build(vocabulary, changes),
            begins(f"tokenizer.ggml.{field}", v),
            remedy,
        )
        for vocabulary, changes, field, v, remedy in _GGUF
    ]
    found += [
        ("no tokenizer.json", _gone, "path=", "copy the tokenizer's files"),
        ("tokenizer.model alone", _sentencepiece_alone, "path=", "save the tokenizer again"),
        ("tokenizer.json a directory", _directory, "path=", _AGAIN),
        ("too many tokens", _too_many, "tokenizer=", "that the model was trained with"),
    ]
    return [Case(name, raised(run), start, remedy) for name, run, start, remedy in found]
