"""What rounds leave behind and what is counted from it, against a replay in plain Python."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import decoding, trace, trees
from jspec.drafting.protocol import PointMass, Proposal
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState, Finish
from jspec.verification import Verdict
from tests import table_models
from tests.oracles import commits
from tests.rounds import cells, counted

ROWS, GAMMA, WIDTH, VOCAB = 3, 4, 3, 5
START, SLOTS = 2, 40
record = jax.jit(trace.record)
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
        "nodes": [
            draw(st.lists(st.integers(1, GAMMA), min_size=WIDTH, max_size=WIDTH, unique=True))
            for _ in range(ROWS)
        ],
    }


@hypothesis.given(history=st.lists(rounds(), max_size=6), data=st.data())
def test_rounds_are_counted_up_to_wherever_the_text_is_cut(
    history: list[dict[str, list[Any]]], data: st.DataObject
) -> None:
    state = trace.init(ROWS, SLOTS)
    lengths = [START] * ROWS
    for past in history:
        ran, accepted = np.array(past["ran"]), np.array(past["accepted"])
        position = np.arange(WIDTH + 1)
        kept = ran[:, None] & (position[None] <= accepted[:, None])
        state = record(
            state,
            slots=jnp.asarray(
                np.where(kept, np.array(lengths)[:, None] + position, SLOTS), jnp.int32
            ),
            proposed=jnp.asarray(past["proposed"], jnp.int32),
            accepted=jnp.asarray(accepted, jnp.int32),
            # Sixty-fourths add up without rounding.
            overlap=jnp.asarray(past["overlap"], jnp.float32) / jnp.float32(64),
            nodes=jnp.asarray(past["nodes"], jnp.int32),
            discarded=jnp.zeros(ROWS, jnp.int32),
        )
        lengths = [n + (a + 1) * int(r) for n, a, r in zip(lengths, accepted, ran, strict=True)]
    for row in range(ROWS):
        end = data.draw(st.integers(START, lengths[row]))
        counts = trace.counts(state, row, START, end, lengths[row], GAMMA)
        # Replay the rounds up to the cut.
        histogram, overlap, at = np.zeros((GAMMA + 1, GAMMA + 1), int), np.zeros(GAMMA), START
        nodes = np.zeros((GAMMA + 1, 2), int)
        for past in history:
            if not past["ran"][row] or at >= end:
                continue
            n, k = past["proposed"][row], past["accepted"][row]
            size = min(k + 1, end - at)
            if size < k + 1:
                n, k = min(n, size), min(k, size)
            histogram[n, k] += 1
            for draft in range(min(n, k + 1, size)):  # the first rejection ends the walk
                overlap[draft] += past["overlap"][row][draft] / 64
            path = [0, *past["nodes"][row][:k]]
            for node in path:
                nodes[node, 0] += 1
            for node in path[:n]:  # deeper ones have no drafts below
                nodes[node, 1] += 1
            at += size
        np.testing.assert_array_equal(counts.histogram, histogram)
        np.testing.assert_array_equal(counts.overlap, overlap)
        np.testing.assert_array_equal(counts.nodes, nodes)
        assert counts.emitted == end - START
        assert counts.discarded == lengths[row] - end


def test_a_row_that_commits_nothing_leaves_no_trace() -> None:
    empty = trace.init(1, 4)
    state = record(
        empty,
        slots=jnp.full((1, 3), 4, jnp.int32),
        proposed=jnp.asarray([2], jnp.int32),
        accepted=jnp.asarray([1], jnp.int32),
        overlap=jnp.full((1, 2), jnp.nan, jnp.float32),
        nodes=jnp.ones((1, 2), jnp.int32),
        discarded=jnp.asarray([0], jnp.int32),
    )
    jax.tree.map(np.testing.assert_array_equal, state, empty)


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
        path=jnp.arange(WIDTH + 1, dtype=jnp.int32)[None],
    )
    after, committed = commit(state, proposal, verdict)
    return after, start, int(committed.counts[0])


@hypothesis.settings(max_examples=300)
@hypothesis.given(case=cases())
def test_a_round_is_cut_at_stop_and_budget_and_counted_so(case: Case) -> None:
    state, start, count = run_commit(case)
    counts = counted(state, start, gamma=WIDTH)
    if not case.active:
        assert count == counts.rounds == counts.emitted == counts.discarded == 0
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
    assert counts.emitted == count
    assert counts.discarded == truth.discarded
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
    counts = counted(state, start)
    assert cells(counts) == {cell: 1}
    assert counts.discarded == discarded
