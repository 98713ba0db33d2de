"""Changes of the logits that depend on the text so far: bias, penalties, forbidden tokens.

They come before temperature and truncation (`jspec.sampling`) and hold at every node of a round.
The drafts on the way to a node are its history as committed tokens are, without a count of every
token at every node: base counts [B, V] are corrected at the few tokens of the node's path.

Order: logit_bias; repetition penalty; frequency and presence penalties; bad words and the stop
tokens that min_new_tokens holds back. What no row of a batch asks for is None and not compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.sampling_params import SamplingParams
from pallas_kernels.rejection_sampling import Bias as Bias
from pallas_kernels.rejection_sampling import Penalties as Penalties


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BadWords:
    """Token sequences that must not be completed.

    Attributes:
        prefixes: [B, M, L - 1] int32, right-aligned; -1 is padding and matches everything.
        last: [B, M] int32, the token that a matching prefix forbids; V is padding.
    """

    prefixes: jax.Array
    last: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Minimum:
    """Stop tokens that are held back.

    Attributes:
        tokens: [B, K] int32; V is padding.
        until: [B] int32, committed length below which they are forbidden.
    """

    tokens: jax.Array
    until: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Edits:
    """What a batch asks for; None where no row does."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    bad_words: BadWords | None = None
    minimum: Minimum | None = None


@dataclasses.dataclass(frozen=True)
class RowEdits:
    """What one request asks for.

    Attributes:
        params: of the request.
        prompt: its token ids.
        bad_words: its bad words as token ids.
        stop_ids: all ids that end it.
    """

    params: SamplingParams
    prompt: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    stop_ids: Sequence[int] = ()


def rows(requests: Sequence[RowEdits], vocab_size: int) -> Edits:
    """Stack what requests ask for into arrays; sizes are rounded up to powers of two."""
    params = [request.params for request in requests]
    return Edits(
        bias=_bias(params, vocab_size) if any(p.logit_bias for p in params) else None,
        penalties=_penalties(requests, vocab_size) if any(map(_penalised, params)) else None,
        bad_words=_bad_words(requests, vocab_size) if any(r.bad_words for r in requests) else None,
        minimum=_minimum(requests, vocab_size) if any(p.min_new_tokens for p in params) else None,
    )


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def _width(counts: Sequence[int]) -> int:
    return 1 << max(max(counts) - 1, 0).bit_length()


def _bias(params: Sequence[SamplingParams], vocab_size: int) -> Bias:
    pairs = [dict(p.bias_pairs) for p in params]
    shape = (len(params), _width([len(p) for p in pairs]))
    tokens, values = np.full(shape, vocab_size, np.int32), np.zeros(shape, np.float32)
    for row, given in enumerate(pairs):
        tokens[row, : len(given)] = list(given)
        values[row, : len(given)] = list(given.values())
    return Bias(tokens=jnp.asarray(tokens), values=jnp.asarray(values))


def _penalties(requests: Sequence[RowEdits], vocab_size: int) -> Penalties:
    def column(name: str) -> jax.Array:
        return jnp.asarray(np.array([getattr(r.params, name) for r in requests], np.float32))

    in_prompt = np.zeros((len(requests), vocab_size), bool)
    for row, request in enumerate(requests):
        in_prompt[row, list(request.prompt)] = True
    return Penalties(
        repetition=column("repetition_penalty"),
        frequency=column("frequency_penalty"),
        presence=column("presence_penalty"),
        in_prompt=jnp.asarray(in_prompt),
        generated=jnp.zeros((len(requests), vocab_size), jnp.int32),
    )


def _bad_words(requests: Sequence[RowEdits], vocab_size: int) -> BadWords:
    count = _width([len(r.bad_words) for r in requests])
    length = _width([len(word) for r in requests for word in r.bad_words])
    prefixes = np.full((len(requests), count, length - 1), -1, np.int32)
    last = np.full((len(requests), count), vocab_size, np.int32)
    for row, request in enumerate(requests):
        for index, word in enumerate(request.bad_words):
            prefixes[row, index, length - len(word) :] = word[:-1]
            last[row, index] = word[-1]
    return BadWords(prefixes=jnp.asarray(prefixes), last=jnp.asarray(last))


def _minimum(requests: Sequence[RowEdits], vocab_size: int) -> Minimum:
    stops = [r.stop_ids if r.params.min_new_tokens else () for r in requests]
    tokens = np.full((len(requests), _width([len(s) for s in stops])), vocab_size, np.int32)
    for row, ids in enumerate(stops):
        tokens[row, : len(ids)] = ids
    most = np.iinfo(np.int32).max  # no row gets as long
    until = [min(len(r.prompt) + r.params.min_new_tokens, most) for r in requests]
    return Minimum(tokens=jnp.asarray(tokens), until=jnp.asarray(np.array(until, np.int32)))


def apply(
    edits: Edits, logits: jax.Array, tokens: jax.Array, length: jax.Array, paths: jax.Array
) -> jax.Array:
    """Return the edited logits.

    Args:
        edits: of the rows.
        logits: [B, K, V] float32 of K nodes.
        tokens: [B, S] int32, prompt and committed tokens.
        length: [B] int32, committed tokens.
        paths: [B, K, J] int32, the drafts from the pending token (without it) to each node (with
            it) in order, then -1.
    """
    if edits.bias is not None:
        logits = _add(logits, edits.bias)
    if edits.penalties is not None:
        logits = _penalise(logits, edits.penalties, paths)
    banned = forbidden(edits, tokens, length, paths, logits.shape[-1])
    if banned is not None:
        logits = logits.at[(*_grid(banned.shape), banned)].set(-jnp.inf, mode="drop")
    return logits


