"""The drafters that come with jspec, on the model that they were trained for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jspec
from jspec import trained, tree_shapes
from jspec.config import SpeculationConfig
from jspec.generation import Decoder
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import chi_square
from tests.oracles.smollm2 import differences, golden_cases, greedy, model, score

pytestmark = pytest.mark.slow

FOLDER = Path(trained.__file__).parent / "drafters"
BRANCHES = tree_shapes.k_ary((3, 2, 1))
GAMMA = 3
WAYS: dict[str, Callable[[], jspec.BoundDrafter]] = {
    "eagle": lambda: jspec.load_drafter(model(), "eagle"),
    "sure eagle": lambda: jspec.load_drafter(
        model(), "eagle", lookup=True, weights="int8", min_confidence=0.3
    ),
    "eagle tree": lambda: jspec.load_drafter(model(), "eagle", tree=BRANCHES),
    "eagle grown tree": lambda: jspec.load_drafter(model(), "eagle", tree="dynamic", nodes=12),
    "eagle and lookup": lambda: jspec.load_drafter(model(), "eagle", lookup=True),
    "medusa tree": lambda: jspec.load_drafter(model(), "medusa", tree=BRANCHES),
    "draft": lambda: jspec.load_drafter(model(), "draft"),
}
# Of the most probable tokens, three in a row: what is sampled is one of 27 texts.
TOP, TOKENS, SAMPLES = 3, 3, 192
# Of the cases' prompts the one after which the target is least sure.
UNSURE = 3


def bound(name: str) -> tuple[jspec.BoundDrafter, int]:
    drafter = WAYS[name]()
    return drafter, GAMMA if drafter.drafts is None else drafter.drafts


def test_they_are_small_and_say_what_they_are() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(trained.SHIPPED)
    stored = [path.stat().st_size for path in FOLDER.glob("*/*.safetensors")]
    assert len(stored) == len(trained.SHIPPED)
    assert sum(stored) <= 30e6
    for name in trained.SHIPPED:
        card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
        for said in ("train_drafter", "tokens", "cores", "acceptance", "SmolLM2"):
            assert said.lower() in card.lower(), (name, said)


@pytest.mark.parametrize("name", WAYS)
def test_greedy_tokens_of_the_numpy_reference(name: str) -> None:
    cases = golden_cases()
    params = SamplingParams(max_new_tokens=len(cases[0]["greedy_ids"]), ignore_eos=True)
    drafter, gamma = bound(name)
    found = greedy(cases, gamma, params, drafter)
    assert differences(cases, found) == 0
    rounds = sum(done.counts.rounds for done in found)
    assert sum(done.counts.emitted for done in found) > 1.1 * rounds


@functools.cache
def law() -> Any:
    """Return the law [TOP, TOP, TOP] of the ranks of three tokens, by plain forward passes."""
    prompt, joint = golden_cases()[UNSURE]["prompt_ids"], np.ones((TOP,) * TOKENS)
    names: dict[tuple[int, ...], int] = {}
    for done in range(TOKENS):
        for ranks in itertools.product(range(TOP), repeat=done):
            ids = [names[ranks[: i + 1]] for i in range(done)]
            logits = score([*prompt, *ids], [])[0].astype(np.float64)
            best = np.argsort(-logits)[:TOP]
            p = np.exp(logits[best] - logits[best[0]])
            joint[ranks] *= (p / p.sum()).reshape((TOP,) + (1,) * (TOKENS - done - 1))
            names.update({(*ranks, rank): int(token) for rank, token in enumerate(best)})
    return joint, names


@pytest.mark.parametrize("name", ["eagle", "eagle tree"])
def test_sampled_tokens_have_the_targets_law(name: str) -> None:
    joint, names = law()
    drafter, gamma = bound(name)
    sampling = SamplingParams(
        temperature=1.0, top_k=TOP, max_new_tokens=TOKENS, ignore_eos=True, seed=7, n=SAMPLES
    )
    decoder = Decoder(model(), drafter, SpeculationConfig(gamma), batch_size=64)
    prompt = tuple(golden_cases()[UNSURE]["prompt_ids"])
    found = decoder.generate([Request(prompt, sampling)])
    observed = np.zeros_like(joint)
    for done in found:
        path: tuple[int, ...] = ()
        for token in done.token_ids:
            path = next((*path, r) for r in range(TOP) if names[*path, r] == token)
        observed[path] += 1
    assert observed.sum() == SAMPLES
    assert chi_square.p_value(observed, joint) > chi_square.LEAST_P
    assert sum(done.counts.rounds for done in found) < 0.9 * SAMPLES * TOKENS
