"""Medusa heads read the right feature, and their drafts are exact, chains and trees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decoding
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.medusa import medusa, medusa_tree
from jspec.errors import InputError
from jspec.generation import Decoder, run_chunk
from jspec.models import medusa as model
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.sampling_params import SamplingParams
from tests import table_models, tiny
from tests.jspec.drafting import draft_caches
from tests.jspec.drafting.draft_caches import NEW, requests

TARGET = tiny.model()
TREE = (-1, 0, 0, 1, 1, 2, 3, 4)
# A deterministic text: every token has one successor, 5 x + 3 mod 17.
PRIME = 17
HEADS = 3
run_rounds = jax.jit(decoding.decode_chunk, static_argnums=0)


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def as_params(
    weights: np.ndarray, biases: np.ndarray, scores: np.ndarray, ids: np.ndarray | None = None
) -> MedusaParams:
    known = None if ids is None else jnp.asarray(ids)
    return MedusaParams(jnp.asarray(weights), jnp.asarray(biases), jnp.asarray(scores), known)


def successor(token: int, times: int = 1) -> int:
    for _ in range(times):
        token = (5 * token + 3) % PRIME
    return token


def knows(head: int, token: int) -> bool:
    """Whether a head that reads this token's feature puts the right token first."""
    return (token + head) % 3 != 0


def table_heads(shift: int = 0) -> tuple[MedusaConfig, MedusaParams]:
    """Return heads that read one-hot tokens; where they don't know, the right token is second."""
    config = MedusaConfig(HEADS, 1, PRIME, PRIME, 2)
    scores = np.zeros((HEADS, PRIME, PRIME), np.float32)
    for head in range(HEADS):
        for token in range(PRIME):
            right = successor(token, head + 2 + shift)
            scores[head, right, token] = 2.0
            if not knows(head, token):
                scores[head, (right + 1) % PRIME, token] = 3.0
    weights = np.zeros((HEADS, 1, PRIME, PRIME), np.float32)
    biases = np.zeros((HEADS, 1, PRIME), np.float32)
    return config, as_params(weights, biases, scores)


def simulated_rounds(prompt: list[int], new: int, second: bool) -> list[int]:
    """Return the tokens of each round, by counting; `second`: a second candidate is drafted too."""
    text, rounds, end = list(prompt), [], len(prompt) + new
    while len(text) < end:
        accepted = 0
        room = end - len(text) - 1
        while len(text) > 1 and accepted < min(HEADS, room):
            if not (second or knows(accepted, text[-2])):
                break
            accepted += 1
        rounds.append(accepted + 1)
        for _ in range(accepted + 1):
            text.append(successor(text[-1]))
    return rounds


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_heads_read_the_feature_before_the_pending_token(tree: bool, shift: int) -> None:
    config, params = table_heads(shift)
    # Best and second best of every head, on every way down.
    parents = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
    bound = medusa_tree(config, params, parents) if tree else medusa(config, params)
    gamma = bound.drafts or HEADS
    table = np.full((PRIME, PRIME, PRIME), -5.0, np.float32)
    for token in range(PRIME):
        table[:, token, successor(token)] = 5.0
    prompts = np.array([[first, successor(first)] for first in range(PRIME) if first != 12])
    state = table_models.start(
        table_models.TableTarget(PRIME),
        table,
        prompts,
        [SamplingParams(temperature=0.0, max_new_tokens=new) for new in (13,)],
        np.arange(len(prompts)),
        gamma,
        bound.drafter,
        drafter_params=bound.params,
    )
    program = Program(table_models.TableTarget(PRIME), bound.drafter, gamma)
    after, _ = run_rounds(program, table, bound.params, state, np.int32(64), np.bool_(False))
    expected, found = 0, int((np.asarray(after.trace.rounds) >= 0).sum())
    for row, prompt in enumerate(prompts.tolist()):
        text = prompt + [successor(prompt[-1], k + 1) for k in range(13)]
        assert after.tokens[row, :15].tolist() == text
        expected += len(simulated_rounds(prompt, 13, tree))
    assert expected < 0.6 * 13 * len(prompts)
    if shift == 0:
        assert found == expected
    else:  # heads that mean other places are of no use
        assert found > 1.5 * expected


