"""The short way in: prompts as people write them, results as they read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.errors import InputError, is_list, require
from jspec.generation import Decoder, default_speculation
from jspec.model import Model, require_model
from jspec.requests import Completion, Delta, Request
from jspec.sampling_params import SamplingParams

# Text to be continued as it stands, a chat (turns with "role" and "content"), or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | np.ndarray[Any, Any] | jax.Array

_KINDS = 'give text, a list of {"role": ..., "content": ...}, or a list of token ids'


def _is_integer(item: object) -> TypeGuard[int]:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def to_token_ids(model: Model, prompt: Prompt) -> tuple[int, ...]:
    """Return a prompt's token ids.

    Args:
        model: whose tokenizer and chat template apply.
        prompt: text, which is continued as it stands (with the model's beginning-of-sequence token
            where it has one); a chat, to which the chat template is applied; or token ids, as a
            sequence or an array [tokens] of integers.

    Raises:
        InputError: `model` is none or has no tokenizer, or the prompt is of another kind.
    """
    require_model("model", model)
    if not isinstance(prompt, str):
        if isinstance(prompt, np.ndarray | jax.Array):
            prompt = _ids(prompt)
        # A set has no order, and bytes are integers too, but no token ids.
        if isinstance(prompt, Set) or not is_list(prompt):
            raise InputError("prompt", prompt, "is neither text, a chat nor token ids", _KINDS)
        ids = tuple(int(item) for item in prompt if _is_integer(item))
        if len(ids) == len(prompt):
            return ids
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(
            "prompt", prompt, "is not token ids, and the model has no tokenizer", "give token ids"
        )
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special_tokens=True))
    turns: list[Mapping[str, str]] = []
    for item in prompt:
        if not isinstance(item, Mapping):
            raise InputError(
                "prompt",
                item,
                "is neither a chat turn nor a token id",
                _KINDS,
            )
        turns.append(item)
    return tuple(tokenizer.encode(tokenizer.apply_chat_template(turns)))


def _ids(prompt: np.ndarray[Any, Any] | jax.Array) -> list[int]:
    require(
        prompt.ndim == 1 and jnp.issubdtype(prompt.dtype, jnp.integer),
        "prompt",
        prompt,
        f"is an array of shape {prompt.shape} and dtype {prompt.dtype}",
        "give token ids as an array of integers with one dimension",
    )
    ids: list[int] = np.asarray(prompt).tolist()
    return ids


def _requests(
    target: Model,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
) -> list[Request]:
    if isinstance(prompts, str):
        raise InputError("prompts", prompts, "is one string", "give a list of prompts")
    require(
        is_list(prompts) and not isinstance(prompts, Set),
        "prompts",
        prompts,
        "is no list",
        "give a list of prompts",
    )
    if sampling is None:
        sampling = SamplingParams()
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    require(
        is_list(each) and all(isinstance(params, SamplingParams) for params in each),
        "sampling",
        sampling,
        "is neither SamplingParams nor a list of them",
        "give jspec.SamplingParams(temperature=...)",
    )
    if len(each) != len(prompts):
        raise InputError(
            "sampling",
            f"<{len(each)} parameter sets>",
            f"does not match {len(prompts)} prompts",
            "give one for all, or one for each prompt",
        )
    return [
        Request(to_token_ids(target, prompt), params)
        for prompt, params in zip(prompts, each, strict=True)
    ]


def generate(
    target: Model,
    prompts: Sequence[Prompt],
    *,
    drafter: BoundDrafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    speculation: SpeculationConfig | None = None,
    batch_size: int = 8,
) -> list[Completion]:
    """Decode prompts and return their completions in order: one each, or `n` where asked for.

    Args:
        target: the model whose law the output has, whatever the drafter.
        prompts: texts, continued as they stand; chats; or token ids. See `to_token_ids`.
        drafter: from `ngram`, `load_drafter`, `draft_model`, `early_exit`, their trees
            (`ngram_tree`, ..) or your own; None decodes plainly.
        sampling: for all prompts, or one for each; None is greedy with the defaults.
        speculation: how much to speculate; None takes the defaults with a drafter, gamma = 0
            without.
        batch_size: most rows decoded together.

    Raises:
        InputError: a prompt or a setting is not valid; nothing has been run.
    """
    decoder = Decoder(target, drafter, speculation, batch_size=batch_size)
    return decoder.generate(_requests(target, prompts, sampling))


def stream(
    target: Model,
    prompts: Sequence[Prompt],
    *,
    drafter: BoundDrafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    speculation: SpeculationConfig | None = None,
    batch_size: int = 8,
) -> Iterator[Delta]:
    """Decode prompts and yield new text as it comes; arguments and errors as for `generate`.

    Without `speculation` the host looks in after every second round instead of every 64th.
    """
    if speculation is None:
        speculation = dataclasses.replace(default_speculation(drafter), rounds_per_chunk=2)
    decoder = Decoder(target, drafter, speculation, batch_size=batch_size)
    return decoder.stream(_requests(target, prompts, sampling))
