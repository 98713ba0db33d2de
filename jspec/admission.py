"""From requests to the state of a batch: checks, and arrays in buckets of static shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import edits, logprobs, randomness, sampling, trace
from jspec.drafting.protocol import Drafter
from jspec.edits import RowEdits
from jspec.errors import InputError, is_list, require, require_integer
from jspec.requests import Request
from jspec.sampling_params import SamplingParams, require_short_word
from jspec.state import DecodeState

if TYPE_CHECKING:
    from jspec.model import Model
    from jspec.tokenizers import Tokenizer

_FILLER = Request((0,), SamplingParams(max_new_tokens=1, seed=0))


def check(target: Model, request: Request, field: str) -> None:
    """Raise `InputError` unless the target can decode the request; `field` names it."""
    require(
        isinstance(request, Request) and isinstance(request.sampling, SamplingParams),
        field,
        request,
        "is no request",
        "give jspec.Request(token_ids, jspec.SamplingParams(...))",
    )
    config, ids, params = target.config, request.token_ids, request.sampling
    require(
        is_list(ids), f"{field}.token_ids", ids, "is no list of token ids", "give a tuple of ids"
    )
    require(len(ids) >= 1, f"{field}.token_ids", ids, "is empty", "give at least one token")
    require(
        len(ids) < config.max_context,
        f"{field}.token_ids",
        f"<{len(ids)} tokens>",
        f"has {len(ids)} tokens, but the model's context holds {config.max_context} "
        "with at least one to generate",
        "shorten the prompt",
    )
    words = [word for word in params.bad_words if not isinstance(word, str)]
    named = {
        "token_ids": ids,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token for token, _ in params.bias_pairs],
        "bad_words": [token for word in words for token in word],
    }
    count = config.vocab_size if config.token_count is None else config.token_count
    for name, values in named.items():
        for token in values:
            require_integer(f"{field}.{name}", token)
            if not 0 <= token < count:
                raise InputError(
                    f"{field}.{name}",
                    token,
                    f"is outside the vocabulary of {count} tokens",
                    "use ids of the target's tokenizer",
                )
    for name, top in {
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }.items():
        require(
            top is None or top <= count,
            f"{field}.{name}",
            top,
            f"is above the vocabulary's {count} tokens",
            "ask for fewer of the most probable tokens",
        )
    texts = {"stop": params.stop, "bad_words": [w for w in params.bad_words if isinstance(w, str)]}
    for name, given in texts.items():
        require(
            target.tokenizer is not None or not given,
            f"{field}.{name}",
            given,
            "is text, and the model has no tokenizer",
            "give token ids (stop_token_ids, or bad_words as lists of ids)",
        )
    bad_word_ids(params, target.tokenizer)


def bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Return the bad words as token ids; a text as the start of a word and inside one.

    Raises:
        InputError: a text has too many tokens.
    """
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            words.append(tuple(word))
            continue
        assert tokenizer is not None  # `check` has seen to it
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text))
            require_short_word(word, ids)
            if ids:
                words.append(ids)
    return list(dict.fromkeys(words))


def stop_ids(target: Model, params: SamplingParams) -> tuple[int, ...]:
    """Return all ids that end a request."""
    own = () if params.ignore_eos else target.eos_token_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))


def end(target: Model, request: Request) -> int:
    """Return the length at which a request's budget or the context is used up."""
    longest = len(request.token_ids) + request.sampling.max_new_tokens
    return min(longest, target.config.max_context)


def capacity(target: Model, requests: Sequence[Request], scratch: int = 0) -> int:
    """Return the slots a row of a batch: its longest row, rounded up to a multiple of 128.

    Args:
        target: the model.
        requests: of the batch.
        scratch: slots past it that a round may write: a tree's nodes, whatever their depth.
    """
    longest = max(end(target, request) for request in requests)
    return kv.whole_blocks(longest + scratch)


def new_state(
    target: Model,
    drafter: Drafter | None,
    requests: Sequence[Request],
    rows: int,
    cache_dtype: DTypeLike,
    scratch: int = 0,
) -> DecodeState:
    """Return the state of a batch before its prefill.

    Args:
        target: the model.
        drafter: whose state is put in.
        requests: one a row.
        rows: B; the rest is padded with inactive rows.
        cache_dtype: of keys and values.
        scratch: as for `capacity`.
    """
    padded = [*requests, *[_FILLER] * (rows - len(requests))]
    slots = capacity(target, padded, scratch)
    tokens = np.zeros((rows, slots), np.int32)
    stops = [stop_ids(target, r.sampling) for r in padded]
    stop_table = np.full((rows, max(4, power_of_two(max(map(len, stops))))), -1, np.int32)
    for row, request in enumerate(padded):
        tokens[row, : len(request.token_ids)] = request.token_ids
        stop_table[row, : len(stops[row])] = stops[row]
    asked = [
        RowEdits(r.sampling, r.token_ids, bad_word_ids(r.sampling, target.tokenizer), ids)
        for r, ids in zip(padded, stops, strict=True)
    ]
    params = [r.sampling for r in padded]
    functions = target.functions
    return DecodeState(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(np.array([len(r.token_ids) for r in padded], np.int32)),
        end=jnp.asarray(np.array([end(target, r) for r in padded], np.int32)),
        active=jnp.asarray(np.arange(rows) < len(requests)),
        finish=jnp.zeros(rows, jnp.int32),
        sampling=sampling.rows(params, edits.rows(asked, functions.vocab_size)),
        seeds=jnp.asarray(np.stack([randomness.seed_words(p.seed) for p in params])),
        stop_ids=jnp.asarray(stop_table),
        cache=functions.init_cache(rows, slots, cache_dtype),
        drafter=drafter.init(rows, slots, cache_dtype) if drafter else (),
        trace=trace.init(rows, slots),
        logprobs=_new_logprobs(params, slots, target.config.vocab_size),
    )


def _new_logprobs(
    params: Sequence[SamplingParams], slots: int, vocab_size: int
) -> logprobs.LogProbs | None:
    given = [n for p in params for n in (p.logprobs, p.prompt_logprobs) if n is not None]
    if not given:
        return None
    of_prompt = any(p.prompt_logprobs is not None for p in params)
    top = min(power_of_two(max(given)), vocab_size) if max(given) else 0
    return logprobs.init(len(params), slots, top, of_prompt)


def fan_out(
    drafter: Drafter | None,
    state: DecodeState,
    source: jax.Array,
    seeds: jax.Array,
    active: jax.Array,
) -> DecodeState:
    """Return a batch whose rows are copies of a prefilled one's: several samples of a prompt.

    Args:
        drafter: static.
        state: of U rows, prefilled.
        source: [R] int32, row of `state` that each new row starts from.
        seeds: [R, 2] uint32.
        active: [R] bool.
    """
    inner, cache = state.drafter, state.cache
    bare = dataclasses.replace(state, drafter=(), cache=())  # type: ignore[arg-type]
    rows = jax.tree.map(lambda leaf: jnp.take(leaf, source, axis=0), bare)
    return dataclasses.replace(
        rows,
        cache=kv.permute_rows(cache, source),
        drafter=drafter.permute_rows(inner, source) if drafter is not None else (),
        seeds=seeds,
        active=active,
    )


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()
