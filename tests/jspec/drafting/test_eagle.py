"""EAGLE chains against heads in NumPy that draft from scratch, round after round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decoding, randomness
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.eagle import eagle
from jspec.drafting.protocol import Dense
from jspec.errors import InputError
from jspec.generation import Decoder, run_prefill
from jspec.models.eagle import EagleKind
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from tests import tiny, tiny_eagle
from tests.tiny_eagle import KINDS, TARGET, VOCAB

GAMMA = 3
chunk = jax.jit(decoding.decode_chunk, static_argnames="program")
propose = jax.jit(decoding.propose, static_argnames="program")
run_catch_up = jax.jit(decoding.catch_up, static_argnames=("target", "drafter", "width"))


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def bound(kind: EagleKind) -> BoundDrafter:
    return eagle(TARGET.config, tiny_eagle.config(kind), tiny_eagle.params(kind))


def program(kind: EagleKind, gamma: int = GAMMA) -> Program:
    return Program(TARGET.functions, bound(kind).drafter, gamma)


def prefilled(kind: EagleKind, temperature: float, width: int) -> DecodeState:
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=5)
    decoder = Decoder(TARGET, bound(kind), SpeculationConfig(GAMMA), batch_size=3)
    return run_prefill(
        target=TARGET.functions,
        drafter=bound(kind).drafter,
        width=width,
        params=TARGET.params,
        drafter_params=bound(kind).params,
        state=decoder.new_state([Request(p, params) for p in tiny_eagle.prompts()]),
    )


def advance(kind: EagleKind, state: DecodeState, gamma: int, rounds: int) -> DecodeState:
    after, _ = chunk(
        program=program(kind, gamma),
        params=TARGET.params,
        drafter_params=bound(kind).params,
        state=state,
        max_rounds=np.int32(rounds),
        until_finish=np.bool_(False),
    )
    return after


def check_drafts(kind: EagleKind, state: DecodeState, greedy: bool) -> None:
    """Compare what would be drafted next with the oracle's drafts from nothing but the tokens."""
    keys = randomness.round_keys(state.seeds, state.length)
    proposal, _ = propose(program(kind), bound(kind).params, keys, state)
    assert isinstance(proposal.law, Dense)
    head = tiny_eagle.to_numpy(kind)
    for row, length in enumerate(np.asarray(state.length).tolist()):
        # Of a single token there are no features yet.
        assert np.asarray(proposal.valid[row]).all() == (length > 1)
        if length == 1:
            continue
        tokens = state.tokens[row, :length].tolist()
        known = tiny_eagle.features(kind, tokens[:-1])
        drafts = proposal.tokens[row].tolist()
        for step in range(GAMMA):
            logits = head.after(tokens, known, drafts[:step], VOCAB)
            if greedy:
                assert drafts[step] == np.argmax(logits)
            else:
                law = logits - np.log(np.exp(logits).sum())
                np.testing.assert_allclose(proposal.law.log_q[row, step], law, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "temperature", "width"),
    [("eagle", 1.0, 4), ("eagle3", 1.0, 32), ("eagle3", 0.0, 4)],
)
def test_drafts_of_every_round(kind: EagleKind, temperature: float, width: int) -> None:
    state = prefilled(kind, temperature, width)
    outcomes: set[int] = set()
    lengths = []
    for _ in range(7):
        check_drafts(kind, state, temperature == 0)
        before, state = state, advance(kind, state, GAMMA, 1)
        committed = np.asarray(state.length - before.length)
        outcomes |= set(committed.tolist())
        lengths.append(np.asarray(state.length))
        assert state.drafter.count.tolist() == committed.tolist()
        # True entries alone are the head's: short of the pending token, and of those that wait.
        np.testing.assert_array_equal(
            state.drafter.cache.length + state.drafter.count, state.length - 1
        )
    # All rejected, some accepted, and all accepted, by rows that are not at one pace.
    assert outcomes >= ({1, 2, GAMMA + 1} if temperature else {1, 2})
    assert len({tuple(np.diff(row).tolist()) for row in np.array(lengths).T}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_catching_up_after_rounds_without_speculation(kind: EagleKind) -> None:
    together = advance(kind, prefilled(kind, 1.0, 32), GAMMA, 3)
    paused = advance(kind, together, 0, 7)
    np.testing.assert_array_equal(paused.drafter.cache.length, together.drafter.cache.length)
    for width in (4, 16):
        ready = run_catch_up(
            target=TARGET.functions,
            drafter=bound(kind).drafter,
            width=width,
            params=TARGET.params,
            drafter_params=bound(kind).params,
            state=paused,
        )
        np.testing.assert_array_equal(ready.cache.length, paused.cache.length)
        np.testing.assert_array_equal(
            bound(kind).drafter.synced(ready.drafter, ready.length), ready.length - 1
        )
        for ours, theirs in zip(ready.cache.keys, paused.cache.keys, strict=True):
            for row, length in enumerate(paused.cache.length.tolist()):
                np.testing.assert_allclose(
                    ours[row, :, :length], theirs[row, :, :length], atol=1e-5
                )
        check_drafts(kind, ready, greedy=False)
        check_drafts(kind, advance(kind, ready, GAMMA, 1), greedy=False)


def test_a_round_in_which_no_row_has_a_draft() -> None:
    kind: EagleKind = "eagle3"
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=5)
    decoder = Decoder(TARGET, bound(kind), SpeculationConfig(GAMMA), batch_size=3)
    state = decoder.new_state([Request((token,), params) for token in (1, 5, 6)])
    for _ in range(3):
        check_drafts(kind, state, greedy=False)
        state = advance(kind, state, GAMMA, 1)


