"""No draw is used twice, and a row's draws depend on nothing but the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from jspec import decoding, randomness
from jspec.config import Verification
from jspec.decoding import Program
from jspec.randomness import Purpose
from jspec.sampling_params import SamplingParams
from tests import table_models

VOCAB, GAMMA = 6, 3
MODEL = table_models.TableTarget(VOCAB)
DRAFTER = table_models.TableDrafter()
_generator = np.random.default_rng(2)
TARGET = _generator.normal(0, 1, (VOCAB,) * 3).astype(np.float32)
DRAFT = (TARGET.mean(axis=0) * 2).astype(np.float32)
run_chunk = jax.jit(decoding.decode_chunk, static_argnums=0)


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, [0, 0]),
        (1, [0, 1]),
        (2**32, [1, 0]),
        (2**64 - 1, [2**32 - 1, 2**32 - 1]),
        (0x123456789ABCDEF0, [0x12345678, 0x9ABCDEF0]),
    ],
)
def test_a_seed_is_kept_whole(seed: int, words: list[int]) -> None:
    got = randomness.seed_words(seed)
    assert got.dtype == np.uint32
    assert got.tolist() == words


def test_unseeded_requests_never_share_a_stream() -> None:
    assert len({tuple(randomness.seed_words(None).tolist()) for _ in range(200)}) == 200


def _keys(seeds: Sequence[int], start: Sequence[int], nodes: Any, purpose: Purpose) -> np.ndarray:
    words = jnp.asarray(np.stack([randomness.seed_words(seed) for seed in seeds]))
    keys = randomness.round_keys(words, jnp.asarray(start, jnp.int32))
    return np.asarray(jax.random.key_data(randomness.node_keys(keys, jnp.asarray(nodes), purpose)))


def test_keys_are_the_documented_fold() -> None:
    got = _keys(
        [5, 2**40 + 9], [7, 11], np.array([[0, 1, 2], [3, 4, 127]], np.int32), Purpose.FINAL
    )
    for row, (seed, start, nodes) in enumerate([(5, 7, [0, 1, 2]), (2**40 + 9, 11, [3, 4, 127])]):
        for column, node in enumerate(nodes):
            key = jax.random.wrap_key_data(
                jnp.asarray(randomness.seed_words(seed)), impl="threefry2x32"
            )
            for data in (start, node, 2):
                key = jax.random.fold_in(key, data)
            np.testing.assert_array_equal(got[row, column], jax.random.key_data(key))


def test_every_seed_start_node_and_purpose_has_a_key_of_its_own() -> None:
    seeds, starts, nodes = [0, 1, 2**32, 2**32 + 1], range(1, 60), range(20)
    seen: set[tuple[int, ...]] = set()
    for purpose in Purpose:
        for seed in seeds:
            count = len(starts)
            keys = _keys([seed] * count, starts, np.tile(nodes, (count, 1)), purpose)
            seen.update(map(tuple, keys.reshape(-1, 2).tolist()))
    assert len(seen) == len(Purpose) * len(seeds) * len(starts) * len(nodes)


def test_streams_of_rows_nodes_starts_and_purposes_are_independent() -> None:
    # 4000 numbers a stream, each from keys that differ in exactly one of the four.
    count = 4000
    starts = np.arange(count)

    def stream(
        seed: int = 3, shift: int = 0, node: int = 1, purpose: Purpose = Purpose.ACCEPT
    ) -> Any:
        words = jnp.asarray(np.tile(randomness.seed_words(seed), (count, 1)))
        keys = randomness.round_keys(words, jnp.asarray(starts + shift, jnp.int32))
        nodes = jnp.full((count, 1), node, jnp.int32)
        return np.asarray(randomness.uniforms(randomness.node_keys(keys, nodes, purpose)))[:, 0]

    base = stream()
    assert base.min() >= 0
    assert base.max() < 1
    assert stats.kstest(base, "uniform").pvalue > 1e-3
    others = [
        stream(seed=4),
        stream(shift=count),
        stream(node=2),
        stream(purpose=Purpose.DRAFT),
        stream(purpose=Purpose.FINAL),
    ]
    for other in others:
        assert stats.pearsonr(base, other).pvalue > 1e-3
        table, _, _ = np.histogram2d(base, other, bins=8, range=[[0, 1], [0, 1]])
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_gumbels_are_standard() -> None:
    keys = jax.random.split(jax.random.key(1), 20)
    noise = np.asarray(randomness.gumbels(keys, 500))
    assert noise.shape == (20, 500)
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3
    # A row's noise does not depend on how many rows there are.
    np.testing.assert_array_equal(noise[3:4], randomness.gumbels(keys[3:4], 500))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_no_key_is_used_twice_in_a_decode(rule: Verification) -> None:
    params = [SamplingParams(temperature=1.0, max_new_tokens=n) for n in (9, 12)]
    seeds = np.array([1, 2])
    state = table_models.start(MODEL, TARGET, np.ones((2, 2), int), params, seeds, GAMMA, DRAFTER)
    program = Program(MODEL, DRAFTER, GAMMA, rule)
    real, active = randomness.node_keys, np.ones(2, bool)
    seen: list[tuple[int, ...]] = []
    by_purpose = dict.fromkeys(Purpose, 0)

    def recording(keys: jax.Array, nodes: jax.Array, purpose: Purpose) -> jax.Array:
        made = real(keys, nodes, purpose)
        for row in np.flatnonzero(active):
            seen.extend(map(tuple, np.asarray(jax.random.key_data(made))[row].tolist()))
            by_purpose[purpose] += nodes.shape[1]
        return made

    rounds = 0
    # Without jit every branch that is taken runs in Python, with real numbers.
    with mock.patch.object(randomness, "node_keys", recording), jax.disable_jit():
        while active.any():
            state = decoding.decode_round(program, TARGET, DRAFT, state)
            active = np.asarray(state.active)
            rounds += 1
    assert rounds > 3
    assert min(by_purpose.values()) > 3
    assert len(seen) == len(set(seen))


def _decode(
    params: Sequence[SamplingParams],
    prompts: np.ndarray,
    rule: Verification,
    rounds_per_chunk: int = 64,
) -> list[list[int]]:
    seeds = np.array([p.seed for p in params])
    state = table_models.start(MODEL, TARGET, prompts, params, seeds, GAMMA, DRAFTER)
    program = Program(MODEL, DRAFTER, GAMMA, rule)
    while np.asarray(state.active).any():
        state, _ = run_chunk(
            program, TARGET, DRAFT, state, np.int32(rounds_per_chunk), np.bool_(False)
        )
    tokens, ends = np.asarray(state.tokens), np.asarray(state.end)
    return [tokens[row, 2 : ends[row]].tolist() for row in range(len(params))]


@pytest.mark.parametrize("rule", ["token", "block"])
@hypothesis.settings(max_examples=15)
@hypothesis.given(
    order=st.permutations(range(4)),
    others=st.lists(st.sampled_from([0.0, 0.6, 1.3]), min_size=4, max_size=4),
    budgets=st.lists(st.integers(1, 10), min_size=4, max_size=4),
    rounds=st.sampled_from([1, 2, 64]),
)
def test_a_rows_tokens_do_not_depend_on_neighbours_slot_or_chunks(
    rule: Verification,
    order: list[int],
    others: list[float],
    budgets: list[int],
    rounds: int,
) -> None:
    first = SamplingParams(0.9, 5, 0.97, 0.01, seed=77, max_new_tokens=12)
    rows = [first] + [
        SamplingParams(temperature=t, seed=100 + i, max_new_tokens=n)
        for i, (t, n) in enumerate(zip(others[1:], budgets[1:], strict=True))
    ]
    prompts = np.array([[1, 2], [0, 3], [4, 4], [5, 0]])
    alone = _decode([first] * 4, np.tile(prompts[0], (4, 1)), rule)
    assert alone[0] == alone[1] == alone[3]  # nor on the slot: the same request four times
    straight = _decode(rows, prompts, rule)
    assert straight[0] == alone[0]
    shuffled = _decode([rows[i] for i in order], prompts[order], rule, rounds)
    assert shuffled == [straight[i] for i in order]


def test_another_seed_gives_other_tokens() -> None:
    base = SamplingParams(temperature=1.0, seed=0, max_new_tokens=12)
    rows = [dataclasses.replace(base, seed=seed) for seed in range(4)]
    drawn = _decode(rows, np.ones((4, 2), int), "token")
    assert len(set(map(tuple, drawn))) == 4
