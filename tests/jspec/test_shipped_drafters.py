"""The drafters that come with jspec, on the model that they were trained for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

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
    "medusa tree": lambda: jspec.load_drafter(model(), "medusa", tree=BRANCHES),
    "draft": lambda: jspec.load_drafter(model(), "draft"),
}
# Texts of up to three tokens, told apart by whether each is among the most probable ones there.
TOP, TOKENS, SAMPLES = 3, 3, 192
SPREAD = 0  # of the cases' prompts, one after which much is probable, and drafters often agree


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
def law() -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], int]]:
    """Return each text's probability by its tokens' ranks, and tokens by rank, plainly.

    A text ends at the first token that is none of the TOP, whose rank is TOP.
    """
    prompt = golden_cases()[SPREAD]["prompt_ids"]
    texts: dict[tuple[int, ...], float] = {}
    names: dict[tuple[int, ...], int] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for ranks, mass in growing.items():
            ids = [names[ranks[: i + 1]] for i in range(len(ranks))]
            logits = score([*prompt, *ids], [])[0].astype(np.float64)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            best = np.argsort(-p)[:TOP]
            texts[*ranks, TOP] = mass * (1 - p[best].sum())
            for rank, token in enumerate(best):
                names[*ranks, rank] = int(token)
                longer[*ranks, rank] = mass * p[token]
        growing = longer
    return texts | growing, names


@pytest.mark.parametrize("name", ["sure eagle", "eagle tree", "medusa tree", "draft"])
def test_sampled_tokens_have_the_targets_law(name: str) -> None:
    texts, names = law()
    drafter, gamma = bound(name)
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=TOKENS, ignore_eos=True, seed=7, n=SAMPLES
    )
    decoder = Decoder(model(), drafter, SpeculationConfig(gamma), batch_size=64)
    found = decoder.generate([Request(tuple(golden_cases()[SPREAD]["prompt_ids"]), sampling)])
    observed = dict.fromkeys(texts, 0)
    for done in found:
        ranks: tuple[int, ...] = ()
        for token in done.token_ids:
            ranks += (next((r for r in range(TOP) if names[*ranks, r] == token), TOP),)
            if ranks[-1] == TOP:
                break
        observed[ranks] += 1
    counts, expected = (np.array([each[text] for text in texts]) for each in (observed, texts))
    assert counts.sum() == SAMPLES
    assert chi_square.p_value(counts, expected) > chi_square.LEAST_P
    # Drafts are accepted, or it would be plain decoding's law that was tested.
    assert sum(done.counts.rounds for done in found) < 0.95 * SAMPLES * TOKENS