def test_permuted_rows_go_on_as_before() -> None:
    kind: EagleKind = "eagle"
    state = advance(kind, prefilled(kind, 1.0, 32), GAMMA, 2)
    order = jnp.array([2, 0, 1], jnp.int32)
    moved = jax.tree.map(lambda leaf: leaf[order], dataclasses.replace(state, drafter=()))
    inner = bound(kind).drafter.permute_rows(state.drafter, order)
    moved = dataclasses.replace(moved, drafter=inner)
    after, moved = advance(kind, state, GAMMA, 4), advance(kind, moved, GAMMA, 4)
    np.testing.assert_array_equal(moved.length, after.length[order])
    for row, source in enumerate([2, 0, 1]):
        end = int(moved.length[row])
        np.testing.assert_array_equal(moved.tokens[row, :end], after.tokens[source, :end])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_plain_decoding_to_the_end_of_the_context(kind: EagleKind) -> None:
    asked = [Request(p, SamplingParams(max_new_tokens=120)) for p in tiny_eagle.prompts()]
    config = tiny_eagle.config(kind)
    layer = dataclasses.replace(config.layer, max_context=40)
    short = dataclasses.replace(config, layer=layer)
    drafter = eagle(TARGET.config, short, tiny_eagle.params(kind))
    found = Decoder(TARGET, drafter, SpeculationConfig(GAMMA), batch_size=3).generate(asked)
    plain = Decoder(TARGET, batch_size=3).generate(asked)
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]
    for request, done in zip(asked, found, strict=True):
        # The head has 40 positions, so the last token that it can guess is that of index 41.
        assert done.counts.proposed.sum() <= GAMMA * (42 - len(request.token_ids))
        assert done.counts.proposed.sum() > 0


def test_heads_of_another_target_are_refused() -> None:
    config, params = tiny_eagle.config("eagle"), tiny_eagle.params("eagle")
    for field, other in (("hidden_size", 16), ("num_layers", 1)):
        target = dataclasses.replace(TARGET.config, **{field: other})
        with pytest.raises(InputError, match="trained for this target"):
            eagle(target, config, params)
