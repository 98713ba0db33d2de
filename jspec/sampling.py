"""The one transform pipeline from logits to the distribution that tokens are drawn from.

Every place that needs a distribution (drafts, every verified node, the bonus token) calls
`jspec.edits.apply` and then `log_probs`; plain decoding is no exception. Order here: temperature,
top-k, top-p, min-p, each on what the one before left. The top-k and top-p thresholds are found by
bisection on the bits of the floats, which needs no sort of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.edits import Edits
from jspec.randomness import gumbels
from jspec.sampling_params import SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of a batch, one entry a row; see `SamplingParams`.

    Attributes:
        temperature: [B] float32; 0 is greedy.
        top_k: [B] int32; 0 keeps all.
        top_p: [B] float32; 1 keeps all.
        min_p: [B] float32; 0 keeps all.
        edits: bias, penalties and forbidden tokens, which come before all of these.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    edits: Edits = dataclasses.field(default_factory=Edits)


def rows(params: Sequence[SamplingParams], edits: Edits | None = None) -> RowSampling:
    """Stack requests' parameters into arrays; `edits` are made by `jspec.edits.rows`."""
    most = np.iinfo(np.int32).max  # a top_k beyond it keeps all as well
    return RowSampling(
        temperature=jnp.asarray(np.array([p.temperature for p in params], np.float32)),
        top_k=jnp.asarray(np.array([min(p.top_k, most) for p in params], np.int32)),
        top_p=jnp.asarray(np.array([p.top_p for p in params], np.float32)),
        min_p=jnp.asarray(np.array([p.min_p for p in params], np.float32)),
        edits=edits or Edits(),
    )


def is_greedy(sampling: RowSampling) -> jax.Array:
    """Return [B] bool: rows decoded by argmax. The one predicate everything asks."""
    return sampling.temperature == 0


def best(scores: jax.Array) -> jax.Array:
    """Return [...] int32, the place of the largest of scores [..., V]; of the first NaN, if any.

    The maximum, then the first place that has it: XLA:CPU's argmax is three times as slow.
    """
    size = scores.shape[-1]
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    place = jnp.where(scores == largest, place, jnp.where(scores != scores, place - size, size))
    first = jnp.min(place, axis=-1)
    return jnp.where(first < 0, first + size, first)


def _from_order(order: jax.Array) -> jax.Array:
    """Map uint32 to the float32 of that place in the order of all floats."""
    top = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(order >= top, order ^ top, ~order), jnp.float32)


def _largest_threshold(
    holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """Return the largest float32 threshold of at most 0 for which `holds`, bit by bit.

    Args:
        holds: from thresholds to bools of the same shape; true at -inf, never true again once
            false as thresholds rise.
        shape: of the thresholds.
    """
    lowest = jnp.uint32(0x007FFFFF)  # the place of -inf; what lies below are NaNs

    def step(index: jax.Array, found: jax.Array) -> jax.Array:
        bit = jnp.left_shift(jnp.uint32(1), jnp.uint32(31) - index.astype(jnp.uint32))
        candidate = found | bit
        known = (candidate <= lowest) | holds(_from_order(candidate))
        return jnp.where(known & (candidate <= jnp.uint32(1 << 31)), candidate, found)

    order = jax.lax.fori_loop(0, 32, step, jnp.zeros(shape, jnp.uint32))
    return _from_order(jnp.maximum(order, lowest))


def _top_k(scores: jax.Array, sampling: RowSampling) -> jax.Array:
    """Keep the k best of scores [B, K, V] whose maximum is 0; -inf outside."""
    vocab = scores.shape[-1]
    count = jnp.where(sampling.top_k == 0, vocab, jnp.minimum(sampling.top_k, vocab))
    wanted = jnp.broadcast_to(count[:, None], scores.shape[:2])

    def enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(scores >= threshold[..., None], axis=-1, dtype=jnp.int32) >= wanted

    kept = scores >= _largest_threshold(enough, scores.shape[:2])[..., None]
    return jnp.where(kept, scores, -jnp.inf)


def _top_p(scores: jax.Array, sampling: RowSampling) -> jax.Array:
    """Keep the smallest set of best scores whose mass reaches top_p, as `_top_k`."""
    weight = jnp.exp(scores)
    mass = sampling.top_p[:, None] * jnp.sum(weight, axis=-1)

    def covers(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(scores >= threshold[..., None], weight, 0.0), axis=-1) >= mass

    inside = scores >= _largest_threshold(covers, scores.shape[:2])[..., None]
    # A row that asks for everything must not lose its tail to the rounding of the sum, nor one
    # whose top_p is too small for a float32 product lose its best token.
    inside |= (sampling.top_p >= 1)[:, None, None] | (scores == 0)
    return jnp.where(inside, scores, -jnp.inf)


def _point_mass(scores: jax.Array, logits: jax.Array, greedy: jax.Array) -> jax.Array:
    """Put all mass of the greedy rows on their argmax."""
    is_best = (
        jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :] == best(logits)[..., None]
    )
    return jnp.where(greedy, jnp.where(is_best, jnp.float32(0), -jnp.inf), scores)


def _apply_if(
    wanted: jax.Array, transform: Callable[[jax.Array], jax.Array], scores: jax.Array
) -> jax.Array:
    """Transform the scores only where some row asks for it: the searches are not free."""
    return jax.lax.cond(wanted, transform, lambda s: s, scores)


def usable(logits: jax.Array) -> jax.Array:
    """Return whether logits [..., V] define a distribution: no NaN, no +inf, not all -inf.

    Compared one by one: XLA's maximum on CPU loses a NaN once the vocabulary is large.
    """
    return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)


def log_probs(logits: jax.Array, sampling: RowSampling) -> jax.Array:
    """Return the log of the distribution that each node's token is drawn from.

    A greedy row's is a point mass: 0 at the argmax (lowest id on exact ties), -inf elsewhere.

    Args:
        logits: [B, K, V] float32, edited; -inf is allowed, NaN is not.
        sampling: of the B rows.

    Returns:
        [B, K, V] float32, normalised; -inf outside the support.
    """
    greedy = is_greedy(sampling)[:, None, None]
    # The maximum is subtracted before dividing, so a tiny temperature cannot overflow.
    temperature = jnp.where(greedy, jnp.float32(1), sampling.temperature[:, None, None])
    scores = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature

    scores = _apply_if(jnp.any(sampling.top_k > 0), lambda s: _top_k(s, sampling), scores)
    scores = _apply_if(jnp.any(sampling.top_p < 1), lambda s: _top_p(s, sampling), scores)
    scores = jnp.where(scores >= jnp.log(sampling.min_p)[:, None, None], scores, -jnp.inf)
    # The best score is 0, so the sum cannot overflow.
    scores = scores - jnp.log(jnp.sum(jnp.exp(scores), axis=-1, keepdims=True))
    return _apply_if(jnp.any(greedy), lambda s: _point_mass(s, logits, greedy), scores)


def draw(log_p: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw one token a row by the Gumbel-max trick.

    Args:
        log_p: [B, V] float32, up to a constant a row; -inf is never drawn.
        keys: [B] typed keys.

    Returns:
        [B] int32.
    """
    return best(log_p + gumbels(keys, log_p.shape[-1]))