def forbidden(
    edits: Edits, tokens: jax.Array, length: jax.Array, paths: jax.Array, vocab_size: int
) -> jax.Array | None:
    """Return the tokens that bad words and held-back stops forbid at each node.

    Args:
        edits: of the rows.
        tokens: as `apply`.
        length: as `apply`.
        paths: as `apply`.
        vocab_size: V.

    Returns:
        [B, K, F] int32; V is padding. None where no row forbids any.
    """
    banned = []
    if edits.bad_words is not None:
        banned.append(_completions(edits.bad_words, tokens, length, paths, vocab_size))
    if edits.minimum is not None:
        minimum = edits.minimum
        early = length[:, None] + _depths(paths) < minimum.until[:, None]
        banned.append(jnp.where(early[..., None], minimum.tokens[:, None, :], vocab_size))
    return jnp.concatenate(banned, axis=-1) if banned else None


def commit(edits: Edits, tokens: jax.Array, count: jax.Array) -> Edits:
    """Take in each row's first `count` ([B] int32) of the [B, J] committed tokens."""
    penalties = edits.penalties
    if penalties is None:
        return edits
    row = jnp.broadcast_to(jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None], tokens.shape)
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    kept = jnp.where(position < count[:, None], tokens, penalties.generated.shape[1])
    generated = penalties.generated.at[row, kept].add(1, mode="drop")
    return dataclasses.replace(edits, penalties=dataclasses.replace(penalties, generated=generated))


def _depths(paths: jax.Array) -> jax.Array:
    """Return [B, K] int32: drafts on the way to each node."""
    return jnp.sum(paths >= 0, axis=-1, dtype=jnp.int32)


def _grid(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return row and node of every entry of a [B, K, J] array."""
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return row, jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _add(logits: jax.Array, bias: Bias) -> jax.Array:
    row = jnp.broadcast_to(jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None], bias.tokens.shape)
    dense = jnp.zeros((logits.shape[0], logits.shape[2]), jnp.float32)
    dense = dense.at[row, bias.tokens].add(bias.values, mode="drop")
    return logits + dense[:, None, :]


def _penalise(logits: jax.Array, penalties: Penalties, paths: jax.Array) -> jax.Array:
    repetition, frequency, presence = (
        array[:, None, None]
        for array in (penalties.repetition, penalties.frequency, penalties.presence)
    )

    def penalised(scores: jax.Array, seen: jax.Array, count: jax.Array) -> jax.Array:
        by_sign = jnp.where(scores > 0, scores / repetition, scores * repetition)
        scores = jnp.where(seen, by_sign, scores)
        times = count.astype(jnp.float32)
        return scores - frequency * times - presence * jnp.minimum(times, 1.0)

    base = penalties.generated
    known = penalties.in_prompt | (base > 0)
    edited = penalised(logits, known[:, None, :], base[:, None, :])
    if paths.shape[-1] == 0:
        return edited
    # The tokens of a node's own path, which the base counts lack. A token that is on it twice is
    # written twice, with the same value.
    inside = jnp.maximum(paths, 0)
    flat = inside.reshape(inside.shape[0], -1)
    count = jnp.take_along_axis(base, flat, axis=1).reshape(inside.shape)
    same = (paths[..., :, None] == paths[..., None, :]) & (paths >= 0)[..., None, :]
    count = count + jnp.sum(same, axis=-1, dtype=jnp.int32)
    own = penalised(jnp.take_along_axis(logits, inside, axis=2), jnp.bool_(True), count)
    target = jnp.where(paths >= 0, paths, logits.shape[-1])
    return edited.at[(*_grid(paths.shape), target)].set(own, mode="drop")


def _completions(
    bad_words: BadWords, tokens: jax.Array, length: jax.Array, paths: jax.Array, vocab_size: int
) -> jax.Array:
    """Return [B, K, M] int32: the token that each bad word forbids at each node, or V."""
    back = bad_words.prefixes.shape[-1]
    offset = jnp.arange(-back, 0, dtype=jnp.int32)
    # Place of each of the last tokens: below 0 in the committed text, else along the path.
    place = _depths(paths)[..., None] + offset[None, None, :]
    slot = length[:, None, None] + place
    flat = jnp.clip(slot, 0, tokens.shape[1] - 1).reshape(slot.shape[0], -1)
    committed = jnp.take_along_axis(tokens, flat, axis=1).reshape(slot.shape)
    recent = jnp.where(slot < 0, -2, committed)
    if paths.shape[-1] > 0:
        along = jnp.take_along_axis(paths, jnp.maximum(place, 0), axis=2, mode="clip")
        recent = jnp.where(place >= 0, along, recent)
    prefixes = bad_words.prefixes[:, None]
    match = jnp.all((prefixes == -1) | (prefixes == recent[:, :, None, :]), axis=-1)
    return jnp.where(match, bad_words.last[:, None, :], vocab_size)
