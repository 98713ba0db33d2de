"""The transform pipeline against its float64 definition, and drawing."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from jspec import sampling
from jspec.errors import InputError
from jspec.sampling_params import SamplingParams
from tests.oracles import transforms
from tests.oracles.transforms import Transforms

VOCAB, ROWS, NODES = 9, 3, 2
GREEDY = Transforms(temperature=0.0)
log_probs = jax.jit(sampling.log_probs)


def run(logits: np.ndarray, rows: list[Transforms]) -> np.ndarray:
    """Return log_probs of [B, K, V] logits in float64."""
    params = sampling.rows([SamplingParams(*row) for row in rows])
    return np.asarray(log_probs(jnp.asarray(logits), params)).astype(np.float64)


def compare(logits: np.ndarray, row: Transforms, got: np.ndarray) -> None:
    """Compare one node; where rounding may move the support, only with what must hold."""
    assert not np.isnan(got).any()
    assert (got[logits == -np.inf] == -np.inf).all()
    np.testing.assert_allclose(np.exp(got).sum(), 1.0, rtol=1e-5)
    assert got[np.argmax(logits)] > -np.inf
    if transforms.is_borderline(logits, row):
        return
    with np.errstate(divide="ignore"):
        truth = np.log(transforms.law(logits, row))
    # Below this float32 may have nothing left.
    real = truth > -80
    np.testing.assert_array_equal(got > -80, real)
    np.testing.assert_allclose(got[real], truth[real], rtol=2e-5, atol=2e-5)
    assert (got[~transforms.support(logits, row)] == -np.inf).all()


numbers = st.one_of(
    st.floats(-20, 20, width=32, allow_subnormal=False),
    st.integers(-3, 3).map(float),  # ties
    # Not so far apart that their difference is no float32.
    st.sampled_from([-np.inf, 0.0, -0.0, 1e38, -1e38, 1e30, 2e-38]),
)
nodes = st.lists(numbers, min_size=VOCAB, max_size=VOCAB).filter(lambda node: max(node) > -np.inf)
rows_of = st.builds(
    Transforms,
    temperature=st.one_of(
        st.sampled_from([0.0, 1e-42, 1e-30, 1e-6, 1.0, 1e6, 1e30, 1e37]), st.floats(0.1, 3)
    ),
    top_k=st.sampled_from([0, 1, 2, 3, VOCAB - 1, VOCAB, VOCAB + 5, 2**31 - 1]),
    top_p=st.one_of(
        st.sampled_from([1.0, 1 - 1e-9, 1 - 1e-6, 0.999, 0.5, 1e-6, 1e-30, 1e-42, 1e-60]),
        st.floats(0.01, 1),
    ),
    min_p=st.one_of(st.sampled_from([0.0, 1e-42, 1e-6, 0.05, 0.5, 1.0]), st.floats(0, 1)),
)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    logits=st.lists(nodes, min_size=ROWS * NODES, max_size=ROWS * NODES),
    rows=st.lists(rows_of, min_size=ROWS, max_size=ROWS),
)
def test_log_probs_are_the_definition(logits: list[list[float]], rows: list[Transforms]) -> None:
    given = np.array(logits, np.float32).reshape(ROWS, NODES, VOCAB)
    got = run(given, rows)
    for b, row in enumerate(rows):
        # A denormal float32 is zero to XLA on CPU.
        row = GREEDY if np.float32(row.temperature) < 1.2e-38 else row
        for k in range(NODES):
            compare(given[b, k], row, got[b, k])


@hypothesis.settings(max_examples=30)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), row=rows_of, step=st.sampled_from([0.25, 1e-6]))
def test_log_probs_of_a_larger_vocabulary(seed: int, row: Transforms, step: float) -> None:
    hypothesis.assume(row.temperature == 0 or row.temperature > 1e-30)
    generator = np.random.default_rng(seed)
    logits = (np.round(generator.normal(0, 3, (2, 1, 1000)) / step) * step).astype(np.float32)
    got = run(logits, [row, GREEDY])
    compare(logits[0, 0], row, got[0, 0])
    compare(logits[1, 0], GREEDY, got[1, 0])


# Probabilities are 8 4 4 2 1 over 19 (but for rounding), written as logits.
FIVE = np.log(np.array([4.0, 8.0, 2.0, 4.0, 1.0], np.float32))


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (Transforms(), [0, 1, 2, 3, 4]),
        (Transforms(top_k=1), [1]),
        (Transforms(top_k=2), [0, 1, 3]),  # tied with the second
        (Transforms(top_k=3), [0, 1, 3]),
        (Transforms(top_k=4), [0, 1, 2, 3]),
        (Transforms(top_p=8 / 19 - 0.01), [1]),
        (Transforms(top_p=8 / 19 + 0.01), [0, 1, 3]),  # tied with the last one needed
        (Transforms(top_p=16 / 19 + 0.01), [0, 1, 2, 3]),
        (Transforms(min_p=0.49), [0, 1, 3]),
        (Transforms(min_p=0.51), [1]),
        (Transforms(min_p=1.0), [1]),
        # top_p works on what top_k left: 8 of 16, not 8 of 19.
        (Transforms(top_k=3, top_p=0.49), [1]),
        (Transforms(top_k=3, top_p=0.51), [0, 1, 3]),
        # Temperature comes first: at 2 the weights are sqrt(8, 4, 4, 2, 1), 9.24 in all.
        (Transforms(temperature=2.0, top_p=0.32), [0, 1, 3]),
        (Transforms(temperature=2.0, top_p=0.30), [1]),
        (Transforms(temperature=2.0, min_p=0.6), [0, 1, 3]),
        # min_p comes last: before top_p it would leave 16, of which 8 are enough.
        (Transforms(top_p=0.45, min_p=0.49), [0, 1, 3]),
        (Transforms(temperature=0.0, top_k=3), [1]),
    ],
)
def test_what_is_kept_by_hand(row: Transforms, kept: list[int]) -> None:
    got = run(FIVE[None, None], [row])[0, 0]
    np.testing.assert_array_equal(np.flatnonzero(got > -np.inf), kept)
    weight = np.exp(np.float64(FIVE[kept]) / (row.temperature or 1.0))
    np.testing.assert_allclose(np.exp(got[kept]), weight / weight.sum(), rtol=1e-6)


def test_the_two_zeros_are_tied() -> None:
    logits = np.array([[[0.0, -0.0, -1.0, -0.0, 0.0]] * 2, [[-2.0, -0.0, -1.0, 0.0, -3.0]] * 2])
    got = run(logits.astype(np.float32), [Transforms(top_k=1), Transforms(top_p=0.2)])
    assert np.flatnonzero(got[0, 0] > -np.inf).tolist() == [0, 1, 3, 4]
    assert np.flatnonzero(got[1, 1] > -np.inf).tolist() == [1, 3]


def test_a_mass_of_exactly_top_p_is_enough() -> None:
    logits = np.log(np.array([[[1.0, 0.5, 0.5]]], np.float32))
    assert np.flatnonzero(run(logits, [Transforms(top_p=0.5)])[0, 0] > -np.inf).tolist() == [0]


def test_rows_do_not_touch_each_other() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, (3, 2, 50)).astype(np.float32)
    rows = [GREEDY, Transforms(), Transforms(0.7, 5, 0.8, 0.1)]
    together = run(logits, rows)
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(together[b], run(logits[b : b + 1], [row])[0])


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    got = run(np.array([[[1.0, 5.0, 5.0, -0.0], [0.0, -0.0, 0.0, -1.0]]], np.float32), [GREEDY])
    np.testing.assert_array_equal(got[0, 0], [-np.inf, 0, -np.inf, -np.inf])
    np.testing.assert_array_equal(got[0, 1], [0, -np.inf, -np.inf, -np.inf])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1.0], True),
        ([-np.inf, 1.0], True),
        ([3e38, -3e38], True),
        ([np.nan, 1.0], False),
        ([1.0, np.nan], False),
        ([np.inf, 1.0], False),
        ([-np.inf, -np.inf], False),
        ([-np.inf, np.nan], False),
    ],
)
@pytest.mark.parametrize("vocab", [2, 49152])
def test_usable(values: list[float], expected: bool, vocab: int) -> None:
    logits = np.full((1, 1, vocab), -np.inf, np.float32)
    logits[0, 0, [0, -1]] = values
    assert bool(jax.jit(sampling.usable)(logits)[0, 0]) is expected


def test_draw_has_the_law_and_never_takes_what_has_none() -> None:
    # 60000 draws.
    p = np.array([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    count = 60000
    with np.errstate(divide="ignore"):
        log_p = np.log(p).astype(np.float32) + np.float32(7)  # up to a constant
    keys = jax.random.split(jax.random.key(3), count)
    drawn = np.asarray(jax.jit(sampling.draw)(np.tile(log_p, (count, 1)), keys))
    counts = np.bincount(drawn, minlength=len(p))
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], count * p[p > 0]).pvalue > 1e-3


def test_draw_of_a_point_mass_is_certain() -> None:
    log_p = np.full((1000, 11), -np.inf, np.float32)
    at = np.arange(1000) % 11
    log_p[np.arange(1000), at] = -5.0
    keys = jax.random.split(jax.random.key(0), 1000)
    np.testing.assert_array_equal(jax.jit(sampling.draw)(log_p, keys), at)


@pytest.mark.parametrize("temperature", [-1.0, np.nan, np.inf, 1e38])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(InputError, match="temperature"):
        SamplingParams(temperature=temperature)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    scores=st.lists(
        st.sampled_from([-np.inf, -1.5, 0.0, 1.0, np.inf, np.nan]), min_size=7, max_size=7
    )
)
def test_the_best_is_numpys_argmax(scores: list[float]) -> None:
    found = BEST(np.array(scores, np.float32))
    assert int(found) == int(np.argmax(scores))


@pytest.mark.parametrize("place", [0, 40000, 49151])
def test_the_best_of_a_large_vocabulary_is_a_nan(place: int) -> None:
    scores = np.random.default_rng(place).normal(size=(3, 49152)).astype(np.float32)
    expected = np.argmax(scores, axis=-1)
    scores[1, place] = np.nan
    expected[1] = place
    np.testing.assert_array_equal(BEST(scores), expected)


BEST = jax.jit(sampling.best)
