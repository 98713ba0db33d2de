"""Llama in float64 NumPy, one sequence at a time, as Hugging Face transformers defines it.

Independent of jspec on purpose: weights are the separate matrices of a checkpoint, [out, in].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True)
class Layer:
    input_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    post_norm: Array
    gate: Array
    up: Array
    down: Array
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None


@dataclasses.dataclass
class Cache:
    """Keys and values so far, one [G, length, H] array a layer and side."""

    keys: list[Array]
    values: list[Array]

    @property
    def length(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0


@dataclasses.dataclass(frozen=True)
class Llama:
    """`rope_scaling` is the dictionary of a Hugging Face config; `head` None ties the embedding."""

    embedding: Array
    layers: Sequence[Layer]
    norm: Array
    head: Array | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    rope_scaling: Mapping[str, Any] | None = None

    def run(
        self, tokens: Sequence[int] | np.ndarray, cache: Cache | None = None
    ) -> tuple[Array, list[Array]]:
        """Return logits [T, V] and each layer's residual output [T, D]; append to `cache`."""
        cache = Cache([], []) if cache is None else cache
        start = cache.length
        positions = np.arange(start, start + len(tokens))
        angle = positions[:, None] * inverse_frequencies(
            self.theta, self.head_dim, self.rope_scaling
        )
        angle = np.concatenate([angle, angle], axis=-1)  # [T, H]
        cosine, sine = np.cos(angle)[:, None], np.sin(angle)[:, None]
        x = self.embedding[np.asarray(tokens)]
        residuals = []
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer.input_norm, self.eps)
            q = _heads(h, layer.q, layer.q_bias, self.num_heads)
            k = _heads(h, layer.k, layer.k_bias, self.num_kv_heads)
            v = _heads(h, layer.v, layer.v_bias, self.num_kv_heads)
            q = q * cosine + rotate_half(q) * sine
            k = k * cosine + rotate_half(k) * sine
            k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
            if start:
                k = np.concatenate([cache.keys[index], k], axis=1)
                v = np.concatenate([cache.values[index], v], axis=1)
                cache.keys[index], cache.values[index] = k, v
            else:
                cache.keys.append(k)
                cache.values.append(v)
            x = x + self._attend(q, k, v, positions) @ layer.o.T
            h = rms_norm(x, layer.post_norm, self.eps)
            gate = h @ layer.gate.T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.up.T)) @ layer.down.T
            residuals.append(x)
        head = self.embedding if self.head is None else self.head
        return rms_norm(x, self.norm, self.eps) @ head.T, residuals

    def _attend(self, q: Array, k: Array, v: Array, positions: np.ndarray) -> Array:
        groups = self.num_heads // self.num_kv_heads
        out = np.empty_like(q)  # [T, N, H]
        future = np.arange(k.shape[1])[None, :] > positions[:, None]
        for head in range(self.num_heads):
            score = q[:, head] @ k[head // groups].T / math.sqrt(self.head_dim)
            score[future] = -np.inf
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            out[:, head] = weight / weight.sum(axis=-1, keepdims=True) @ v[head // groups]
        return out.reshape(len(q), -1)

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Return `count` greedy tokens and, for each, the best minus the second best logit."""
        cache = Cache([], [])
        logits = self.run(prompt, cache)[0][-1]
        tokens: list[int] = []
        gaps: list[float] = []
        while True:
            second, best = np.argsort(logits)[-2:]
            tokens.append(int(best))
            gaps.append(float(logits[best] - logits[second]))
            if len(tokens) == count:
                return tokens, gaps
            logits = self.run(tokens[-1:], cache)[0][-1]


def _heads(x: Array, weight: Array, bias: Array | None, heads: int) -> Array:
    y: Array = x @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(len(x), heads, -1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotate_half(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def inverse_frequencies(theta: float, head_dim: int, scaling: Mapping[str, Any] | None) -> Array:
    """`transformers.modeling_rope_utils`: default, linear and llama3."""
    plain = [1.0 / theta ** (i / head_dim) for i in range(0, head_dim, 2)]
    if scaling is None:
        return np.array(plain)
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return np.array([f / factor for f in plain])
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    result = []
    for f in plain:
        wavelength = 2 * math.pi / f
        if wavelength < context / high:
            result.append(f)
        elif wavelength > context / low:
            result.append(f / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            result.append((1 - smooth) * f / factor + smooth * f)
    return np.array(result)
