"""Typical acceptance against its definition in NumPy, and that it is lossy, as it says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import randomness, trees
from jspec.config import SpeculationConfig, TypicalAcceptance
from jspec.drafting.draft_model import draft_model
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.protocol import PointMass, Proposal
from jspec.edits import Edits
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.sampling import RowSampling
from jspec.tree_verification import verify_tree
from jspec.verification import verify_chain
from tests import tiny
from tests.jspec.drafting.draft_caches import requests

VOCAB = 5
CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 0, 1, 1, 2, 3, 5)
RULE = TypicalAcceptance(epsilon=0.25, delta=0.6)


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def law(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Return p in float64; a point mass at temperature 0."""
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(logits, axis=-1)]
    scores = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def typical(p: np.ndarray, token: int) -> bool:
    """The rule as it is written in the paper: p(x) > min(epsilon, delta exp(-H(p)))."""
    entropy = -sum(value * np.log(value) for value in p if value > 0)
    return bool(p[token] > min(RULE.epsilon, RULE.delta * np.exp(-entropy)))


def close_call(p: np.ndarray, token: int) -> bool:
    entropy = -sum(value * np.log(value) for value in p if value > 0)
    return bool(abs(p[token] - min(RULE.epsilon, RULE.delta * np.exp(-entropy))) < 1e-5)


def best_path(
    parents: tuple[int, ...], p: np.ndarray, tokens: np.ndarray, valid: np.ndarray
) -> list[int]:
    """Walk down every way; return the longest accepted one, of several the most probable."""
    accepted = {0: ([0], 0.0)}
    for node in range(1, len(parents)):
        parent = parents[node]
        if parent in accepted and valid[node - 1] and typical(p[parent], tokens[node - 1]):
            way, chance = accepted[parent]
            accepted[node] = (
                [*way, node],
                chance + float(np.log(p[parent][tokens[node - 1]])),
            )
    return max(accepted.values(), key=lambda found: (len(found[0]), found[1]))[0]


def rows(temperatures: np.ndarray) -> RowSampling:
    count = len(temperatures)
    return RowSampling(
        temperature=jnp.asarray(temperatures, jnp.float32),
        top_k=jnp.zeros(count, jnp.int32),
        top_p=jnp.ones(count, jnp.float32),
        min_p=jnp.zeros(count, jnp.float32),
        edits=Edits(),
    )


