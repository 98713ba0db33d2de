"""Malformed arguments of the library's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jspec
from tests.malformed.cases import Case, World, begins, raised

lib: Any = jspec  # for which any argument will do
_ARRAY = np.array([[1, 2], [3, 4]])
_HUGE = 10**400
_PROMPTS = "give a list of prompts"
_KINDS = "or a list of token ids"
_IDS = "integers with one dimension"
_MODEL = "what jspec.load returns"
_SAMPLING = "give jspec.SamplingParams("
_TURN = {"role": "user", "content": "p"}


def _prompts(w: Any, prompts: Any, **more: Any) -> object:
    return lib.generate(w.bare, prompts, **more)


def _prompt(w: Any, prompt: Any) -> object:
    return lib.generate(w.model, [prompt])


def _ids(w: Any, prompt: Any) -> object:
    return lib.generate(w.bare, [prompt])


def _request(w: Any, *request: Any) -> object:
    return lib.Decoder(w.bare).generate([lib.Request(*request)])


# What it is; the call; field; value (... where it is no short one); remedy. `w` is the world.
_CALLS: list[tuple[str, Callable[[Any], object], str, Any, str]] = [
    ("prompts text", lambda w: _prompts(w, "hello"), "prompts", "hello", _PROMPTS),
    ("prompts none", lambda w: _prompts(w, None), "prompts", None, _PROMPTS),
    ("prompts number", lambda w: _prompts(w, 3), "prompts", 3, _PROMPTS),
    ("prompts bytes", lambda w: _prompts(w, b"hello"), "prompts", b"hello", _PROMPTS),
    ("prompts mapping", lambda w: _prompts(w, _TURN), "prompts", _TURN, _PROMPTS),
    ("prompts set", lambda w: _prompts(w, {"a"}), "prompts", {"a"}, _PROMPTS),
    ("prompts generator", lambda w: _prompts(w, (p for p in "ab")), "prompts", ..., _PROMPTS),
    ("prompts scalar", lambda w: _prompts(w, np.array(3)), "prompts", np.array(3), _PROMPTS),
    ("prompts ids alone", lambda w: _prompts(w, [1, 2]), "prompt", 1, _KINDS),
    ("prompt none", lambda w: _prompt(w, None), "prompt", None, _KINDS),
    ("prompt number", lambda w: _prompt(w, 1.5), "prompt", 1.5, _KINDS),
    ("prompt bytes", lambda w: _prompt(w, b"p"), "prompt", b"p", _KINDS),
    ("prompt turn alone", lambda w: _prompt(w, _TURN), "prompt", _TURN, _KINDS),
    ("prompt floats", lambda w: _prompt(w, [1.0, 2.0]), "prompt", 1.0, _KINDS),
    ("prompt booleans", lambda w: _prompt(w, [True]), "prompt", True, _KINDS),
    ("prompt nested", lambda w: _prompt(w, [[1, 2]]), "prompt", [1, 2], _KINDS),
    ("prompt mixed", lambda w: _prompt(w, [_TURN, 3]), "prompt", 3, _KINDS),
    ("prompt of texts", lambda w: _prompt(w, ["a", "b"]), "prompt", "a", _KINDS),
    ("prompt generator", lambda w: _prompt(w, iter([1])), "prompt", ..., _KINDS),
    ("prompt surrogate", lambda w: _prompt(w, "\ud800"), "text", "\ud800", "lone surrogates"),
    ("prompt empty", lambda w: _ids(w, []), "requests[0].token_ids", (), "at least one token"),
    ("prompt empty text", lambda w: _prompt(w, ""), "requests[0].token_ids", (), "at least one"),
    ("prompt empty chat", lambda w: _ids(w, ()), "requests[0].token_ids", (), "at least one"),
    ("turn without role", lambda w: _prompt(w, [{"content": "p"}]), "messages", ..., "give {"),
    ("turn of bytes", lambda w: _prompt(w, [_TURN | {"content": b"p"}]), "messages", ..., "give {"),
    ("text, no tokenizer", lambda w: _ids(w, "p"), "prompt", "p", "give token ids"),
    ("chat, no tokenizer", lambda w: _ids(w, [_TURN]), "prompt", [_TURN], "give token ids"),
    ("ids float array", lambda w: _ids(w, np.array([1.0])), "prompt", np.array([1.0]), _IDS),
    ("ids matrix", lambda w: _ids(w, _ARRAY), "prompt", ..., _IDS),
    ("ids scalar", lambda w: _ids(w, np.array(3)), "prompt", np.array(3), _IDS),
    ("ids booleans", lambda w: _ids(w, np.array([True])), "prompt", np.array([True]), _IDS),
    ("ids jax floats", lambda w: _ids(w, jnp.ones(2)), "prompt", jnp.ones(2), _IDS),
    ("ids jax matrix", lambda w: _ids(w, jnp.ones((1, 2), int)), "prompt", ..., _IDS),
    ("ids negative", lambda w: _ids(w, [1, -1]), "requests[0].token_ids", -1, "target's tokenizer"),
    ("ids beyond", lambda w: _ids(w, [61]), "requests[0].token_ids", 61, "target's tokenizer"),
    ("ids huge", lambda w: _ids(w, [_HUGE]), "requests[0].token_ids", _HUGE, "target's tokenizer"),
    ("ids too many", lambda w: _ids(w, [1] * 64), "requests[0].token_ids", ..., "shorten"),
    ("ids jax beyond", lambda w: _ids(w, jnp.arange(62)), "requests[0].token_ids", 61, "target's"),
    ("sampling mapping", lambda w: _prompts(w, [[1]], sampling={"n": 1}), "sampling", ..., "give"),
    ("sampling number", lambda w: _prompts(w, [[1]], sampling=0.7), "sampling", 0.7, _SAMPLING),
    ("sampling text", lambda w: _prompts(w, [[1]], sampling="x"), "sampling", "x", _SAMPLING),
    ("sampling list", lambda w: _prompts(w, [[1]], sampling=[{}]), "sampling", [{}], _SAMPLING),
    (
        "sampling none each",
        lambda w: _prompts(w, [[1]], sampling=[None]),
        "sampling",
        [None],
        "give",
    ),
    (
        "sampling too few",
        lambda w: _prompts(w, [[1], [2]], sampling=[lib.SamplingParams()]),
        "sampling",
        "<1 parameter sets>",
        "one for each prompt",
    ),
    (
        "speculation number",
        lambda w: _prompts(w, [], speculation=3),
        "speculation",
        3,
        "give jspec",
    ),
    ("speculation {}", lambda w: _prompts(w, [], speculation={}), "speculation", {}, "give jspec"),
    (
        "drafter name",
        lambda w: _prompts(w, [], drafter="ngram"),
        "drafter",
        "ngram",
        "jspec.ngram()",
    ),
    ("drafter model", lambda w: _prompts(w, [], drafter=w.bare), "drafter", ..., "draft_model("),
    ("drafter array", lambda w: _prompts(w, [], drafter=_ARRAY), "drafter", ..., "jspec.ngram()"),
    (
        "drafter class",
        lambda w: _prompts(w, [], drafter=lib.ngram),
        "drafter",
        ...,
        "jspec.ngram()",
    ),
    (
        "gamma alone",
        lambda w: _prompts(w, [], speculation=lib.SpeculationConfig(gamma=3)),
        "gamma",
        3,
        "give a drafter",
    ),
    ("batch_size 2.5", lambda w: _prompts(w, [], batch_size=2.5), "batch_size", 2.5, "an integer"),
    ("batch_size '2'", lambda w: _prompts(w, [], batch_size="2"), "batch_size", "2", "an integer"),
    (
        "batch_size True",
        lambda w: _prompts(w, [], batch_size=True),
        "batch_size",
        True,
        "an integer",
    ),
    ("batch_size 0", lambda w: _prompts(w, [], batch_size=0), "batch_size", 0, "at least one row"),
    ("target none", lambda w: lib.generate(None, [[1]]), "target", None, _MODEL),
    ("target name", lambda w: lib.stream("smollm2", [[1]]), "target", "smollm2", _MODEL),
    ("target config", lambda w: lib.Decoder(w.bare.config), "target", ..., _MODEL),
    ("ids of no model", lambda w: lib.to_token_ids(3, "p"), "model", 3, _MODEL),
    (
        "prefill_width '8'",
        lambda w: lib.Decoder(w.bare, prefill_width="8"),
        "prefill_width",
        "8",
        "an integer",
    ),
    (
        "prefill_width 0",
        lambda w: lib.Decoder(w.bare, prefill_width=0),
        "prefill_width",
        0,
        "at least one token",
    ),
    ("cache int8", lambda w: lib.Decoder(w.bare, cache_dtype="int8"), "cache_dtype", "int8", "use"),
    (
        "cache text",
        lambda w: lib.Decoder(w.bare, cache_dtype="text"),
        "cache_dtype",
        "text",
        "use one",
    ),
    ("cache number", lambda w: lib.Decoder(w.bare, cache_dtype=3), "cache_dtype", 3, "use one"),
    ("requests none", lambda w: lib.Decoder(w.bare).generate(None), "requests", None, "a list"),
    (
        "request alone",
        lambda w: lib.Decoder(w.bare).generate(lib.Request((1,))),
        "requests",
        ...,
        "give a list",
    ),
    (
        "requests generator",
        lambda w: lib.Decoder(w.bare).generate(lib.Request((i,)) for i in (1, 2)),
        "requests",
        ...,
        "give a list",
    ),
    (
        "request of ids",
        lambda w: lib.Decoder(w.bare).generate([(1, 2)]),
        "requests[0]",
        (1, 2),
        "give jspec.Request",
    ),
    ("request text", lambda w: _request(w, "abc"), "requests[0].token_ids", "abc", "tuple of ids"),
    ("request none", lambda w: _request(w, None), "requests[0].token_ids", None, "tuple of ids"),
    ("request floats", lambda w: _request(w, (1.5,)), "requests[0].token_ids", 1.5, "an integer"),
    ("request true", lambda w: _request(w, (True,)), "requests[0].token_ids", True, "an integer"),
    ("request sampling", lambda w: _request(w, (1,), {"n": 1}), "requests[0]", ..., "give jspec"),
    (
        "progress 3",
        lambda w: lib.Decoder(w.bare).generate([lib.Request((1,))], on_progress=3),
        "on_progress",
        3,
        "give one of",
    ),
    (
        "logprobs 62 of 61",
        lambda w: _request(w, (1,), lib.SamplingParams(logprobs=62)),
        "requests[0].logprobs",
        62,
        "ask for fewer",
    ),
    ("ngram 2.5", lambda w: lib.ngram(2.5), "max_n", 2.5, "an integer"),
    ("ngram '3'", lambda w: lib.ngram("3"), "max_n", "3", "an integer"),
    ("ngram none", lambda w: lib.ngram(3, None), "min_n", None, "an integer"),
    ("ngram 0", lambda w: lib.ngram(3, 0), "min_n", 0, "at least one token"),
    ("ngram falling", lambda w: lib.ngram(1, 2), "max_n", 1, "max_n >= min_n"),
    ("ngram huge", lambda w: lib.ngram(10**9), "max_n", 10**9, "shorter suffixes"),
    ("tree of halves", lambda w: lib.draft_tree(w.bare, w.bare, (-1, 0.5)), "parents", ..., "-1"),
    ("tree of False", lambda w: lib.draft_tree(w.bare, w.bare, (-1, False)), "parents", ..., "-1"),
    ("tree of None", lambda w: lib.draft_tree(w.bare, w.bare, None), "parents", None, "-1"),
    (
        "tree of 129",
        lambda w: lib.draft_tree(w.bare, w.bare, range(-1, 128)),
        "parents",
        "<129 nodes>",
        "a smaller tree",
    ),
    (
        "tree by blocks",
        lambda w: lib.Decoder(
            w.bare, lib.ngram_tree(3), lib.SpeculationConfig(verification="block")
        ),
        "verification",
        "block",
        "use token",
    ),
    (
        "kernels twice",
        lambda w: lib.load("x", kernels="cache_write:xla,cache_write:xla"),
        "kernels",
        "cache_write:xla,cache_write:xla",
        "auto",
    ),
    ("kernels of gold", lambda w: lib.load("x", kernels="gold"), "kernels", "gold", "auto"),
    ("kernels elsewhere", lambda w: lib.load("x", kernels="tpu"), "kernels", "tpu", "auto"),
    ("trie of 0", lambda w: lib.ngram_tree(0), "nodes", 0, "smaller tree"),
    ("trie 2.5", lambda w: lib.ngram_tree(matches=2.5), "matches", 2.5, "an integer"),
    ("trie wide", lambda w: lib.ngram_tree(matches=65), "matches", 65, "fewer"),
    ("trie falling", lambda w: lib.ngram_tree(max_n=1, min_n=2), "max_n", 1, "max_n >= min_n"),
    ("grown for none", lambda w: lib.dynamic_draft_tree(None, w.bare), "target", None, _MODEL),
    ("grown name", lambda w: lib.dynamic_draft_tree(w.bare, "x"), "drafter", "x", _MODEL),
    (
        "grown too large",
        lambda w: lib.dynamic_draft_tree(w.bare, w.bare, nodes=15, depth=2, width=3),
        "nodes",
        15,
        "deeper or wider",
    ),
    (
        "grown wide",
        lambda w: lib.dynamic_draft_tree(w.bare, w.bare, width=62),
        "width",
        62,
        "narrower",
    ),
    ("exit 1.0", lambda w: lib.early_exit(w.bare, 1.0), "layers", 1.0, "an integer"),
    ("exit True", lambda w: lib.early_exit(w.bare, True), "layers", True, "an integer"),
    ("exit 0", lambda w: lib.early_exit(w.bare, 0), "layers", 0, "fewer layers"),
    ("exit 2 of 2", lambda w: lib.early_exit(w.bare, 2), "layers", 2, "fewer layers"),
    ("exit of a name", lambda w: lib.early_exit("smollm2", 1), "target", "smollm2", _MODEL),
    ("draft name", lambda w: lib.draft_model(w.bare, "x"), "drafter", "x", _MODEL),
    ("draft none", lambda w: lib.draft_model(w.bare, None), "drafter", None, _MODEL),
    ("draft for none", lambda w: lib.draft_model(None, w.bare), "target", None, _MODEL),
    ("load none", lambda w: lib.load(None), "model", None, "give a path"),
    ("load number", lambda w: lib.load(3), "model", 3, "give a path"),
    ("load bytes", lambda w: lib.load(b"x"), "model", b"x", "give a path"),
    ("load nothing", lambda w: lib.load(""), "model", "", "give a path"),
    ("load NUL", lambda w: lib.load("a\0b"), "model", "a\0b", "give a path"),
    ("load long", lambda w: lib.load("m" * 5000), "model", "m" * 5000, "check it"),
    ("load url", lambda w: lib.load("https://x.org/a/b"), "model", "https://x.org/a/b", "a path"),
    ("load int7", lambda w: lib.load(w.checkpoint, dtype="int7"), "dtype", "int7", "use one of"),
    ("load int8", lambda w: lib.load(w.checkpoint, dtype="int8"), "dtype", "int8", "use one of"),
    ("load float64", lambda w: lib.load(w.checkpoint, float), "dtype", "float64", "use one of"),
    ("load dtype 3", lambda w: lib.load(w.checkpoint, 3), "dtype", 3, "use one of"),
    ("load dtype {}", lambda w: lib.load(w.checkpoint, {"names": 3}), "dtype", ..., "use one of"),
    (
        "load int4",
        lambda w: lib.load(w.checkpoint, weights="int4"),
        "weights",
        "int4",
        "use one of",
    ),
    ("load weights 8", lambda w: lib.load(w.checkpoint, weights=8), "weights", 8, "use one of"),
    ("checkpoint none", lambda w: lib.checkpoints.load(None, "float32"), "path", None, "a Path"),
    ("checkpoint 3", lambda w: lib.checkpoints.load(3, "float32"), "path", 3, "give a str"),
]


def cases() -> list[Case]:
    """Return the table."""
    return [
        Case(f"call {name}", raised(call), begins(field, v), remedy)
        for name, call, field, v, remedy in _CALLS
    ]


def accepted(world: World) -> list[object]:
    """Return the ids of prompts that are not malformed, however they are given."""
    kinds = [[3, 4], (3, 4), np.array([3, 4]), np.array([3, 4], np.uint8), jnp.array([3, 4])]
    return [lib.to_token_ids(world.bare, kind) for kind in kinds]