def heads(own: bool = False, blocks: int = 1, vocabulary: int | None = None) -> BoundDrafter:
    """Return a chain drafter whose blocks are 0, so that its heads say what the target's says."""
    config = MedusaConfig(3, blocks, TARGET.config.hidden_size, TARGET.config.vocab_size, 2)
    generator = np.random.default_rng(0)
    shape = (config.heads, blocks, config.hidden_size, config.hidden_size)
    weights = generator.normal(0, 0.1, shape).astype(np.float32)
    biases = generator.normal(0, 0.1, shape[:3]).astype(np.float32)
    head = np.asarray(TARGET.params.embedding if TARGET.params.head is None else TARGET.params.head)
    ids: np.ndarray | None = None
    if vocabulary is not None:
        ids = np.arange(0, config.vocab_size, 2, dtype=np.int32)[:vocabulary]
        head = head[ids]
        config = dataclasses.replace(config, vocab_size=len(ids))
    if own:
        head = generator.normal(0, 1, (config.heads, *head.shape)).astype(np.float32)
    return medusa(config, as_params(weights, biases, head, ids))


def reference(params: MedusaParams, feature: np.ndarray) -> np.ndarray:
    """Return [K, Vd] logits of one feature [D], in float64."""
    weights, biases, rows = (
        np.asarray(leaf, np.float64) for leaf in (params.weights, params.biases, params.heads)
    )
    scores = []
    for head in range(len(biases)):
        x = feature
        for weight, bias in zip(weights[head], biases[head], strict=True):
            y = weight @ x + bias
            x = x + y / (1 + np.exp(-y))
        scores.append((rows[head] if rows.ndim == 3 else rows) @ x)
    return np.stack(scores)


@pytest.mark.parametrize(("own", "blocks"), [(False, 1), (True, 2), (False, 0)])
def test_the_heads_are_residual_blocks(own: bool, blocks: int) -> None:
    params = heads(own, blocks).params
    features = np.random.default_rng(1).normal(0, 1, (32, 3)).astype(np.float32)
    found = model.forward(params, jnp.asarray(features))
    expected = np.stack([reference(params, column) for column in features.T], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@functools.cache
def plain() -> list[tuple[int, ...]]:
    return [done.token_ids for done in Decoder(TARGET).generate(requests())]


def test_the_state_is_the_target_s_feature_after_every_round() -> None:
    bound = heads()
    bound = medusa_tree(bound.drafter.config, bound.params, TREE)  # type: ignore[attr-defined]
    asked = requests()
    decoder = Decoder(TARGET, bound, batch_size=len(asked))
    state = draft_caches.prefilled(decoder, asked)
    oracle = tiny.to_numpy(TARGET.config, TARGET.params)
    checked = 0
    for _ in range(4):
        for row in range(len(asked)):
            length = int(state.length[row])
            assert int(state.drafter.length[row]) == length - 1
            if length > 1:
                tokens = [int(t) for t in state.tokens[row, : length - 1]]
                residual = oracle.run(tokens)[1][-1][-1]
                scale = np.sqrt(np.mean(residual**2) + TARGET.config.norm_eps)
                normed = residual / scale * np.asarray(TARGET.params.final_norm)
                np.testing.assert_allclose(state.drafter.feature[row], normed, atol=1e-3)
                checked += 1
        state, _ = run_chunk(
            program=decoder._program,
            params=TARGET.params,
            drafter_params=bound.params,
            state=state,
            max_rounds=np.int32(1),
            until_finish=np.bool_(False),
        )
    assert checked > 15


@pytest.mark.parametrize("kind", ["tree", "vocabulary"])
def test_greedy_is_plain_decoding(kind: str) -> None:
    bound = heads(vocabulary=20 if kind == "vocabulary" else None)
    if kind == "tree":
        bound = medusa_tree(bound.drafter.config, bound.params, TREE)  # type: ignore[attr-defined]
    found = Decoder(TARGET, bound, batch_size=3).generate(requests())
    assert [done.token_ids for done in found] == plain()
    assert all(done.counts.emitted == NEW for done in found)
    assert sum(int(done.counts.proposed.sum()) for done in found) > NEW


def test_a_chain_is_no_longer_than_there_are_heads() -> None:
    bound = heads()
    assert Decoder(TARGET, bound).speculation.gamma == 3
    with pytest.raises(InputError, match="gamma=4 is above the 3 drafts"):
        Decoder(TARGET, bound, SpeculationConfig(4))
    config = bound.drafter.config  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="is 4 drafts deep, but there are 3 heads"):
        medusa_tree(config, bound.params, (-1, 0, 1, 2, 3))
    with pytest.raises(InputError, match="has no drafts"):
        medusa_tree(config, bound.params, (-1,))
