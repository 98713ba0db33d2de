"""Prompts from the command line and from files, and the flags that ask for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

import jspec
from experiments.paths import expanded
from jspec.errors import InputError, require

INPUT = absl_flags.DEFINE_multi_string(
    "input",
    [],
    'File of prompts, given again for more: .jsonl with {"prompt": text} or {"messages": turns} a '
    "line, in generate also .txt with one a line, in batch also .jsonl.gz and more fields.",
)
RAW = absl_flags.DEFINE_boolean(
    "raw", False, "Continue the text as it stands, without the chat template."
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A prompt and where it came from.

    Attributes:
        field: for messages: "prompt[0]" or "questions.jsonl:3".
        prompt: text or a chat.
    """

    field: str
    prompt: str | tuple[Mapping[str, str], ...]

    @property
    def title(self) -> str:
        """The prompt, or the last turn of the chat, on one short line."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
        line = " ".join(text.split())
        return line if len(line) <= 72 else f"{line[:69]}..."

    def token_ids(self, model: jspec.Model, raw: bool) -> tuple[int, ...]:
        """Return the prompt's ids.

        Args:
            model: whose tokenizer and chat template apply.
            raw: continue a text as it stands instead of asking it as a chat's first turn.

        Raises:
            InputError: the model has no chat template, or the template refuses the chat.
        """
        prompt = self.prompt
        if isinstance(prompt, str) and not raw:
            prompt = ({"role": "user", "content": prompt},)
        try:
            return jspec.to_token_ids(model, prompt)
        except InputError as error:
            if error.field == "chat_template" and error.value is None:
                remedy = "add --raw to continue the text as it stands"
                raise InputError("model", model.name, "has no chat template", remedy) from None
            raise InputError(self.field, error.value, error.problem, error.remedy) from error


def collect(texts: Sequence[str], paths: Sequence[str], raw: bool) -> list[Source]:
    """Return the prompts of --prompt and then those of the --input files.

    Args:
        texts: of --prompt.
        paths: .txt files with a prompt a line, empty lines left out, or .jsonl files with
            {"prompt": text} or {"messages": turns} a line.
        raw: texts are continued as they stand, so chats make no sense.

    Raises:
        InputError: there is no prompt, or a file or one of its lines is wrong.
    """
    found = [Source(f"prompt[{index}]", text) for index, text in enumerate(texts)]
    for path in paths:
        found += _read(expanded("input", path))
    require(
        len(found) > 0,
        "input" if paths else "prompt",
        ", ".join(paths) or None,
        "gives no prompt",
        "give --prompt=TEXT or --input=FILE with at least one",
    )
    for source in found:
        if isinstance(source.prompt, str):
            require(source.prompt != "", source.field, "", "is empty", "give some text")
        else:
            require(
                not raw,
                source.field,
                source.title,
                "is a chat, which --raw cannot continue as it stands",
                'leave --raw out, or give {"prompt": text}',
            )
    return found


def _read(path: Path) -> list[Source]:
    require(
        path.suffix in (".txt", ".jsonl"),
        "input",
        str(path),
        "is neither a .txt nor a .jsonl file",
        "give a prompt a line in a .txt file, or JSON objects in a .jsonl file",
    )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            "input", str(path), f"is not UTF-8 (byte {error.start})", "save it as UTF-8"
        ) from None
    except OSError as error:
        raise InputError(
            "input", str(path), f"cannot be read ({error.strerror})", "check the path"
        ) from None
    parse = _parse_object if path.suffix == ".jsonl" else _parse_text
    # Not splitlines: a prompt may hold a form feed or a Unicode line separator.
    lines = enumerate(text.split("\n"), start=1)
    return [parse(f"{path.name}:{number}", line) for number, line in lines if line.strip()]


def _parse_text(field: str, line: str) -> Source:
    return Source(field, line.removesuffix("\r"))


def _parse_object(field: str, line: str) -> Source:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(
            field, line, "is not JSON", 'give {"prompt": text} or {"messages": turns}'
        ) from None
    given = [key for key in ("prompt", "messages") if isinstance(value, dict) and key in value]
    require(
        len(given) == 1,
        field,
        line,
        "has not exactly one of prompt and messages",
        'give {"prompt": text} or {"messages": turns}',
    )
    content = value[given[0]]
    if given == ["prompt"]:
        require(isinstance(content, str), field, content, "is no text", "give a string as prompt")
        return Source(field, content)
    require(
        isinstance(content, list) and len(content) > 0 and all(map(is_turn, content)),
        field,
        content,
        "is no chat",
        'give a list of {"role": ..., "content": ...}, both strings',
    )
    return Source(field, tuple(content))


def is_turn(value: Any) -> bool:
    """Tell whether a JSON value is a chat's turn."""
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )
