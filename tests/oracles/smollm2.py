"""The real small model, where it is installed or fetched, and what references say of it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import hub, trees
from jspec.config import SpeculationConfig
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.models.transformer import Transformer
from jspec.requests import Request
from jspec.sampling_params import SamplingParams

GOLDEN = Path(__file__).resolve().parents[1] / "data/smollm2_golden.json"
TIE = 0.002  # a gap that float32 sums in another order may close
WIDTHS = (256, 768)  # in which whole sequences are run at once


def path_or_skip() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, or skip the test."""
    try:
        return hub.locate("smollm2")
    except InputError as error:
        pytest.skip(str(error))


@functools.cache
def model() -> jspec.Model:
    """Return the model in float32, or skip the test."""
    return jspec.load(path_or_skip())


def golden_cases() -> list[dict[str, Any]]:
    """Return prompts with greedy tokens of a NumPy reference."""
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return cases


def greedy(
    cases: list[dict[str, Any]],
    gamma: int,
    params: SamplingParams,
    drafter: jspec.BoundDrafter | None = None,
) -> list[jspec.Completion]:
    """Return what jspec makes of some cases' prompts."""
    decoder = Decoder(model(), drafter, SpeculationConfig(gamma), batch_size=8)
    return decoder.generate([Request(tuple(case["prompt_ids"]), params) for case in cases])


def differences(cases: list[dict[str, Any]], found: list[jspec.Completion]) -> int:
    """Return how many rows leave the reference at a tie; one elsewhere is an error."""
    ties = 0
    for case, completion in zip(cases, found, strict=True):
        expected = case["greedy_ids"]
        tokens = list(completion.token_ids)
        pairs = zip(tokens, expected, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if at is None:
            assert len(tokens) == len(expected)
            continue
        gap = case["gap"][at]
        assert gap < TIE, f"token {at} is {tokens[at]}, not {expected[at]}, with a gap of {gap}"
        ties += 1
    return ties


@functools.partial(jax.jit, static_argnames=("functions",))
def run(
    functions: Transformer, params: Any, tokens: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the logits at `first` and the log probability of each token given those before it."""
    width = tokens.shape[0]
    cache = functions.init_cache(1, width, jnp.float32)
    hidden, _, _ = functions.forward(params, tokens[None], cache, trees.chain(width - 1))
    logits = functions.logits(params, hidden)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return logits[first], jnp.take_along_axis(log_p[:-1], tokens[1:, None], axis=1)[:, 0]


def score(prompt: list[int], output: list[int]) -> tuple[np.ndarray, float]:
    """Return the logits [V] after the prompt and the log probability of the output."""
    size = len(prompt) + len(output)
    row = np.zeros(next(width for width in WIDTHS if width >= size), np.int32)
    row[:size] = [*prompt, *output]
    last = len(prompt) - 1
    first, log_p = run(model().functions, model().params, jnp.asarray(row), jnp.int32(last))
    return np.asarray(first), float(log_p[last : size - 1].sum())
