"""Prompt lookup against a search written with Python lists."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import randomness, sampling
from jspec.drafting.ngram import NGramDrafter, ngram
from jspec.drafting.protocol import Context, PointMass
from jspec.errors import InputError
from jspec.sampling_params import SamplingParams

SLOTS = 24
GAMMA = 6


@functools.partial(jax.jit, static_argnames="drafter")
def propose(
    drafter: NGramDrafter, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    batch = tokens.shape[0]
    context = Context(
        tokens=tokens,
        length=length,
        room=jnp.full(batch, GAMMA, jnp.int32),
        sampling=sampling.rows([SamplingParams()] * batch),
        keys=randomness.round_keys(jnp.zeros((batch, 2), jnp.uint32), length),
        vocab_size=8,
    )
    proposal, _ = drafter.propose((), (), context, GAMMA)
    assert isinstance(proposal.law, PointMass)
    assert proposal.topology.size == GAMMA + 1
    return proposal.tokens, proposal.valid


def by_hand(row: list[int], max_n: int, min_n: int) -> list[int] | None:
    """The longest n wins, then the most recent occurrence; what follows it, read periodically."""
    for n in range(max_n, min_n - 1, -1):
        suffix = row[-n:]
        for end in range(len(row) - 1, n - 1, -1):
            if len(suffix) == n and row[end - n : end] == suffix:
                after = row[end:]
                return [after[i % len(after)] for i in range(GAMMA)]
    return None


@pytest.mark.parametrize(("max_n", "min_n"), [(1, 1), (3, 2), (4, 1)])
@settings(max_examples=60)
@given(data=st.data())
def test_drafts(max_n: int, min_n: int, data: st.DataObject) -> None:
    rows = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS)) for _ in range(2)]
    # What lies past a row's length must not matter.
    tokens = np.full((2, SLOTS), data.draw(st.integers(0, 2)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    length = jnp.array([len(row) for row in rows], jnp.int32)
    drafts, valid = propose(NGramDrafter(max_n, min_n), jnp.asarray(tokens), length)
    for index, row in enumerate(rows):
        expected = by_hand(row, max_n, min_n)
        assert bool(valid[index].all()) == bool(valid[index].any()) == (expected is not None)
        if expected is not None:
            assert list(map(int, drafts[index])) == expected


def test_longer_matches_win_over_recent_ones() -> None:
    row = [7, 1, 2, 5, 6, 2, 4, 1, 2]  # "1 2" was followed by 5; the last "2" alone by 4
    tokens = jnp.zeros((1, SLOTS), jnp.int32).at[0, : len(row)].set(jnp.array(row, jnp.int32))
    length = jnp.array([len(row)], jnp.int32)
    drafts, _ = propose(NGramDrafter(3, 1), tokens, length)
    assert list(drafts[0]) == [5, 6, 2, 4, 1, 2]
    drafts, _ = propose(NGramDrafter(1, 1), tokens, length)
    assert list(drafts[0]) == [4, 1, 2, 4, 1, 2]


def test_it_keeps_nothing() -> None:
    drafter = NGramDrafter()
    assert jax.tree.leaves(drafter.init(3, 100, jnp.float32)) == []
    assert drafter.feature_layers == ()
    length = jnp.array([3, 5], jnp.int32)
    np.testing.assert_array_equal(drafter.synced((), length), length)


@pytest.mark.parametrize(
    ("max_n", "min_n", "field"), [(3, 0, "min_n"), (2, 3, "max_n"), (0, 0, "min_n")]
)
def test_settings_that_make_no_sense(max_n: int, min_n: int, field: str) -> None:
    with pytest.raises(InputError, match=field) as caught:
        ngram(max_n, min_n)
    assert caught.value.field == field


def test_the_name_says_the_settings() -> None:
    assert ngram(4, 2).name == "ngram-2-4"
