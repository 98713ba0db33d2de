"""Hybrids: plain decoding's tokens, and a head that knows the text whoever drafted it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decoding, randomness
from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.eagle import eagle
from jspec.drafting.hybrid import hybrid
from jspec.drafting.hybrid_state import HybridStateDrafter
from jspec.drafting.hybrid_tree import _merged, hybrid_tree
from jspec.drafting.medusa import medusa, medusa_tree
from jspec.drafting.protocol import Context, Dense, PointMass, Proposal
from jspec.errors import InputError
from jspec.generation import Decoder, run_chunk
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from jspec.trees import from_parents
from tests import tiny, tiny_eagle
from tests.jspec.drafting import draft_caches
from tests.tiny_eagle import TARGET, VOCAB

GAMMA = 4
NEW = 80  # no row ends: of a finished one the head's state means nothing
TREE = (-1, 0, 0, 1, 1, 2, 3)
NAMES = ("draft-model", "sure-draft-model", "eagle3", "medusa-tree", "draft-tree")


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def medusa_heads() -> tuple[MedusaConfig, MedusaParams]:
    width = TARGET.config.hidden_size
    generator = np.random.default_rng(2)
    weights, biases, scores = (
        jnp.asarray(generator.normal(0, 0.2, shape), jnp.float32)
        for shape in ((GAMMA, 1, width, width), (GAMMA, 1, width), (GAMMA, VOCAB, width))
    )
    return MedusaConfig(GAMMA, 1, width, VOCAB, 2), MedusaParams(weights, biases, scores, None)


@functools.cache
def head(name: str) -> BoundDrafter:
    nearby = tiny.nearby(TARGET.params, 0.3)
    if name == "eagle3":
        return eagle(TARGET.config, tiny_eagle.config("eagle3"), tiny_eagle.params("eagle3"))
    if name == "medusa-tree":
        return medusa_tree(*medusa_heads(), TREE)
    if name == "draft-tree":
        return draft_tree(TARGET.config, nearby, TREE, "top-k")
    confidence = 0.3 if name == "sure-draft-model" else 0.0
    return draft_model(TARGET.config, nearby, min_confidence=confidence)


def requests(rows: int) -> list[Request]:
    """Return greedy requests but for the second, which is drawn."""
    return [
        Request(prompt, SamplingParams(temperature=0.9 * (row == 1), seed=3, max_new_tokens=NEW))
        for row, prompt in enumerate(tiny_eagle.prompts()[:rows])
    ]


@functools.cache
def plain() -> list[tuple[int, ...]]:
    return [done.token_ids for done in Decoder(TARGET, batch_size=3).generate(requests(3))]


def context(state: DecodeState) -> Context:
    return Context(
        tokens=state.tokens,
        length=state.length,
        room=jnp.full_like(state.length, GAMMA),
        # Drawn, so that the laws are filled in.
        sampling=dataclasses.replace(
            state.sampling, temperature=jnp.ones_like(state.sampling.temperature)
        ),
        keys=randomness.round_keys(state.seeds, state.length),
        vocab_size=VOCAB,
    )


def prefilled(bound: BoundDrafter, asked: list[Request], gamma: int) -> tuple[Decoder, Any]:
    decoder = Decoder(TARGET, bound, SpeculationConfig(gamma), batch_size=len(asked))
    return decoder, draft_caches.prefilled(decoder, asked)


def drafts_of_head(bound: BoundDrafter, given: Context, state: Any, gamma: int) -> Proposal:
    return bound.drafter.propose(bound.params, state, given, gamma)[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_head_knows_what_it_did_not_draft(name: str) -> None:
    own = head(name)
    bound = hybrid_tree(own, 3) if own.drafts else hybrid(own)
    gamma = own.drafts or GAMMA
    drafter = bound.drafter
    assert isinstance(drafter, HybridStateDrafter)
    decoder, state = prefilled(bound, requests(3), gamma)

    @jax.jit
    def from_hybrid(state: DecodeState) -> Proposal:
        given = context(state)
        wanted = jnp.bool_(True)
        inner = drafter.catch_up(bound.params, state.drafter, given, gamma + 1, wanted)
        return drafts_of_head(own, given, inner, gamma)

    @jax.jit
    def anew(state: DecodeState) -> Proposal:
        """Let the head take in the whole text at once."""
        synced = jnp.zeros_like(state.length)
        inner = own.drafter.init(len(synced), state.tokens.shape[1], jnp.float32)
        cache = dataclasses.replace(state.cache, length=synced)
        fresh = dataclasses.replace(
            state, cache=cache, drafter=inner, active=jnp.ones_like(state.active)
        )
        fresh = decoding.prefill(
            TARGET.functions, own.drafter, 32, TARGET.params, own.params, fresh
        )
        return drafts_of_head(own, context(fresh), fresh.drafter, gamma)

    kinds = set()
    for index in range(14):
        if index == 6:  # the greedy rows alone repeat themselves, and need no head
            state = dataclasses.replace(state, active=jnp.asarray([True, False, True]))
        lengths = np.asarray(state.length)
        state, _ = run_chunk(
            program=decoder._program,
            params=TARGET.params,
            drafter_params=bound.params,
            state=state,
            max_rounds=np.int32(1),
            until_finish=np.bool_(False),
        )
        more = np.asarray(state.length) - lengths
        foreign = np.any(np.asarray(state.drafter.nodes)[:, 1:gamma] < 0, axis=1).tolist()
        ran = bool(state.drafter.ran[0])
        kinds |= {(ran, f, c > 1) for f, c in zip(foreign, more.tolist(), strict=True)}
        if index % 4 == 1:
            found, expected = from_hybrid(state), anew(state)
            rows = np.flatnonzero(state.active)
            np.testing.assert_array_equal(found.valid[rows], expected.valid[rows])
            valid = np.asarray(found.valid[rows])
            np.testing.assert_array_equal(found.tokens[rows][valid], expected.tokens[rows][valid])
            if isinstance(found.law, Dense):
                assert isinstance(expected.law, Dense)
                np.testing.assert_allclose(
                    found.law.log_q[rows][valid],
                    expected.law.log_q[rows][valid],
                    rtol=1e-3,
                    atol=1e-3,
                )
    assert state.active[0] & state.active[2]
    # Drafts of both were accepted, and a chain's head was left out of some rounds.
    assert {(True, False, True), (True, True, True)} <= kinds
    if own.drafts is None:
        assert any(not ran for ran, _, _ in kinds)
    # Greedy rows have plain decoding's tokens.
    for row, request in enumerate(requests(3)):
        if request.sampling.temperature == 0:
            prompt, end = len(request.token_ids), int(state.length[row])
            text = tuple(int(t) for t in state.tokens[row, prompt:end])
            assert text == plain()[row][: len(text)]
            assert len(text) > 18


def test_a_tree_holds_what_both_propose_once() -> None:
    def proposal(parents: tuple[int, ...], tokens: list[int], valid: list[bool]) -> Proposal:
        return Proposal(
            jnp.asarray([tokens], jnp.int32),
            from_parents(parents),
            jnp.asarray([valid]),
            PointMass(),
        )

    # The head: 1 -> (3 -> 5), 2 -> 4. Found: 2 -> 4 -> 6, 1 -> 7, and one that is no node.
    own = proposal((-1, 0, 0, 1, 2, 3), [1, 2, 3, 4, 5], [True] * 5)
    found = proposal((-1, 0, 1, 2, 0, 4, 4), [2, 4, 6, 1, 7, 8], [True] * 5 + [False])
    tokens, values, parents = _merged(own, found)
    order = np.argsort(-np.asarray(values[0]), kind="stable")
    order = order[np.isfinite(np.asarray(values[0])[order])]

    def way(node: int) -> tuple[int, ...]:
        above = int(parents[0, node])
        return (*(way(above) if above >= 0 else ()), int(tokens[0, node]))

    ways = [way(node) for node in order]
    assert ways == [(2,), (2, 4), (2, 4, 6), (1,), (1, 7), (1, 3), (1, 3, 5)]
    # What both have is the head's node.
    assert {ways[place] for place, node in enumerate(order) if node < 5} == {
        (1,),
        (2,),
        (1, 3),
        (2, 4),
        (1, 3, 5),
    }


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="drafts trees"):
        hybrid(head("draft-tree"))
    with pytest.raises(InputError, match="drafts chains, or draws"):
        hybrid_tree(head("draft-model"))
    drawn = draft_tree(TARGET.config, TARGET.params, TREE)
    with pytest.raises(InputError, match="drafts chains, or draws"):
        hybrid_tree(drawn)
    with pytest.raises(InputError, match=r"lookups=7 is outside 1\.\.6"):
        hybrid_tree(head("draft-tree"), 7)
    assert hybrid(medusa(*medusa_heads())).most_drafts == GAMMA
    assert hybrid(head("eagle3")).most_drafts == 31
    assert hybrid(head("draft-model")).most_drafts is None
