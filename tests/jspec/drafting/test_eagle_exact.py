"""At temperature 1 the output of EAGLE drafters has the target's law: chi-square."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.eagle import eagle
from jspec.drafting.eagle_tree import eagle_tree
from jspec.generation import run_chunk
from jspec.sampling_params import SamplingParams
from tests import chi_square, table_models, tiny, tiny_eagle
from tests.tiny_eagle import CONFIG, TARGET, VOCAB, Variant

PROMPT = (3, 1, 4)
ROWS, TOKENS = 2000, 3


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def law() -> np.ndarray:
    """Return the law [V] * 3 of the first tokens, by the float64 reference."""
    target = tiny.to_numpy(CONFIG, TARGET.params)
    joint = np.ones((VOCAB,) * TOKENS)
    for done in range(TOKENS):
        for first in itertools.product(range(VOCAB), repeat=done):
            logits = target.run([*PROMPT, *first])[0][-1]
            p = np.exp(logits) / np.exp(logits).sum()
            joint[first] *= p.reshape((VOCAB,) + (1,) * (TOKENS - done - 1))
    return joint


def drafter(name: str) -> BoundDrafter:
    kind: Variant = "eagle" if name == "tree" else "eagle3"
    given = (TARGET.config, tiny_eagle.config(kind), tiny_eagle.params(kind))
    if name == "tree":
        return eagle_tree(*given, (-1, 0, 0, 1, 1, 2), "independent")
    # Sure of about every second draft.
    chain = eagle(*given, min_confidence=0.45 if name == "sure chain" else 0.0)
    # Features of as many tokens as it commits, in place of any chain's.
    return dataclasses.replace(chain, drafter=dataclasses.replace(chain.drafter, most=4))  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["chain", "sure chain", "tree"])
def test_the_first_tokens_over_many_rounds(name: str) -> None:
    bound = drafter(name)
    gamma = bound.drafts or 3
    model: Any = TARGET.functions
    params: Any = TARGET.params
    asked = [SamplingParams(temperature=1.0, max_new_tokens=TOKENS + 2)]
    prompts = np.tile(np.array(PROMPT), (ROWS, 1))
    state = table_models.start(
        model,
        params,
        prompts,
        asked,
        np.arange(ROWS) + 1000,
        gamma,
        bound.drafter,
        (),
        bound.params,
    )
    after, rounds = run_chunk(
        program=Program(TARGET.functions, bound.drafter, gamma),
        params=TARGET.params,
        drafter_params=bound.params,
        state=state,
        max_rounds=np.int32(64),
        until_finish=np.bool_(False),
    )
    first = np.asarray(after.tokens)[:, len(PROMPT) : len(PROMPT) + TOKENS]
    observed = np.zeros((VOCAB,) * TOKENS)
    np.add.at(observed, tuple(first.T), 1)
    assert chi_square.p_value(observed, law()) > chi_square.LEAST_P
    # Not by never accepting: rounds are fewer than tokens.
    assert (np.asarray(after.trace.rounds) >= 0).sum() < 0.85 * ROWS * (TOKENS + 2)
    assert int(rounds) > 1
