"""Chains that end where the drafter is not sure enough, before the draft is drawn."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sampling
from jspec.drafting import BoundDrafter, chain_draws
from jspec.drafting.chain_draws import Drafted
from jspec.drafting.draft_model import draft_model
from jspec.drafting.eagle import eagle
from jspec.drafting.protocol import Context, Dense
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from tests import tiny, tiny_eagle
from tests.jspec.drafting import eagle_rounds
from tests.jspec.drafting.eagle_rounds import GAMMA, Oracle
from tests.tiny_eagle import TARGET

# So that tiny random drafters are sure of some drafts and not of others.
SURE = 0.3


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def drafter(kind: str, min_confidence: float = SURE) -> BoundDrafter:
    if kind == "eagle3":
        given = TARGET.config, tiny_eagle.config("eagle3"), tiny_eagle.params("eagle3")
        return eagle(*given, min_confidence=min_confidence)
    nearby = tiny.nearby(TARGET.params, 0.3)
    return draft_model(TARGET.config, nearby, min_confidence=min_confidence)


def context(params: SamplingParams, room: list[int]) -> Context:
    batch = len(room)
    return Context(
        tokens=jnp.zeros((batch, 8), jnp.int32),
        length=jnp.full(batch, 3, jnp.int32),
        room=jnp.asarray(room, jnp.int32),
        sampling=sampling.rows([params] * batch),
        keys=jax.random.split(jax.random.key(0), batch),
        vocab_size=4,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_drafters_own_probability_decides_whatever_the_temperature(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=5)
    given = context(params, [3, 3, 3, 0])
    laws = np.array([[0.7, 0.1, 0.1, 0.1], [0.39, 0.38, 0.2, 0.03], [0.41, 0.39, 0.1, 0.1]])
    logits = jnp.log(jnp.asarray([*laws, laws[0]], jnp.float32)) + 5  # of no norm
    first = chain_draws.choose(given, jnp.int32(0), logits, chain_draws.nothing(given, 3), 0.4)
    assert first.going.tolist() == [True, False, True, False]
    assert first.valid[:, 0].tolist() == first.going.tolist()
    assert not first.valid[:, 1:].any()
    # An ended chain does not begin again.
    second = chain_draws.choose(given, jnp.int32(1), logits[::-1], first, 0.4)
    assert second.going.tolist() == [True, False, False, False]
    assert second.valid[:, 1].tolist() == [True, False, False, False]
    everywhere = chain_draws.choose(given, jnp.int32(0), logits, chain_draws.nothing(given, 3))
    assert everywhere.valid[:, 0].tolist() == [True, True, True, False]


def test_steps_are_run_while_some_row_goes_on() -> None:
    given = context(SamplingParams(), [2, 5, 1])
    logits = jnp.zeros((3, 4), jnp.float32).at[:, 1].set(9)
    unsure = jnp.zeros((3, 4), jnp.float32)

    def steps(last_sure: int) -> tuple[int, Drafted]:
        def step(index: jax.Array, carry: tuple[Drafted, int]) -> tuple[Drafted, int]:
            drafted, count = carry
            now = jnp.where(index <= last_sure, logits, unsure)
            return chain_draws.choose(given, index, now, drafted, 0.5), count + 1

        start = chain_draws.nothing(given, 8), jnp.int32(0)
        drafted, count = jax.jit(lambda carry: chain_draws.go_on(0, 8, step, carry))(start)
        return int(count), drafted

    count, drafted = steps(7)
    assert count == 5
    assert drafted.valid.sum(axis=1).tolist() == [2, 5, 1]
    # The step that finds nobody sure is the last.
    count, drafted = steps(2)
    assert count == 4
    assert drafted.valid.sum(axis=1).tolist() == [2, 3, 1]
    assert steps(-1)[0] == 1


def of_reference(kind: str, state: DecodeState, row: int, drafted: list[int]) -> np.ndarray:
    """Return the drafter's log law [V] after some drafts, in float64, from the row's text alone."""
    if kind == "eagle3":
        return Oracle("eagle3", state, row).log_q(drafted)
    model = tiny.to_numpy(TARGET.config, drafter(kind).params.model)
    text = state.tokens[row, : int(state.length[row])].tolist()
    logits = model.run([*text, *drafted])[0][-1]
    law: np.ndarray = logits - np.log(np.exp(logits).sum())
    return law


@pytest.mark.parametrize("kind", ["eagle3", "draft-model"])
def test_drafts_are_those_of_whole_chains_up_to_their_ends(kind: str) -> None:
    whole, ending = drafter(kind, 0.0), drafter(kind)
    state = eagle_rounds.prefilled(ending, 1.0)
    lengths, lags = set(), set()
    for _ in range(10):
        full, short = eagle_rounds.drafts(whole, state), eagle_rounds.drafts(ending, state)
        assert isinstance(full.law, Dense)
        assert isinstance(short.law, Dense)
        # At temperature 1, so that what is drawn from is the drafter's own law.
        log_q = np.asarray(full.law.log_q)
        for row, place in np.argwhere(full.valid).tolist():
            law = of_reference(kind, state, row, full.tokens[row, :place].tolist())
            np.testing.assert_allclose(np.exp(log_q[row, place]), np.exp(law), atol=1e-4)
        sure = np.cumprod(np.exp(log_q).max(axis=-1) >= SURE, axis=1) > 0
        np.testing.assert_array_equal(short.valid, np.asarray(full.valid) & sure)
        np.testing.assert_array_equal(short.tokens[short.valid], full.tokens[short.valid])
        np.testing.assert_allclose(
            short.law.log_q[short.valid], full.law.log_q[short.valid], rtol=1e-5, atol=1e-5
        )
        lengths |= set(np.asarray(short.valid).sum(axis=1).tolist())
        before = np.asarray(state.length)
        state = eagle_rounds.advance(ending, state)
        if kind == "draft-model":
            # A row that ended before the others has its last draft in the cache too.
            lag = np.asarray(state.length) - np.asarray(state.drafter.length)
            assert set(lag.tolist()) <= {1, 2}
            lags |= {(int(a), int(n)) for a, n in zip(lag, state.length - before, strict=True)}
    assert {0, 1, GAMMA} <= lengths
    if kind == "draft-model":
        assert (1, 2) in lags
        assert any(lag == 2 for lag, _ in lags)
