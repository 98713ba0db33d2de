"""Malformed settings: of sampling, of speculation, of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.config import RopeConfig, SpeculationConfig
from jspec.sampling_params import SamplingParams, from_mapping
from tests import tiny
from tests.malformed.cases import Case, World, given, raised

_HUGE = 10**400
_LONG = 10**5000  # too long for Python to print

# Field, value, remedy, and where another value is at fault, that one.
_SAMPLING: list[tuple[Any, ...]] = [
    ("temperature", "1", "0 for greedy"),
    ("temperature", None, "0 for greedy"),
    ("temperature", True, "0 for greedy"),
    ("temperature", 1j, "0 for greedy"),
    ("temperature", [0.5], "0 for greedy"),
    ("temperature", _HUGE, "0 for greedy"),
    ("temperature", -math.inf, "0 for greedy"),
    ("temperature", np.float32("nan"), "0 for greedy"),
    ("temperature", np.array([0.5, 0.5]), "0 for greedy"),
    ("top_k", "5", "give an integer"),
    ("top_k", 5.0, "give an integer"),
    ("top_k", None, "give an integer"),
    ("top_k", -1, "give 0"),
    ("top_p", "0.9", "give a number"),
    ("top_p", False, "give a number"),
    ("top_p", 1 + 1e-9, "give 1"),
    ("min_p", math.inf, "give a number"),
    ("min_p", np.float64(-1e-9), "give 0"),
    ("repetition_penalty", -1, "give 1"),
    ("repetition_penalty", _HUGE, "give a number"),
    ("frequency_penalty", {}, "give a number"),
    ("presence_penalty", 2.0001, "give 0"),
    ("logit_bias", "5:1", "token id"),
    ("logit_bias", None, "token id"),
    ("logit_bias", [(1, 2, 3)], "token id", (1, 2, 3)),
    ("logit_bias", {1.0: 1}, "give an integer", 1.0),
    ("logit_bias", {(): 1}, "give an integer", ()),
    ("logit_bias", {5: math.nan}, "give a number", math.nan),
    ("logit_bias", np.array(3), "token id"),
    ("logit_bias", [(1, 1), (1, 2)], "an id once", 1),
    ("bad_words", "word", "give a list"),
    ("bad_words", None, "give a list"),
    ("bad_words", [b"x"], "give texts", b"x"),
    ("bad_words", [("a",)], "give an integer", "a"),
    ("bad_words", [[-1]], "ids of the vocabulary", -1),
    ("bad_words", [[1] * 33], "its last part", (1,) * 33),
    ("min_new_tokens", 1.0, "give an integer"),
    ("min_new_tokens", 129, "raise max_new_tokens"),
    ("stop", b"x", "give a list"),
    ("stop", None, "give a list"),
    ("stop", [None], "at least one character", None),
    ("stop", ["a", "\udc80"], "lone surrogates", "\udc80"),
    ("stop_token_ids", 3, "give a list"),
    ("stop_token_ids", np.array(3), "give a list"),
    ("stop_token_ids", np.array([1.0]), "give an integer", np.float64(1.0)),
    ("stop_token_ids", [[1]], "give an integer", [1]),
    ("stop_token_ids", iter([1]), "give a list", ...),
    ("ignore_eos", None, "give true or false"),
    ("ignore_eos", "false", "give true or false"),
    ("max_new_tokens", None, "give an integer"),
    ("max_new_tokens", "8", "give an integer"),
    ("max_new_tokens", math.inf, "give an integer"),
    ("max_new_tokens", -_HUGE, "at least one token"),
    ("logprobs", "all", "give an integer"),
    ("logprobs", 129, "ask for fewer"),
    ("prompt_logprobs", 1.0, "give an integer"),
    ("n", None, "give an integer"),
    ("n", 2, "temperature above 0"),
    ("n", _HUGE, "over several requests"),
    ("seed", "0", "give an integer"),
    ("seed", 1.0, "give an integer"),
    ("seed", _HUGE, "[0, 2**64)"),
    ("seed", _LONG, "[0, 2**64)", ...),
]
# What JSON asks for; field; value; remedy.
_MAPPINGS: list[tuple[Any, str, Any, str]] = [
    (None, "sampling", None, "give one, as {"),
    ([("top_k", 1)], "sampling", [("top_k", 1)], "give one, as {"),
    ("top_k=1", "sampling", "top_k=1", "give one, as {"),
    ({3: 1}, "parameter", 3, "names as strings"),
    ({None: 1}, "parameter", None, "names as strings"),
    ({"num_beams": 4}, "num_beams", 4, "leave it out"),
    ({"use_beam_search": True}, "use_beam_search", True, "leave it out"),
    ({"beam_width": 2}, "beam_width", 2, "leave it out"),
    ({"best_of": 2}, "best_of", 2, "leave it out"),
    ({"guided_regex": "a"}, "guided_regex", "a", "leave it out"),
    ({"structured_outputs": {}}, "structured_outputs", {}, "leave it out"),
    ({"max_tokens": 8}, "max_tokens", 8, "did you mean max_new_tokens?"),
    ({"stop_strings": "x"}, "stop_strings", "x", "did you mean stop?"),
    ({"eos_token_id": 2}, "eos_token_id", 2, "did you mean stop_token_ids?"),
    ({"top-p": 1}, "top-p", 1, "did you mean top_p?"),
    ({"TEMPERATURE": 1}, "TEMPERATURE", 1, "use one of temperature"),
    ({"top_k": 2.5}, "top_k", 2.5, "give an integer"),
    ({"seed": math.inf}, "seed", math.inf, "give an integer"),
    ({"max_new_tokens": math.nan}, "max_new_tokens", math.nan, "give an integer"),
    ({"temperature": "hot"}, "temperature", "hot", "0 for greedy"),
]
_SPECULATION: list[tuple[Any, ...]] = [
    ("gamma", True, "give an integer"),
    ("gamma", 2.0, "give an integer"),
    ("gamma", "7", "give an integer"),
    ("gamma", None, "give an integer"),
    ("gamma", -1, "give 0"),
    ("gamma", _HUGE, "up to 127"),
    ("verification", "Token", "use token or block"),
    ("verification", None, "use token or block"),
    ("verification", ["token"], "use token or block"),
    ("verification", np.array(["token", "block"]), "use token or block"),
    ("rounds_per_chunk", 0, "at least one round"),
    ("rounds_per_chunk", 1.5, "give an integer"),
    ("rounds_per_chunk", None, "give an integer"),
]
_MODEL: list[tuple[Any, ...]] = [
    ("vocab_size", 0, "checkpoint's config"),
    ("vocab_size", "61", "give an integer"),
    ("hidden_size", 32.0, "give an integer"),
    ("num_layers", -2, "checkpoint's config"),
    ("num_layers", True, "give an integer"),
    ("num_kv_heads", 3, "checkpoint's config"),
    ("head_dim", 7, "checkpoint's config"),
    ("max_context", 2**31, "checkpoint's config"),
    ("max_context", _HUGE, "checkpoint's config"),
    ("norm_eps", math.nan, "checkpoint's config"),
    ("norm_eps", "1e-5", "checkpoint's config"),
    ("norm_eps", -1e-5, "checkpoint's config"),
    ("activation", "relu", "silu or gelu_tanh"),
    ("embedding_scale", math.inf, "give None"),
    ("attention_scale", "1", "give None"),
    ("logit_softcap", 0, "give None"),
    ("windows", (4,), "for each layer"),
    ("windows", (4, 0), "checkpoint's config", 0),
    ("windows", (4, "4"), "give an integer", "4"),
]
_ROPE: list[tuple[Any, ...]] = [
    ("theta", "10000", "checkpoint's rope"),
    ("theta", math.inf, "checkpoint's rope"),
    ("theta", 1.0, "give a base > 1"),
    ("factor", 0.5, "give a factor"),
    ("factor", 1e300, "give a factor"),
    ("scaling", "dynamic", "none, linear, llama3 or yarn"),
    ("scaling", None, "none, linear, llama3 or yarn"),
    ("low_freq_factor", 0.0, "checkpoint's rope"),
    ("original_context", 0, "checkpoint's config"),
    ("original_context", 8192.0, "give an integer"),
    ("beta_fast", 0.5, "checkpoint's rope"),
    ("attention_factor", -1, "checkpoint's rope"),
    ("attention_factor", math.nan, "checkpoint's rope"),
]


def _table(
    kind: str, make: Callable[..., object], rows: list[tuple[Any, ...]], prefix: str = ""
) -> list[Case]:
    """Return the cases of `make(field=value)`."""

    def case(field: str, value: Any, remedy: str, *fault: Any) -> Case:
        at_fault = fault[0] if fault else value
        shown = f"{prefix}{field}=" if at_fault is ... else given(f"{prefix}{field}", at_fault)
        name = f"{kind} {field} {type(value).__name__} {given('', at_fault)[1:40]}"
        return Case(name, raised(lambda _: make(**{field: value})), shown, remedy)

    return [case(*row) for row in rows]


def _mapping(values: Any) -> Callable[[World], object]:
    return lambda _: from_mapping(values)


def cases() -> list[Case]:
    """Return the table."""
    mappings = [
        Case(f"from_mapping {values}", raised(_mapping(values)), given(field, value), remedy)
        for values, field, value, remedy in _MAPPINGS
    ]
    return [
        *_table("sampling", SamplingParams, _SAMPLING),
        *mappings,
        *_table("speculation", SpeculationConfig, _SPECULATION),
        *_table("model", lambda **field: dataclasses.replace(tiny.CONFIG, **field), _MODEL),
        *_table("rope", RopeConfig, _ROPE, "rope."),
    ]
