"""EAGLE chains against heads in NumPy that draft from scratch, round after round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decoding
from jspec.drafting import BoundDrafter
from jspec.drafting.eagle import eagle
from jspec.drafting.protocol import Dense
from jspec.errors import InputError
from jspec.state import DecodeState
from tests import tiny, tiny_eagle
from tests.jspec.drafting.eagle_rounds import (
    GAMMA,
    Oracle,
    advance,
    check_greedy,
    drafts,
    new_state,
    prefilled,
)
from tests.tiny_eagle import TARGET, Variant

catch_up = jax.jit(decoding.catch_up, static_argnames=("target", "drafter", "width"))


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def bound(kind: Variant) -> BoundDrafter:
    return eagle(TARGET.config, tiny_eagle.config(kind), tiny_eagle.params(kind))


def check_drafts(kind: Variant, state: DecodeState, greedy: bool = False) -> None:
    """Compare what would be drafted next with the oracle's drafts."""
    proposal = drafts(bound(kind), state)
    assert isinstance(proposal.law, Dense)
    for row, length in enumerate(np.asarray(state.length).tolist()):
        # Of a single token there are no features yet.
        assert proposal.valid[row].tolist() == [length > 1] * GAMMA
        if length == 1:
            continue
        oracle, drafted = Oracle(kind, state, row), proposal.tokens[row].tolist()
        for step in range(GAMMA):
            law = oracle.log_q(drafted[:step])
            if greedy:
                assert drafted[step] == np.argmax(law)
            else:
                np.testing.assert_allclose(proposal.law.log_q[row, step], law, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "temperature", "width"),
    [("lower", 1.0, 4), ("eagle3", 1.0, 32), ("eagle3", 0.0, 4)],
)
def test_drafts_of_every_round(kind: Variant, temperature: float, width: int) -> None:
    state = prefilled(bound(kind), temperature, width)
    outcomes: set[int] = set()
    lengths = []
    for _ in range(7):
        check_drafts(kind, state, temperature == 0)
        before, state = state, advance(bound(kind), state)
        committed = np.asarray(state.length - before.length)
        outcomes |= set(committed.tolist())
        lengths.append(np.asarray(state.length))
        # True entries alone are the head's: short of the pending token, and of those that wait.
        assert state.drafter.count.tolist() == committed.tolist()
        np.testing.assert_array_equal(
            state.drafter.cache.length + state.drafter.count, state.length - 1
        )
    # All rejected, some accepted, and all accepted, by rows that are not at one pace.
    assert outcomes >= ({1, 2, GAMMA + 1} if temperature else {1, GAMMA + 1})
    assert len({tuple(np.diff(row).tolist()) for row in np.array(lengths).T}) > 1


@pytest.mark.parametrize(("kind", "width"), [("lower", 16), ("eagle3", 4)])
def test_catching_up_after_rounds_without_speculation(kind: Variant, width: int) -> None:
    together = advance(bound(kind), prefilled(bound(kind), 1.0), 3)
    paused = advance(bound(kind), together, 7, gamma=0)
    np.testing.assert_array_equal(paused.drafter.cache.length, together.drafter.cache.length)
    # The 7 tokens and some of those before, in one step or in several.
    ready = catch_up(
        target=TARGET.functions,
        drafter=bound(kind).drafter,
        width=width,
        params=TARGET.params,
        drafter_params=bound(kind).params,
        state=paused,
    )
    known = bound(kind).drafter.synced(ready.drafter, ready.length)
    np.testing.assert_array_equal(known, ready.length - 1)
    # The target's cache is as it was.
    np.testing.assert_array_equal(ready.cache.length, paused.cache.length)
    for ours, theirs in zip(ready.cache.keys, paused.cache.keys, strict=True):
        for row, length in enumerate(paused.cache.length.tolist()):
            np.testing.assert_allclose(ours[row, :, :length], theirs[row, :, :length], atol=1e-5)
    check_drafts(kind, ready)
    check_drafts(kind, advance(bound(kind), ready))


def test_rows_of_one_token_begin_with_a_round_without_drafts() -> None:
    state = new_state(bound("eagle3"), 1.0, [(1,), (5,), (6,)])
    for _ in range(3):
        check_drafts("eagle3", state)
        state = advance(bound("eagle3"), state)
    assert (state.length > 3).all()


def test_permuted_rows_go_on_as_before() -> None:
    drafter = bound("eagle3")
    state = advance(drafter, prefilled(drafter, 1.0), 2)
    order = jnp.array([2, 0, 1], jnp.int32)
    moved = jax.tree.map(lambda leaf: leaf[order], dataclasses.replace(state, drafter=()))
    inner = drafter.drafter.permute_rows(state.drafter, order)
    moved = dataclasses.replace(moved, drafter=inner)
    after, moved = advance(drafter, state, 4), advance(drafter, moved, 4)
    np.testing.assert_array_equal(moved.length, after.length[order])
    for row, source in enumerate([2, 0, 1]):
        end = int(moved.length[row])
        np.testing.assert_array_equal(moved.tokens[row, :end], after.tokens[source, :end])


def test_greedy_is_plain_decoding_to_the_end_of_the_context() -> None:
    check_greedy(bound("eagle3"), 20)


def test_heads_of_another_target_are_refused() -> None:
    config, params = tiny_eagle.config("eagle"), tiny_eagle.params("eagle")
    narrow = dataclasses.replace(TARGET.config, hidden_size=16)
    shallow = dataclasses.replace(TARGET.config, num_layers=1)
    for target in (narrow, shallow):
        with pytest.raises(InputError, match="trained for this target"):
            eagle(target, config, params)
