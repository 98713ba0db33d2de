"""The real small model against references computed outside jspec, in float32."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import trees
from jspec.config import SpeculationConfig
from jspec.drafting.draft_model import first_layers
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.ngram import ngram
from jspec.drafting.ngram_tree import ngram_tree
from jspec.generation import Decoder
from jspec.models.transformer import Transformer
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests.oracles import smollm2

GOLDEN = Path(__file__).resolve().parents[1] / "data/smollm2_golden.json"
TIE = 0.002  # a gap that float32 sums in another order may close
WIDTHS = (256, 768)  # in which whole sequences are run at once

pytestmark = pytest.mark.slow


@functools.cache
def model() -> jspec.Model:
    return jspec.load(smollm2.path_or_skip())


@pytest.fixture(scope="module")
def shared_cases(shared_dir: Path) -> list[dict[str, Any]]:
    path = shared_dir / "oracle/smollm2_greedy.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    # Batches of similar lengths pad less.
    return sorted(cases, key=lambda case: len(case["prompt_ids"]))


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return cases


def greedy(
    cases: list[dict[str, Any]],
    gamma: int,
    params: SamplingParams,
    drafter: jspec.BoundDrafter | None = None,
) -> list[jspec.Completion]:
    drafter = drafter or (ngram() if gamma else None)
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


@pytest.mark.parametrize(("gamma", "count"), [(0, 12), (4, 8)])
def test_greedy_tokens_of_transformers(
    shared_cases: list[dict[str, Any]], gamma: int, count: int
) -> None:
    cases = shared_cases[:count]  # the longest prompts take most of the time
    assert len(cases) == count
    found = greedy(cases, gamma, SamplingParams(max_new_tokens=64))
    for case, completion in zip(cases, found, strict=True):
        ended = case["greedy_ids"][-1] == 2
        assert completion.finish_reason == ("stop" if ended else "length")
    ties = differences(cases, found)
    print(f"{ties} of {count} rows differ from a tie on")
    assert ties <= 2


def test_logits_and_likelihoods_of_transformers(shared_cases: list[dict[str, Any]]) -> None:
    short = [c for c in shared_cases if len(c["prompt_ids"]) + len(c["greedy_ids"]) <= WIDTHS[0]]
    assert len(short) >= 12
    for case in [*short[::2], shared_cases[-1]]:
        first, total = score(case["prompt_ids"], case["greedy_ids"])
        ids, values = zip(*case["first_top10"], strict=True)
        np.testing.assert_allclose(first[list(ids)], values, atol=2e-3)
        assert set(map(int, np.argsort(-first)[: len(ids)])) == set(ids)
        assert total == pytest.approx(case["sum_logprob"], abs=2e-2)


@pytest.mark.parametrize("gamma", [0, 4])
def test_greedy_tokens_of_the_numpy_reference(gamma: int) -> None:
    cases = golden_cases()
    # It knows no end of sequence.
    params = SamplingParams(max_new_tokens=len(cases[0]["greedy_ids"]), ignore_eos=True)
    assert differences(cases, greedy(cases, gamma, params)) == 0


def early_exit_tree() -> jspec.BoundDrafter:
    config, params = first_layers(model().config, model().params, 4)
    return draft_tree(config, params, (-1, 0, 0, 1, 1, 2, 3), "top-k")


@pytest.mark.parametrize("build", [ngram_tree, early_exit_tree])
def test_greedy_tokens_by_trees(build: Callable[[], jspec.BoundDrafter]) -> None:
    cases, drafter = golden_cases(), build()
    params = SamplingParams(max_new_tokens=len(cases[0]["greedy_ids"]), ignore_eos=True)
    assert drafter.drafts is not None
    found = greedy(cases, drafter.drafts, params, drafter)
    assert differences(cases, found) == 0
    assert sum(int(done.counts.accepted.sum()) for done in found) > 0


def test_first_logits_of_the_numpy_reference() -> None:
    for case in golden_cases():
        first, _ = score(case["prompt_ids"], [])
        for token, value in case["first_top5"]:
            assert first[token] == pytest.approx(value, abs=1e-3)


def test_prompts_of_the_numpy_reference_are_the_tokenizers() -> None:
    tokenizer = model().tokenizer
    assert tokenizer is not None
    for case in golden_cases():
        assert list(tokenizer.encode(case["text"])) == case["prompt_ids"]
