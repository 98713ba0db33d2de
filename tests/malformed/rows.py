"""Malformed lines of a batch job, all in one job with a few good ones between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.malformed.cases import Case, World, begins

_HUGE = 10**400
_TEXTS = 'give {"prompt": text}'
_TURNS = "both strings"
_IDS = "give a list of token ids"

# Bytes are a line as it stands; field and value; the remedy.
_LINES: list[tuple[bytes, str, str]] = [
    (b"{", "row='{", 'as {"prompt": text}'),
    (b"not JSON", "row='not JSON", 'as {"prompt": text}'),
    (b'{"prompt": "p",}', 'row=\'{"prompt": "p",}', 'as {"prompt": text}'),
    (b"{'prompt': 'p'}", "row=\"{'prompt': 'p'}", 'as {"prompt": text}'),
    (b'{"prompt": "p"} {"prompt": "q"}', 'row=\'{"prompt": "p"} {', 'as {"prompt": text}'),
    (b'{"prompt": "\xff"}', 'row=b\'{"prompt": "\\xff"}', "save the file as UTF-8"),
    (b"\xff\xfe{\x00}\x00", "row=b'\\xff\\xfe{\\x00}\\x00", "save the file as UTF-8"),
    (b"\x00\x01\x02", "row='\\x00\\x01\\x02", 'as {"prompt": text}'),
    (b"[" * 50_000, "row='[[[[", 'as {"prompt": text}'),
    (b'{"prompt":' * 5_000, 'row=\'{"prompt":{"prompt":', 'as {"prompt": text}'),
    (b"9" * 5_000, "row='999", 'as {"prompt": text}'),
    (b"null", "row=None", _TEXTS),
    (b"3.5", "row=3.5", _TEXTS),
    (b"NaN", "row=nan", _TEXTS),
    (b'"prompt"', "row='prompt'", _TEXTS),
    (b'["prompt", "p"]', "row=['prompt', 'p']", _TEXTS),
    (b"{}", "row={}", 'as {"prompt": text}'),
]
# What a row with an id of its own says; the field and the value at fault; the remedy.
_ROWS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"prompt": "p", "turns": ["t"]}, "row", ..., 'as {"prompt": text}'),
    ({"text": "p"}, "row", ..., 'as {"prompt": text}'),
    ({"Prompt": "p"}, "row", ..., 'as {"prompt": text}'),
    ({"prompt": ""}, "prompt", "", "give some text"),
    ({"prompt": None}, "prompt", None, "give some text"),
    ({"prompt": 3}, "prompt", 3, "give some text"),
    ({"prompt": ["p"]}, "prompt", ["p"], "give some text"),
    ({"prompt": "\ud800"}, "prompt", ..., "remove lone surrogates"),
    ({"messages": []}, "messages", [], _TURNS),
    ({"messages": {}}, "messages", {}, _TURNS),
    ({"messages": "hi"}, "messages", "hi", _TURNS),
    ({"messages": [[]]}, "messages", [[]], _TURNS),
    ({"messages": [{"role": "user"}]}, "messages", [{"role": "user"}], _TURNS),
    ({"messages": [{"content": "p"}]}, "messages", [{"content": "p"}], _TURNS),
    ({"messages": [{"role": 1, "content": "p"}]}, "messages", ..., _TURNS),
    ({"messages": [{"role": "user", "content": None}]}, "messages", ..., _TURNS),
    ({"messages": [{"role": "user", "content": [{"text": "p"}]}]}, "messages", ..., _TURNS),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", ..., "remove lone"),
    ({"token_ids": []}, "token_ids", [], _IDS),
    ({"token_ids": 3}, "token_ids", 3, _IDS),
    ({"token_ids": "1 2 3"}, "token_ids", "1 2 3", _IDS),
    ({"token_ids": [1.5]}, "token_ids", [1.5], _IDS),
    ({"token_ids": [1, "2"]}, "token_ids", [1, "2"], _IDS),
    ({"token_ids": [True]}, "token_ids", [True], _IDS),
    ({"token_ids": [[1, 2]]}, "token_ids", [[1, 2]], _IDS),
    ({"token_ids": [1, None]}, "token_ids", [1, None], _IDS),
    ({"token_ids": [-1]}, "request.token_ids", -1, "target's tokenizer"),
    ({"token_ids": [257]}, "request.token_ids", 257, "target's tokenizer"),
    ({"token_ids": [_HUGE]}, "request.token_ids", _HUGE, "target's tokenizer"),
    ({"token_ids": [5] * 2000}, "request.token_ids", "<2000 tokens>", "shorten the prompt"),
    ({"prompt": "p" * 2000}, "request.token_ids", ..., "shorten the prompt"),
    ({"turns": []}, "turns", [], "user's texts"),
    ({"turns": "t"}, "turns", "t", "user's texts"),
    ({"turns": ["t", ""]}, "turns", ["t", ""], "user's texts"),
    ({"turns": [{"role": "user", "content": "p"}]}, "turns", ..., "user's texts"),
    ({"turns": ["t"], "n": 2, "temperature": 1}, "n", 2, "give n=1"),
    ({"prompt": "p", "temperature": "1"}, "temperature", "1", "0 for greedy"),
    ({"prompt": "p", "temperature": -0.1}, "temperature", -0.1, "0 for greedy"),
    ({"prompt": "p", "temperature": float("nan")}, "temperature", float("nan"), "0 for greedy"),
    ({"prompt": "p", "temperature": float("inf")}, "temperature", float("inf"), "0 for greedy"),
    ({"prompt": "p", "temperature": True}, "temperature", True, "0 for greedy"),
    ({"prompt": "p", "temperature": _HUGE}, "temperature", _HUGE, "0 for greedy"),
    ({"prompt": "p", "top_k": 0.5}, "top_k", 0.5, "give an integer"),
    ({"prompt": "p", "top_k": [1]}, "top_k", [1], "give an integer"),
    ({"prompt": "p", "top_p": 0}, "top_p", 0, "give 1"),
    ({"prompt": "p", "top_p": {}}, "top_p", {}, "give a number"),
    ({"prompt": "p", "min_p": 1.1}, "min_p", 1.1, "give 0"),
    ({"prompt": "p", "repetition_penalty": "x"}, "repetition_penalty", "x", "give a number"),
    ({"prompt": "p", "logit_bias": {"x": 1}}, "logit_bias", "x", "give an integer"),
    ({"prompt": "p", "logit_bias": {"-1": 1}}, "logit_bias", "-1", "give an integer"),
    ({"prompt": "p", "logit_bias": {"1": "x"}}, "logit_bias", "x", "give a number"),
    ({"prompt": "p", "logit_bias": {"1": _HUGE}}, "logit_bias", _HUGE, "give a number"),
    ({"prompt": "p", "logit_bias": [1, 2]}, "logit_bias", 1, "token id"),
    ({"prompt": "p", "logit_bias": 3}, "logit_bias", 3, "token id"),
    ({"prompt": "p", "logit_bias": {"300": 1}}, "request.logit_bias", 300, "target's tokenizer"),
    ({"prompt": "p", "bad_words": "x"}, "bad_words", "x", "give a list"),
    ({"prompt": "p", "bad_words": [1]}, "bad_words", 1, "lists of token ids"),
    ({"prompt": "p", "bad_words": [[]]}, "bad_words", (), "lists of token ids"),
    ({"prompt": "p", "bad_words": [[1, [2]]]}, "bad_words", [2], "give an integer"),
    ({"prompt": "p", "bad_words": ["x" * 40]}, "bad_words", "x" * 40, "a shorter text"),
    ({"prompt": "p", "stop": 5}, "stop", 5, "give a list"),
    ({"prompt": "p", "stop": {"a": 1}}, "stop", {"a": 1}, "give a list"),
    ({"prompt": "p", "stop": [""]}, "stop", "", "at least one character"),
    ({"prompt": "p", "stop": ["a", 5]}, "stop", 5, "at least one character"),
    ({"prompt": "p", "stop": "\ud800"}, "stop", "\ud800", "remove lone surrogates"),
    ({"prompt": "p", "stop_token_ids": "2"}, "stop_token_ids", "2", "give a list"),
    ({"prompt": "p", "stop_token_ids": [2.5]}, "stop_token_ids", 2.5, "give an integer"),
    ({"prompt": "p", "stop_token_ids": [_HUGE]}, "request.stop_token_ids", _HUGE, "tokenizer"),
    ({"prompt": "p", "ignore_eos": "yes"}, "ignore_eos", "yes", "give true or false"),
    ({"prompt": "p", "ignore_eos": 1}, "ignore_eos", 1, "give true or false"),
    ({"prompt": "p", "max_new_tokens": 0}, "max_new_tokens", 0, "at least one token"),
    ({"prompt": "p", "max_new_tokens": "many"}, "max_new_tokens", "many", "give an integer"),
    ({"prompt": "p", "min_new_tokens": 9}, "min_new_tokens", 9, "raise max_new_tokens"),
    ({"prompt": "p", "logprobs": True}, "logprobs", True, "give an integer"),
    ({"prompt": "p", "prompt_logprobs": 1000}, "prompt_logprobs", 1000, "ask for fewer"),
    ({"prompt": "p", "n": 0}, "n", 0, "at least one sample"),
    ({"prompt": "p", "n": 2}, "n", 2, "temperature above 0"),
    ({"prompt": "p", "n": 10**9, "temperature": 1}, "n", 10**9, "over several requests"),
    ({"prompt": "p", "seed": -1}, "seed", -1, "[0, 2**64)"),
    ({"prompt": "p", "seed": "1"}, "seed", "1", "give an integer"),
    ({"prompt": "p", "seed": 2**64}, "seed", 2**64, "[0, 2**64)"),
    ({"prompt": "p", "num_beams": 4}, "num_beams", 4, "leave it out"),
    ({"prompt": "p", "best_of": 2}, "best_of", 2, "leave it out"),
    ({"prompt": "p", "response_format": {"type": "x"}}, "response_format", ..., "leave it out"),
    ({"prompt": "p", "max_tokens": 3}, "max_tokens", 3, "did you mean max_new_tokens?"),
    ({"prompt": "p", "temprature": 1}, "temprature", 1, "did you mean temperature?"),
    ({"prompt": "p", "model": "gpt"}, "model", "gpt", "use one of temperature"),
    ({"prompt": "p", "": 1}, "", 1, "use one of temperature"),
]
# The id itself, so the line's name stands in for it.
_NAMELESS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"prompt": "p", "id": 1.5}, "id", 1.5, "leave it out"),
    ({"prompt": "p", "id": False}, "id", False, "leave it out"),
    ({"prompt": "p", "id": ["x"]}, "id", ["x"], "leave it out"),
    ({"prompt": "p", "question_id": {}}, "question_id", {}, "leave it out"),
]
_GOOD: list[dict[str, Any]] = [
    {"prompt": "good"},
    {"token_ids": [1, 2, 3], "seed": 5},
    {"turns": ["good"]},
]


def job() -> list[tuple[bytes, str | None]]:
    """Return the job's lines, each with its id, or None where that is the line's name."""
    lines: list[tuple[bytes, str | None]] = [(_text(_GOOD[0], "good-0"), "good-0")]
    lines += [(line, None) for line, *_ in _LINES]
    lines.append((_text(_GOOD[1], "good-1"), "good-1"))
    lines += [(_text(row, _id(row)), _id(row)) for row, *_ in _ROWS]
    lines += [(_text(row), None) for row, *_ in _NAMELESS]
    lines.append((_text(_GOOD[2], "good-2"), "good-2"))
    return lines


def _text(row: dict[str, Any], identity: str | None = None) -> bytes:
    return json.dumps({"id": identity, **row} if identity else row).encode()


def _id(row: dict[str, Any]) -> str:
    return f"row {json.dumps(row)}"


def _error(index: int) -> Callable[[World], str]:
    def sentence(world: World) -> str:
        return world.row_errors[index] or ""

    return sentence


def cases() -> list[Case]:
    """Return the table, in the job's order."""
    found = list(_LINES)
    found += [
        (_text(row), begins(field, value), remedy)
        for row, field, value, remedy in [*_ROWS, *_NAMELESS]
    ]
    at = [index for index, (_, name) in enumerate(job()) if not (name or "").startswith("good-")]
    return [
        Case(f"row {line[:70].decode('ascii', 'replace')}", _error(index), start, remedy)
        for index, (line, start, remedy) in zip(at, found, strict=True)
    ]
