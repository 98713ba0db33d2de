"""A drafter's own, smaller vocabulary: the tokens that it can propose.

At vocabularies of 49 to 256 thousand tokens the head is most of a small drafter's cost, and most of
the text is made of few tokens. A head of only their rows proposes nothing else (FR-Spec, Zhao et
al., arXiv 2502.14856; EAGLE-3's d2t map, arXiv 2503.01840). What is emitted keeps the target's law:
to verification a token outside is one that the drafter gives no chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.errors import InputError, is_list, require, require_integer
from jspec.models.parameters import TransformerParams
from jspec.quantization import Int8Matrix

# Token ids, as a sequence or an array [Vd] of integers.
Vocabulary = Sequence[int] | np.ndarray[Any, Any] | jax.Array


def checked(ids: Vocabulary, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a vocabulary's ids, rising.

    Args:
        ids: in any order.
        vocab_size: V, which the ids lie below.

    Raises:
        InputError: they are no list of ids, none at all, out of range, or one comes twice.
    """
    remedy = f"give distinct token ids of 0..{vocab_size - 1}, as most_frequent returns them"
    require(is_list(ids), "vocabulary", ids, "is no list", remedy)
    array = np.asarray(ids if isinstance(ids, np.ndarray | jax.Array) else list(ids))
    require(array.size > 0, "vocabulary", ids, "is empty", remedy)
    require(
        array.ndim == 1 and np.issubdtype(array.dtype, np.integer),
        "vocabulary",
        ids,
        "is no list of integers",
        remedy,
    )
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        problem = f"is outside the {vocab_size} tokens of the model"
        raise InputError("vocabulary", int(outside[0]), problem, remedy)
    rising, counts = np.unique(array, return_counts=True)
    if len(rising) < len(array):
        again = int(rising[counts > 1][0])
        raise InputError("vocabulary", again, "comes more than once", remedy)
    return rising.astype(np.int32)


def most_frequent(counts: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the ids of the most frequent tokens, rising; of equally frequent ones the lower ids.

    Args:
        counts: [V] numbers of at least 0, how often each token was seen.
        size: how many, 1..V.

    Raises:
        InputError: `counts` is none, or `size` is out of its range.
    """
    counts = np.asarray(counts)
    require(
        counts.ndim == 1 and counts.dtype.kind in "iuf" and bool((counts >= 0).all()),
        "counts",
        counts,
        "is no count for each token",
        "give an array [V] of numbers of at least 0",
    )
    require_integer("size", size)
    require(
        1 <= size <= len(counts),
        "size",
        size,
        f"is outside 1..{len(counts)}",
        "give how many tokens a drafter may propose",
    )
    order = np.argsort(-counts.astype(np.float64), kind="stable")
    return np.sort(order[:size]).astype(np.int32)


def prune(params: TransformerParams, ids: Vocabulary) -> tuple[TransformerParams, jax.Array]:
    """Return a model whose head has only the rows of `ids`, and these [Vd] int32, rising.

    Args:
        params: of V tokens; all but the head is shared, not copied. A head that has only these
            rows is left as it is.
        ids: the vocabulary.

    Raises:
        InputError: as `checked`.
    """
    head = params.embedding if params.head is None else params.head
    kept = jnp.asarray(checked(ids, _rows(params.embedding)))
    if _rows(head) == kept.size:
        return params, kept
    rows = jax.tree.map(lambda leaf: jnp.take(leaf, kept, axis=0), head)
    return dataclasses.replace(params, head=rows), kept


def _rows(matrix: Any) -> int:
    return int((matrix.values if isinstance(matrix, Int8Matrix) else matrix).shape[0])


def spread(logits: jax.Array, vocabulary: jax.Array | None, vocab_size: int) -> jax.Array:
    """Return a drafter's logits over the target's vocabulary; -inf is never proposed.

    Args:
        logits: [..., Vd] float32.
        vocabulary: [Vd] int32, rising, the target's id of each; None where drafter and target
            number them alike, with embeddings that may be padded to different sizes.
        vocab_size: V of the target.

    Returns:
        [..., V].
    """
    if vocabulary is None:
        missing = vocab_size - logits.shape[-1]
        if missing <= 0:
            return logits[..., :vocab_size]
        widths = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
        return jnp.pad(logits, widths, constant_values=-jnp.inf)
    outside = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return outside.at[..., vocabulary].set(
        logits, indices_are_sorted=True, unique_indices=True, mode="drop"
    )
