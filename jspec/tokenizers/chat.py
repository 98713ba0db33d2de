"""Chat templates, rendered as Hugging Face renders them.

The template comes with the checkpoint, so it runs in a sandbox that cannot change its arguments.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jspec.errors import InputError, require

Message = Mapping[str, str]


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """Return the conversation as one prompt.

    Args:
        template: the Jinja source, or None when the checkpoint has none.
        messages: the turns; each has the strings "role" and "content".
        add_generation_prompt: end with the opening of the assistant's turn.
        special_tokens: variables such as bos_token and eos_token.

    Raises:
        InputError: there is no template, it is broken, or it refuses the messages.
    """
    if template is None:
        raise InputError(
            "chat_template", None, "is not part of this checkpoint", "give a plain prompt instead"
        )
    require(len(messages) > 0, "messages", messages, "is empty", "give at least one message")
    for message in messages:
        require(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str),
            "messages",
            message,
            "is not a message",
            'give {"role": ..., "content": ...}, both strings',
        )
    compiled = _compiled(template)
    try:
        return compiled.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **special_tokens,
        )
    # A template is a program: an undefined function is a TypeError, and so on.
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(
            "messages",
            messages,
            f"is refused by the chat template ({error})",
            "give the roles, and their order, that the model was trained with",
        ) from None


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """Compile, once for all the prompts of a job."""
    try:
        return _environment().from_string(template)
    # A text nested too deeply for the parser is no template either.
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise InputError(
            "chat_template", template, f"is not valid Jinja ({error})", "fix the checkpoint's file"
        ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
