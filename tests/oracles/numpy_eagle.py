"""EAGLE heads in float64 NumPy, every draft from scratch, as their papers and authors' code say.

Independent of jspec on purpose: weights are the separate matrices of a checkpoint, [out, in], and
nothing is kept from one draft to the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tests.oracles import numpy_llama
from tests.oracles.numpy_llama import Array, rms_norm, rotate_half


@dataclasses.dataclass(frozen=True)
class Head:
    """One head; "eagle" lacks the norms of "eagle3". `layer.input_norm` belongs to `fuse`."""

    kind: str
    fc: Array
    fc_bias: Array | None
    embedding_norm: Array | None
    feature_norm: Array | None
    layer: numpy_llama.Layer
    norm: Array | None
    embedding: Array
    head: Array
    vocabulary: Sequence[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float
    fuse: Array | None = None

    def fused(self, features: Array) -> Array:
        """Return what true features [T, width] are to the layer, [T, D]."""
        if self.kind == "eagle3":
            return self._linear(features)
        if self.fuse is None:
            return features
        d = self.embedding.shape[1]
        *lower, last = np.split(features, features.shape[1] // d, axis=1)
        sizes = [np.sqrt(np.mean(x**2, axis=1, keepdims=True) + self.eps) for x in lower]
        normed = [x / size for x, size in zip(lower, sizes, strict=True)]
        return last + np.concatenate(normed, axis=1) @ self.fuse.T

    def _linear(self, x: Array) -> Array:
        y = x @ self.fc.T
        return y if self.fc_bias is None else y + self.fc_bias

    def run(self, tokens: Sequence[int], features: Array) -> Array:
        """Return the outputs [T, D] of a row's entries, T tokens and as many features [T, D]."""
        embedded = self.embedding[np.asarray(tokens)]
        if self.kind == "eagle3":
            assert self.embedding_norm is not None
            assert self.feature_norm is not None
            x = features
            normed = (
                rms_norm(embedded, self.embedding_norm, self.eps),
                rms_norm(features, self.feature_norm, self.eps),
            )
            h = np.concatenate(normed, axis=-1)
        else:
            x = h = self._linear(np.concatenate([embedded, features], axis=-1))
            if self.fuse is not None:
                h = rms_norm(x, self.layer.input_norm, self.eps)
        count = len(tokens)
        layer, groups = self.layer, self.num_heads // self.num_kv_heads
        q = (h @ layer.q.T).reshape(count, self.num_heads, -1)
        k = (h @ layer.k.T).reshape(count, self.num_kv_heads, -1)
        v = (h @ layer.v.T).reshape(count, self.num_kv_heads, -1)
        angle = np.arange(count)[:, None] * numpy_llama.inverse_frequencies(
            self.theta, self.head_dim, None
        )
        angle = np.concatenate([angle, angle], axis=-1)[:, None]
        q = q * np.cos(angle) + rotate_half(q) * np.sin(angle)
        k = k * np.cos(angle) + rotate_half(k) * np.sin(angle)
        mixed = np.empty_like(q)
        for head in range(self.num_heads):
            score = q[:, head] @ k[:, head // groups].T / math.sqrt(self.head_dim)
            score[np.triu_indices(count, 1)] = -np.inf
            weight = np.exp(score - score.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            mixed[:, head] = weight @ v[:, head // groups]
        x = x + mixed.reshape(count, -1) @ layer.o.T
        h = rms_norm(x, layer.post_norm, self.eps)
        gate = h @ layer.gate.T
        return x + (gate / (1 + np.exp(-gate)) * (h @ layer.up.T)) @ layer.down.T

    def logits(self, output: Array, vocab_size: int) -> Array:
        """Return the logits [V] after one entry, -inf at what the head can't propose."""
        if self.norm is not None:
            output = rms_norm(output, self.norm, self.eps)
        logits = np.full(vocab_size, -np.inf)
        logits[np.asarray(self.vocabulary)] = self.head @ output
        return logits

    def after(
        self, tokens: Sequence[int], features: Array, drafts: Sequence[int], vocab_size: int
    ) -> Array:
        """Return the logits [V] of the token after a row's n tokens and some drafts.

        Args:
            tokens: n committed ones, of which the target has run n - 1.
            features: [n - 1, width], the target's, of those.
            drafts: tokens after the committed ones.
            vocab_size: V.
        """
        entered = self.fused(features)
        following = list(tokens[1:])
        output = self.run(following, entered)[-1]
        for draft in drafts:
            # No true features of a draft are known: the output before stands for them.
            entered = np.concatenate([entered, output[None]])
            following.append(draft)
            output = self.run(following, entered)[-1]
        return self.logits(output, vocab_size)
