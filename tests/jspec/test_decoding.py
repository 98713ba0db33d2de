"""What a round commits, where it cuts and what it counts, with a scripted target and drafter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decoding
from jspec.config import Verification
from jspec.decoding import Program
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState, Finish
from tests import rounds as rounds_of
from tests import scripted, tiny
from tests.scripted import STOP, Bigram, Script

GAMMA = 5
chunk = jax.jit(decoding.decode_chunk, static_argnames="program")


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def program(gamma: int = GAMMA, verification: Verification = "token") -> Program:
    return Program(Bigram(), Script(), gamma, verification)


def run(
    state: DecodeState,
    drafts: Sequence[Sequence[int]],
    rounds: int = 1,
    logits: jax.Array | None = None,
    until_finish: bool = False,
    what: Program | None = None,
) -> tuple[DecodeState, int]:
    after, done = chunk(
        program=what or program(),
        params=scripted.table() if logits is None else logits,
        drafter_params=scripted.script(*drafts),
        state=state,
        max_rounds=np.int32(rounds),
        until_finish=np.bool_(until_finish),
    )
    return after, int(done)


def emitted(before: DecodeState, after: DecodeState, row: int = 0) -> list[int]:
    return [int(t) for t in after.tokens[row, int(before.length[row]) : int(after.length[row])]]


def cells(before: DecodeState, after: DecodeState, row: int = 0) -> dict[tuple[int, int], int]:
    return rounds_of.cells(rounds_of.counted(after, int(before.length[row]), row))


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_a_stop_inside_the_accepted_span(verification: Verification, temperature: float) -> None:
    before = scripted.state([[5, 1]], [5], params=SamplingParams(temperature=temperature))
    after, rounds = run(
        before, [[10, 11, STOP, 20, 21]], rounds=9, what=program(verification=verification)
    )
    assert emitted(before, after) == [10, 11, STOP]
    assert int(after.finish[0]) == Finish.STOP
    assert not after.active[0]
    assert rounds == 1
    # The budget of 5 leaves room for 4 drafts; what lay beyond the stop is neither proposed nor
    # accepted, but verified and thrown away: draft 20 and the bonus token.
    counts = rounds_of.counted(after, 2)
    assert rounds_of.cells(counts) == {(3, 3): 1}
    assert counts.emitted == 3
    assert counts.discarded == 2
    np.testing.assert_allclose(counts.overlap, [1, 1, 1, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("budget", "expected", "finish", "cell"),
    [
        (1, [10], Finish.LENGTH, (0, 0)),
        (2, [10, 11], Finish.LENGTH, (1, 1)),
        (3, [10, 11, STOP], Finish.STOP, (2, 2)),  # the stop is the bonus token, and the last
        (4, [10, 11, STOP], Finish.STOP, (3, 3)),
    ],
)
def test_stop_or_budget_whichever_comes_first(
    budget: int, expected: list[int], finish: Finish, cell: tuple[int, int]
) -> None:
    before = scripted.state([[1]], [budget])
    after, _ = run(before, [[10, 11, STOP, 20, 21]], rounds=9)
    assert emitted(before, after) == expected
    assert int(after.finish[0]) == finish
    counts = rounds_of.counted(after, 1)
    assert rounds_of.cells(counts) == {cell: 1}
    assert counts.emitted == len(expected)


def test_the_budget_is_used_up_exactly() -> None:
    for budget in range(1, 12):
        before = scripted.state([[1]], [budget], stops=())
        after, _ = run(before, [[20, 21, 22, 23, 24]], rounds=50)
        assert emitted(before, after) == [10, 11, 12, *range(20, 32)][:budget]
        assert int(after.finish[0]) == Finish.LENGTH


def test_a_rejected_stop_is_no_stop() -> None:
    before = scripted.state([[1]], [20])
    after, _ = run(before, [[10, STOP, 20]])
    assert emitted(before, after) == [10, 11]
    assert int(after.finish[0]) == Finish.NONE
    assert cells(before, after) == {(3, 1): 1}


def test_the_correction_may_be_the_stop() -> None:
    before = scripted.state([[10]], [20])
    after, _ = run(before, [[11, 13, 14]])
    assert emitted(before, after) == [11, STOP]
    assert int(after.finish[0]) == Finish.STOP
    assert cells(before, after) == {(3, 1): 1}  # as in any round that ends in a correction


def test_several_stop_ids() -> None:
    before = scripted.state([[12]], [20], stops=(22, 21))
    after, _ = run(before, [[20, 21, 22, 23, 24]])
    assert emitted(before, after) == [20, 21]


def test_rows_are_cut_each_at_its_own_place() -> None:
    before = scripted.state([[1], [5, 4, 3, 1], [20], [1]], [2, 20, 20, 20])
    before = dataclasses.replace(before, active=jnp.array([True, True, True, False]))
    after, rounds = run(before, [[10, 11, 12], [10, 11], [21, 22, 9, 9, 9], [10, 11, 12]], rounds=1)
    assert rounds == 1
    assert [emitted(before, after, row) for row in range(4)] == [
        [10, 11],
        [10, 11, STOP],
        [21, 22, 23],
        [],
    ]
    assert list(after.finish) == [Finish.LENGTH, Finish.STOP, Finish.NONE, Finish.NONE]
    assert [cells(before, after, row) for row in range(4)] == [
        {(1, 1): 1},
        {(2, 2): 1},
        {(5, 2): 1},
        {},
    ]
    # Running rows hold all but their pending token; the drafter was told what was committed.
    assert list(after.cache.length) == list(before.cache.length + jnp.array([2, 3, 3, 0]))
    assert list(after.drafter) == [2, 3, 3, 0]
    # Tokens past a row's length are nobody's: nothing may have been written there.
    for row in range(4):
        end = int(after.length[row])
        np.testing.assert_array_equal(after.tokens[row, end:], before.tokens[row, end:])


def test_rounds_without_any_draft_are_plain_rounds() -> None:
    before = scripted.state([[1], [20]], [30, 4])
    after, rounds = run(before, [[], []], rounds=3)
    assert rounds == 3
    assert emitted(before, after, 0) == [10, 11, STOP]
    assert emitted(before, after, 1) == [21, 22, 23]
    assert cells(before, after, 1) == {(0, 0): 3}
    assert int(after.drafter[1]) == 3


def test_gamma_zero_leaves_the_drafter_alone() -> None:
    before = scripted.state([[1]], [30])
    after, _ = run(before, [[10, 11]], rounds=2, what=program(0))
    assert emitted(before, after) == [10, 11]
    assert int(after.drafter[0]) == 0


def test_the_chunk_yields_when_asked() -> None:
    before = scripted.state([[1], [13]], [2, 9], stops=())
    after, rounds = run(before, [[], []], rounds=50)
    assert rounds == 9
    assert not after.active.any()
    after, rounds = run(before, [[], []], rounds=50, until_finish=True)
    assert rounds == 2
    assert list(after.active) == [False, True]
    assert run(after, [[], []], rounds=50)[1] == 7
    assert run(before, [[], []], rounds=1)[1] == 1
    idle = dataclasses.replace(before, active=jnp.zeros(2, bool))
    assert run(idle, [[], []], rounds=50)[1] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_unusable_logits_end_the_row_where_plain_decoding_would(
    bad: float, temperature: float, verification: Verification
) -> None:
    logits = scripted.table(_11=bad)
    params = SamplingParams(temperature=temperature)
    two = functools.partial(scripted.state, [[1], [20]], [20, 20], stops=(25,), params=params)
    for drafts in ([], [10], [10, 11], [10, 11, 12, 20]):
        before = two()
        after, _ = run(before, [drafts, [21]], 30, logits, what=program(verification=verification))
        assert emitted(before, after) == [10, 11]
        assert int(after.finish[0]) == Finish.ERROR
        counts = rounds_of.counted(after, 1)
        assert counts.emitted == 2
        assert int(after.cache.length[0]) == 2
        assert np.isfinite(counts.overlap).all()
        # The neighbour goes on to its own stop.
        assert emitted(before, after, 1) == [21, 22, 23, 24, 25]
        assert int(after.finish[1]) == Finish.STOP


def test_unusable_logits_past_the_stop_or_the_budget_do_not_matter() -> None:
    logits = scripted.table(_12=math.nan)
    before = scripted.state([[1]], [20])
    after, _ = run(before, [[10, 11, STOP, 20]], logits=logits)
    assert emitted(before, after) == [10, 11, STOP]
    assert int(after.finish[0]) == Finish.STOP
    before = scripted.state([[1]], [3], stops=())
    after, _ = run(before, [[10, 11, 12, 20]], logits=logits)
    assert emitted(before, after) == [10, 11, 12]
    assert int(after.finish[0]) == Finish.LENGTH


def test_unusable_logits_after_a_rejection_do_not_matter() -> None:
    before = scripted.state([[1]], [20])
    after, _ = run(before, [[10, 13, 14]], logits=scripted.table(_14=math.nan))
    assert emitted(before, after) == [10, 11]
    assert int(after.finish[0]) == Finish.NONE


def test_prefill_stops_before_the_pending_token() -> None:
    before = scripted.state([[3, 4, 5, 6, 7], [9], [2, 2]], [5, 5, 5])
    empty = dataclasses.replace(before.cache, length=jnp.zeros(3, jnp.int32))
    before = dataclasses.replace(
        before, cache=empty, active=jnp.array([True, True, False]), drafter=jnp.zeros(3, jnp.int32)
    )
    after = decoding.prefill(
        Bigram(), Script(), 2, scripted.table(), scripted.script([], [], []), before
    )
    assert list(after.cache.length) == [4, 0, 0]
    assert list(after.length) == [5, 1, 2]
