"""Rotary frequencies against values worked out by hand."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import RopeConfig
from jspec.models import rope


def test_plain_frequencies() -> None:
    # theta^(-2i / H): 1, 100^-0.25, 100^-0.5, 100^-0.75.
    expected = [1.0, 0.31622776601683794, 0.1, 0.03162277660168379]
    found = rope.inverse_frequencies(RopeConfig(theta=100.0), 8)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    assert found.dtype == np.float32


def test_linear_scaling_divides_every_frequency() -> None:
    config = RopeConfig(theta=100.0, scaling="linear", factor=4.0)
    np.testing.assert_allclose(rope.inverse_frequencies(config, 4), [0.25, 0.25 * 0.1], rtol=1e-7)


def test_llama3_keeps_short_stretches_long_and_blends_between() -> None:
    # Context 1000, factors 1 and 4: wavelengths below 250 are kept, above 1000 divided by 8.
    config = RopeConfig(
        theta=1e6,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=1000,
    )
    # H = 12: frequencies 10^0, 10^-1, .., 10^-5; wavelengths 6.28, 62.8, 628, 6283, ..
    # At 0.01: 1000 / 628.3 = 1.59155 turns, blend (1.59155 - 1) / 3 = 0.197183, so
    # 0.802817 * 0.01 / 8 + 0.197183 * 0.01 = 0.00297535.
    expected = [1.0, 0.1, 0.00297535, 1.25e-4, 1.25e-5, 1.25e-6]
    np.testing.assert_allclose(rope.inverse_frequencies(config, 12), expected, rtol=2e-6)


def test_llama3_of_the_published_model() -> None:
    # Llama 3.2 1B: theta 500000, H 64, factor 32, factors 1 and 4, context 8192.
    config = RopeConfig(theta=500000.0, scaling="llama3", factor=32.0, original_context=8192)
    found = rope.inverse_frequencies(config, 64)
    plain = 500000.0 ** (-np.arange(32) / 32)
    turns = 8192 * plain / (2 * math.pi)
    assert (found[turns > 4] == plain[turns > 4].astype(np.float32)).all()
    np.testing.assert_allclose(found[turns < 1], plain[turns < 1] / 32, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert list(np.flatnonzero(between)) == [15, 16, 17]
    # Dimension 16: 500000^-0.5 = 1.41421e-3, turns 1.84385, blend 0.281284.
    assert found[16] == pytest.approx(1.41421356e-3 * (0.718716 / 32 + 0.281284), rel=1e-5)


def test_yarn_blends_by_dimension() -> None:
    # H = 16, theta 1000, context 256: dimension i turns 256 * 1000^(-i/8) / (2 pi) times, so the
    # 8 turns of beta_fast are at 8 * ln(256 / (16 pi)) / ln 1000 = 1.885 and the 1 of beta_slow at
    # 4.293. Rounded outwards, 0 to 1 are kept, 5 to 7 divided by 4 and 2 to 4 blended in quarters.
    config = RopeConfig(1000.0, "yarn", 4.0, original_context=256, beta_fast=8.0)
    plain = 1000.0 ** (-np.arange(8) / 8)
    kept = np.array([1, 1, 0.75, 0.5, 0.25, 0, 0, 0])
    found = rope.inverse_frequencies(config, 16)
    np.testing.assert_allclose(found, plain * (kept + (1 - kept) / 4), rtol=1e-6)


def test_the_attention_factor_stretches_the_rotation() -> None:
    positions = jnp.array([0, 3], jnp.int32)
    plain = rope.rotation(RopeConfig(theta=100.0), 4, positions)
    found = rope.rotation(RopeConfig(theta=100.0, attention_factor=1.5), 4, positions)
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours, 1.5 * np.asarray(theirs), rtol=1e-6)


def test_rotation_is_of_each_position() -> None:
    cosine, sine = rope.rotation(RopeConfig(theta=100.0), 4, jnp.array([0, 3], jnp.int32))
    np.testing.assert_allclose(cosine, [[1, math.cos(3)], [1, math.cos(0.3)]], rtol=1e-5)
    np.testing.assert_allclose(sine, [[0, math.sin(3)], [0, math.sin(0.3)]], rtol=1e-5)
