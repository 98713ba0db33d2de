"""What a round counts, against a replay in plain Python."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import counters, decoding, trees
from jspec.config import SamplingParams
from jspec.drafting.protocol import PointMass, Proposal
from jspec.state import DecodeState, Finish
from jspec.verification import Verdict
from tests import table_models
from tests.oracles import commits

ROWS, GAMMA, WIDTH, VOCAB = 3, 4, 3, 5
record = jax.jit(counters.record)
commit = jax.jit(decoding._commit)


@st.composite
def rounds(draw: Any) -> dict[str, list[Any]]:
    """One round of `ROWS` rows: proposals of up to `WIDTH` drafts and what became of them."""
    proposed = draw(st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS))
    return {
        "ran": draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)),
        "proposed": proposed,
        "accepted": [draw(st.integers(0, n)) for n in proposed],
        "overlap": [
            draw(st.lists(st.integers(0, 64), min_size=WIDTH, max_size=WIDTH)) for _ in range(ROWS)
        ],
        "emitted": draw(st.lists(st.integers(1, WIDTH + 1), min_size=ROWS, max_size=ROWS)),
        "discarded": draw(st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS)),
    }


@hypothesis.given(history=st.lists(rounds(), max_size=6))
def test_record_adds_up_rounds(history: list[dict[str, list[Any]]]) -> None:
    state = counters.init(ROWS, GAMMA)
    histogram = np.zeros((ROWS, GAMMA + 1, GAMMA + 1), int)
    overlap = np.zeros((ROWS, GAMMA))
    emitted, discarded = [0] * ROWS, [0] * ROWS
    for past in history:
        state = record(
            state,
            ran=jnp.asarray(past["ran"]),
            proposed=jnp.asarray(past["proposed"], jnp.int32),
            accepted=jnp.asarray(past["accepted"], jnp.int32),
            # Sixty-fourths add up without rounding.
            overlap=jnp.asarray(past["overlap"], jnp.float32) / jnp.float32(64),
            emitted=jnp.asarray(past["emitted"], jnp.int32),
            discarded=jnp.asarray(past["discarded"], jnp.int32),
        )
        for row in range(ROWS):
            if not past["ran"][row]:
                continue
            n, k = past["proposed"][row], past["accepted"][row]
            histogram[row, n, k] += 1
            for position in range(n):
                if position > k:  # the first rejection ends the walk
                    break
                overlap[row, position] += past["overlap"][row][position] / 64
            emitted[row] += past["emitted"][row]
            discarded[row] += past["discarded"][row]
    np.testing.assert_array_equal(state.histogram, histogram)
    np.testing.assert_array_equal(state.overlap, overlap)
    np.testing.assert_array_equal(state.emitted, emitted)
    np.testing.assert_array_equal(state.discarded, discarded)


def test_what_an_inactive_row_holds_is_not_counted() -> None:
    state = record(
        counters.init(1, 2),
        ran=jnp.asarray([False]),
        proposed=jnp.asarray([2], jnp.int32),
        accepted=jnp.asarray([1], jnp.int32),
        overlap=jnp.full((1, 2), jnp.nan, jnp.float32),
        emitted=jnp.asarray([9], jnp.int32),
        discarded=jnp.asarray([9], jnp.int32),
    )
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state))


def _state(room: int, active: bool, stops: list[int]) -> DecodeState:
    prompt = np.array([[0, 1]])
    params = [SamplingParams(max_new_tokens=room)]
    model = table_models.TableTarget(VOCAB)
    table = np.zeros((VOCAB,) * 3, np.float32)
    state = table_models.start(model, table, prompt, params, np.array([0]), WIDTH)
    padded = [*stops, -1, -1][:2]
    return dataclasses.replace(
        state,
        tokens=jnp.zeros((1, 16), jnp.int32).at[0, 1].set(1),
        active=jnp.asarray([active]),
        stop_ids=jnp.asarray([padded], jnp.int32),
    )


class Case(NamedTuple):
    """A round that is about to be committed."""

    drafts: list[int]
    accepted: int
    final: int
    finite: bool
    stops: list[int]
    room: int
    active: bool


@st.composite
def cases(draw: Any) -> Case:
    token = st.integers(0, VOCAB - 1)
    room = draw(st.integers(1, WIDTH + 3))
    drafts = draw(st.lists(token, max_size=min(WIDTH, room - 1)))
    return Case(
        drafts,
        draw(st.integers(0, len(drafts))),
        draw(token),
        draw(st.sampled_from([True, True, False])),
        draw(st.lists(token, max_size=2, unique=True)),
        room,
        draw(st.sampled_from([True, True, True, False])),
    )


def run_commit(case: Case) -> tuple[DecodeState, int, int]:
    """Commit with the real code; return the state, the start length and the committed count."""
    state = _state(case.room, case.active, case.stops)
    start = int(state.length[0])
    filler = [VOCAB - 1] * (WIDTH - len(case.drafts))
    proposal = Proposal(
        tokens=jnp.asarray([case.drafts + filler], jnp.int32),
        topology=trees.chain(WIDTH),
        valid=jnp.arange(WIDTH)[None] < len(case.drafts),
        law=PointMass(),
    )
    verdict = Verdict(
        accepted=jnp.asarray([case.accepted], jnp.int32),
        final=jnp.asarray([case.final], jnp.int32),
        overlap=jnp.asarray([[0.5, 0.25, 0.125]], jnp.float32),
        finite=jnp.asarray([case.finite]),
    )
    after, count = commit(state, proposal, verdict)
    return after, start, int(count[0])


@hypothesis.settings(max_examples=300)
@hypothesis.given(case=cases())
def test_a_round_is_cut_at_stop_and_budget_and_counted_so(case: Case) -> None:
    state, start, count = run_commit(case)
    counts = jax.tree.map(lambda leaf: np.asarray(leaf)[0], state.counters)
    if not case.active:
        assert count == 0
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(counts))
        assert int(state.finish[0]) == Finish.NONE
        return
    truth = commits.commit(
        case.drafts, case.accepted, case.final, case.finite, set(case.stops), case.room
    )
    assert count == len(truth.tokens)
    assert int(state.length[0]) == start + count
    assert int(state.cache.length[0]) == start - 1 + count
    assert np.asarray(state.tokens)[0, start : start + count].tolist() == truth.tokens
    assert not np.asarray(state.tokens)[0, start + count :].any()  # nothing else is written
    assert Finish(int(state.finish[0])).name.lower() == truth.reason
    assert bool(state.active[0]) == (truth.reason == "none")
    assert int(counts.emitted) == count
    assert int(counts.discarded) == truth.discarded
    if count:
        histogram = np.zeros_like(counts.histogram)
        histogram[truth.proposed, truth.accepted] = 1
        np.testing.assert_array_equal(counts.histogram, histogram)
        seen = np.array([0.5, 0.25, 0.125]) * (np.arange(WIDTH) < truth.examined)
        np.testing.assert_array_equal(counts.overlap, seen)
    else:
        assert not counts.histogram.any()


@pytest.mark.parametrize(
    ("case", "tokens", "reason", "cell", "discarded"),
    [
        # BEHAVIOUR: a stop inside the accepted span, before the cap.
        (Case([3, 4, 2], 3, 0, True, [2], 5, True), [3, 4, 2], "stop", (3, 3), 1),
        (Case([3, 2, 4], 3, 0, True, [2], 5, True), [3, 2], "stop", (2, 2), 2),
        (Case([3, 4, 1], 1, 2, True, [2], 5, True), [3, 2], "stop", (3, 1), 0),
        (Case([3, 4], 2, 1, True, [2], 3, True), [3, 4, 1], "length", (2, 2), 0),
        (Case([3, 4], 2, 2, True, [2], 3, True), [3, 4, 2], "stop", (2, 2), 0),
        (Case([], 0, 1, True, [], 1, True), [1], "length", (0, 0), 0),
        (Case([3, 4, 1], 0, 0, True, [], 9, True), [0], "none", (3, 0), 0),
    ],
)
def test_cuts_by_hand(
    case: Case, tokens: list[int], reason: str, cell: tuple[int, int], discarded: int
) -> None:
    state, start, count = run_commit(case)
    assert np.asarray(state.tokens)[0, start : start + count].tolist() == tokens
    assert Finish(int(state.finish[0])).name.lower() == reason
    assert np.argwhere(np.asarray(state.counters.histogram)[0]).tolist() == [list(cell)]
    assert int(state.counters.discarded[0]) == discarded