chain = jax.jit(verify_chain, static_argnames=("rule", "typical"))
tree = jax.jit(verify_tree, static_argnames=("rule", "of_typical"))


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.5, 1.5, 4.0]))
def test_the_accepted_path(parents: tuple[int, ...], seed: int, spread: float) -> None:
    generator = np.random.default_rng(seed)
    count, size = 64, len(parents)
    logits = generator.normal(0, spread, (count, size, VOCAB)).astype(np.float32)
    tokens = generator.integers(0, VOCAB, (count, size - 1)).astype(np.int32)
    valid = generator.random((count, size - 1)) < 0.9
    for node in range(1, size):
        if parents[node] > 0:
            valid[:, node - 1] &= valid[:, parents[node] - 1]
        if parents[node] == parents[node - 1]:  # siblings differ
            tokens[:, node - 1] = (tokens[:, node - 2] + 1 + tokens[:, node - 1] % 4) % VOCAB
    temperatures = generator.choice([0.0, 0.7, 1.0], count)
    proposal = Proposal(
        jnp.asarray(tokens), trees.from_parents(parents), jnp.asarray(valid), PointMass()
    )
    keys = randomness.round_keys(
        jnp.asarray(generator.integers(0, 2**32, (count, 2), np.uint32)),
        jnp.zeros(count, jnp.int32),
    )
    given = (jnp.asarray(logits), proposal, rows(temperatures), keys)
    found = (
        chain(*given, rule="typical", typical=RULE)
        if parents == CHAIN
        else tree(*given, rule="typical", of_typical=RULE)
    )
    found = jax.device_get(found)
    compared = 0
    for row in range(count):
        p = law(logits[row], temperatures[row])
        edges = [(parents[node], tokens[row, node - 1]) for node in range(1, size)]
        if any(close_call(p[parent], token) for parent, token in edges):
            continue
        way = best_path(parents, p, tokens[row], valid[row])
        assert int(found.accepted[row]) == len(way) - 1
        assert found.path[row, : len(way)].tolist() == way
        if temperatures[row] == 0:
            assert int(found.final[row]) == int(np.argmax(logits[row, way[-1]]))
        compared += 1
    assert compared > count / 2


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_next_token_is_drawn_from_p_and_the_law_is_not_the_target_s(
    parents: tuple[int, ...],
) -> None:
    count = 4000
    logits = np.tile(
        np.log([0.4, 0.3, 0.15, 0.1, 0.05]).astype(np.float32), (count, len(parents), 1)
    )
    p = law(logits[0, 0], 1.0)
    keys = randomness.round_keys(
        jnp.asarray(np.stack([np.zeros(count), np.arange(count)], axis=1).astype(np.uint32)),
        jnp.zeros(count, jnp.int32),
    )

    def decided(token: int, rule: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token that rounds commit, and the last one, all drafts being `token`."""
        proposal = Proposal(
            jnp.full((count, len(parents) - 1), token, jnp.int32),
            trees.from_parents(parents),
            jnp.ones((count, len(parents) - 1), bool),
            PointMass(),
        )
        given = (jnp.asarray(logits), proposal, rows(np.ones(count)), keys)
        run = chain if parents == CHAIN else tree
        verdict = run(*given, rule=rule)
        first = np.where(np.asarray(verdict.accepted) > 0, token, np.asarray(verdict.final))
        return first, np.asarray(verdict.final)

    for token, accepted in [(0, True), (2, True), (4, False)]:
        first, last = decided(token, "typical")
        observed = np.bincount(last, minlength=VOCAB) / count
        np.testing.assert_allclose(observed, p, atol=0.03)  # whatever was accepted
        lossless = np.bincount(decided(token, "token")[0], minlength=VOCAB) / count
        np.testing.assert_allclose(lossless, p, atol=0.03)
        share = np.bincount(first, minlength=VOCAB)[token] / count
        if accepted:
            assert share == 1.0  # and p of it is at most 0.4
        else:
            assert abs(share - p[token]) < 0.03


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_results_say_that_they_are_lossy(shape: str) -> None:
    target = tiny.model()
    nearby = tiny.nearby(target.params, 0.3)
    if shape == "chain":
        bound = draft_model(target.config, nearby)
    else:
        bound = draft_tree(target.config, nearby, (-1, 0, 0, 1), "top-k")
    settings = SpeculationConfig(bound.drafts or 3, "typical")
    assert not settings.lossless
    assert dataclasses.replace(settings, gamma=0).lossless
    exact = dataclasses.replace(settings, verification="token")
    asked = [*requests(1.0, new=12)[:3], *requests(0.0, new=12)[3:]]
    loose = Decoder(target, bound, settings, batch_size=5).generate(asked)
    strict = Decoder(target, bound, exact, batch_size=5).generate(asked)
    assert not any(done.lossless for done in loose)
    assert all(done.lossless for done in strict)
    # Greedy rows are plain decoding's all the same.
    assert [d.token_ids for d in loose[3:]] == [d.token_ids for d in strict[3:]]
    rounds = [sum(d.counts.rounds for d in found[:3]) for found in (loose, strict)]
    assert rounds[0] < rounds[1]


def test_parameters_out_of_range_are_refused() -> None:
    for given, field in itertools.chain(
        [({"epsilon": value}, "typical.epsilon") for value in (0.0, 1.0, float("nan"))],
        [({"delta": value}, "typical.delta") for value in (0.0, -1.0)],
    ):
        with pytest.raises(InputError, match=field):
            TypicalAcceptance(**given)
    with pytest.raises(InputError, match="is no TypicalAcceptance"):
        SpeculationConfig(3, "typical", typical=0.3)  # type: ignore[arg-type]
