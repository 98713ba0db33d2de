"""Typical acceptance (Cai et al. 2024, Medusa, arXiv 2401.10774): lossy.

A draft x is accepted where the target gives it p(x) > min(epsilon, delta exp(-H(p))), p being the
target's distribution after the row's transforms and H its entropy in nats. No coin is drawn, what
the drafts were drawn from is not asked, and the token after the accepted ones is drawn from p
itself. More is accepted than by any lossless rule, and the output no longer has the target's law.

A greedy row's p is a point mass: the argmax alone is accepted, as by every other rule, and its
tokens are those of plain decoding.

Of a tree the longest accepted path is taken; of several the most probable one, then the first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.config import TypicalAcceptance

DEFAULT = TypicalAcceptance()


def thresholds(log_p: jax.Array, rule: TypicalAcceptance) -> jax.Array:
    """Return what p of a draft must exceed, min(epsilon, delta exp(-H(p))).

    Args:
        log_p: [..., V] float32, log probabilities; -inf outside the support.
        rule: its parameters.

    Returns:
        [...] float32.
    """
    p = jnp.exp(log_p)
    surprise = jnp.where(p > 0, p * log_p, 0.0)
    bound = jnp.float32(rule.delta) * jnp.exp(jnp.sum(surprise, axis=-1))
    return jnp.minimum(jnp.float32(rule.epsilon), bound)
