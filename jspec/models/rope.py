"""Rotary position embedding (Su et al., arXiv 2104.09864), half-rotation layout."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Return [head_dim / 2] float32 radians a position, after the family's scaling rule.

    The "llama3" rule is that of Llama 3.1: wavelengths longer than original_context /
    low_freq_factor are stretched by `factor`, those shorter than original_context /
    high_freq_factor are kept, and those between are blended linearly in original_context /
    wavelength. The "yarn" rule (Peng et al., arXiv 2309.00071) keeps the dimensions that turn more
    than beta_fast times within original_context, divides those that turn less than beta_slow times
    by `factor`, and blends those between linearly in the dimension's index.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequency = config.theta**-exponent
    if config.scaling == "linear":
        frequency = frequency / config.factor
    elif config.scaling == "llama3":
        wavelength = 2 * math.pi / frequency
        ratio = config.original_context / wavelength
        blend = (ratio - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        blend = np.clip(blend, 0.0, 1.0)
        frequency = (1 - blend) * frequency / config.factor + blend * frequency
    elif config.scaling == "yarn":
        low = max(math.floor(_dimension(config, head_dim, config.beta_fast)), 0)
        high = min(math.ceil(_dimension(config, head_dim, config.beta_slow)), head_dim - 1)
        blend = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        frequency = (1 - blend) * frequency + blend * frequency / config.factor
    return frequency.astype(np.float32)


def _dimension(config: RopeConfig, head_dim: int, turns: float) -> float:
    """Return the index, not whole, of the frequency that turns so often in original_context."""
    wavelength = config.original_context / turns
    return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))


def rotation(
    config: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cosine and sine of each position's angles.

    Args:
        config: base and scaling.
        head_dim: H.
        positions: [rows] int32.

    Returns:
        Two [H / 2, rows] float32 arrays, with the attention factor in them.
    """
    frequency = jnp.asarray(inverse_frequencies(config, head_dim))
    angle = frequency[:, None] * positions.astype(jnp.float32)[None, :]
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    if config.attention_factor == 1:
        return cosine, sine
    factor = jnp.float32(config.attention_factor)
    return cosine * factor, sine * factor
