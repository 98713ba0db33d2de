"""The real small model against references computed outside jspec, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jspec
from jspec.drafting.draft_model import first_layers
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.ngram import ngram
from jspec.drafting.ngram_tree import ngram_tree
from jspec.sampling_params import SamplingParams
from tests.oracles.smollm2 import WIDTHS, differences, golden_cases, greedy, model, score

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared_cases(shared_dir: Path) -> list[dict[str, Any]]:
    path = shared_dir / "oracle/smollm2_greedy.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    # Batches of similar lengths pad less.
    return sorted(cases, key=lambda case: len(case["prompt_ids"]))


@pytest.mark.parametrize(("gamma", "count"), [(0, 12), (4, 8)])
def test_greedy_tokens_of_transformers(
    shared_cases: list[dict[str, Any]], gamma: int, count: int
) -> None:
    cases = shared_cases[:count]  # the longest prompts take most of the time
    assert len(cases) == count
    found = greedy(cases, gamma, SamplingParams(max_new_tokens=64), ngram() if gamma else None)
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
    found = greedy(cases, gamma, params, ngram() if gamma else None)
    assert differences(cases, found) == 0


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
