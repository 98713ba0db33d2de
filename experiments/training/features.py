"""What the target makes of a text: features at every token, kept on disk for training.

A shard of features belongs to a shard of text. Rows lie one after another without padding.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.flax import save_file

from experiments.training.text import Text
from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.model import Model
from jspec.models.transformer import Transformer

_PARTIAL = ".partial"
# Columns of a pass: wide enough for fast products.
_COLUMNS = 2048
_WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Features:
    """A shard: conversations, and what the target makes of each of their M tokens.

    Attributes:
        tokens: [M] int32, row after row.
        start: [N] int32, where each row begins.
        length: [N] int32, tokens of each row.
        answer: [N] int32, where in its row the answer begins.
        layers: [M, F * D] bfloat16, outputs of the layers asked for, side by side.
        final: [M, D] bfloat16, the normed output, which the target's head reads.
        log_z: [M] float32, log of the sum of exponentials of the target's logits.
        best: [M] int32, the target's most probable next token.
    """

    tokens: np.ndarray
    start: np.ndarray
    length: np.ndarray
    answer: np.ndarray
    layers: np.ndarray
    final: np.ndarray
    log_z: np.ndarray
    best: np.ndarray

    @property
    def total(self) -> int:
        """M."""
        return len(self.tokens)


@functools.partial(jax.jit, static_argnames=("target", "layers"), donate_argnames="cache")
def _run(
    target: Transformer,
    layers: tuple[int, ...],
    params: Any,
    tokens: jax.Array,
    cache: KVCache,
) -> tuple[tuple[jax.Array, ...], KVCache]:
    """Run [B, W] tokens; return layers, final, log_z and best, rows first, and the cache."""
    batch, width = tokens.shape
    hidden, cache, outputs = target.forward(params, tokens, cache, trees.chain(width - 1), layers)
    logits = target.logits(params, hidden)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    fused = jnp.concatenate(outputs, axis=0).T.astype(jnp.bfloat16)
    final = hidden.T.astype(jnp.bfloat16)
    cache = kv.commit(cache, jnp.full(batch, width, jnp.int32))
    return (fused, final, log_z, best), cache


def extract(target: Model, text: Text, layers: tuple[int, ...]) -> Features:
    """Return the features of a shard of text.

    Args:
        target: the model.
        text: tokens of N rows.
        layers: target layers whose outputs are kept.
    """
    order = np.argsort(-text.length, kind="stable")
    at_once = max(1, _COLUMNS // _WIDTH)
    parts: dict[int, tuple[np.ndarray, ...]] = {}
    for begin in range(0, len(order), at_once):
        rows = order[begin : begin + at_once]
        for row, part in zip(rows, _of_rows(target, text, rows, at_once, layers), strict=True):
            parts[int(row)] = part
    layer, final, log_z, best = (
        np.concatenate([parts[row][place] for row in range(len(order))]) for place in range(4)
    )
    length = text.length.astype(np.int32)
    start = (np.cumsum(length) - length).astype(np.int32)
    tokens = np.concatenate(
        [row[:count] for row, count in zip(text.tokens, length, strict=True)]
    ).astype(np.int32)
    return Features(tokens, start, length, text.answer, layer, final, log_z, best)


def _of_rows(
    target: Model, text: Text, rows: np.ndarray, at_once: int, layers: tuple[int, ...]
) -> list[tuple[np.ndarray, ...]]:
    """Return, for each of some rows of similar length, what `_run` gives at its tokens."""
    longest = int(text.length[rows].max())
    steps = -(-longest // _WIDTH)
    tokens = np.zeros((at_once, steps * _WIDTH), np.int32)
    width = min(tokens.shape[1], text.tokens.shape[1])
    tokens[: len(rows), :width] = text.tokens[rows, :width]
    functions = target.functions
    cache = functions.init_cache(at_once, steps * _WIDTH, target.cache_dtype)
    found: list[tuple[np.ndarray, ...]] = []
    for step in range(steps):
        chunk = jnp.asarray(tokens[:, step * _WIDTH : (step + 1) * _WIDTH])
        outputs, cache = _run(functions, layers, target.params, chunk, cache)
        found.append(
            tuple(
                np.asarray(output).reshape(at_once, _WIDTH, *output.shape[1:]) for output in outputs
            )
        )
    whole = [np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)]
    return [
        tuple(part[place, : text.length[row]] for part in whole) for place, row in enumerate(rows)
    ]


def write(path: Path, features: Features) -> None:
    """Write a shard; it has its name only when it is whole."""
    partial = path.with_name(path.name + _PARTIAL)
    arrays = {name: jnp.asarray(value) for name, value in vars(features).items()}
    save_file(arrays, partial)
    partial.replace(path)


def read(path: Path) -> Features:
    """Read a shard."""
    with safe_open(path, "flax") as file:
        arrays = {field.name: np.asarray(file.get_tensor(field.name)) for field in _FIELDS}
    assert arrays["final"].dtype == ml_dtypes.bfloat16
    return Features(**arrays)


_FIELDS = dataclasses.fields(Features)
