"""Attention of tree nodes written out in float64, node by node, and what to try it on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

Ancestors = list[list[int]]


def pack(parents: list[int]) -> tuple[np.ndarray, Ancestors]:
    """Return the packed ancestor-or-self bits and each node's ancestors as a list."""
    lists: Ancestors = []
    for node, parent in enumerate(parents):
        lists.append([node] if parent < 0 else [*lists[parent], node])
    words = -(-len(parents) // 32)
    packed = np.zeros((len(parents), words), np.uint32)
    for node, ancestors in enumerate(lists):
        for other in ancestors:
            packed[node, other // 32] |= np.uint32(1 << (other % 32))
    return packed, lists


def by_hand(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    prefix: list[int],
    ancestors: Ancestors,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    batch, nodes, heads, head_dim = query.shape
    per = heads // keys.shape[1]
    out = np.zeros(query.shape, np.float64)
    for b in range(batch):
        for t in range(nodes):
            # The path lies at the positions after the prefix, in order, wherever its slots are.
            slots = [*range(prefix[b]), *(prefix[b] + a for a in ancestors[t])]
            slots = slots if window is None else slots[-window:]
            for n in range(heads):
                k = keys[b, n // per, slots].astype(np.float64)
                score = k @ query[b, t, n].astype(np.float64)
                score = score * (1 / math.sqrt(head_dim) if scale is None else scale)
                score = score if softcap is None else softcap * np.tanh(score / softcap)
                weight = np.exp(score - score.max())
                v = values[b, n // per, slots].astype(np.float64)
                out[b, t, n] = weight @ v / weight.sum()
    return out


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A random call. Stale slots, and pages that no row has, hold `stale`.

    Attributes:
        query: [B, T, N, H].
        keys: [B, G, S, H].
        values: [B, G, S, H].
        prefix: of each row.
        packed: [B, T, W] ancestor bits, a tree of its own for each row.
        trees: the same as lists.
    """

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    prefix: list[int]
    packed: np.ndarray
    trees: list[Ancestors]

    def arguments(self, page: int | None = None, seed: int = 0) -> dict[str, Any]:
        """The op's operands, with the cache cut into shuffled pages or contiguous."""
        arrays = {"query": self.query, "keys": self.keys, "values": self.values}
        if page is not None:
            batch, groups, slots, head_dim = self.keys.shape
            count = slots // page
            order = np.random.default_rng(seed).permutation(batch * count + 3)
            table = order[: batch * count].reshape(batch, count).astype(np.int32)
            for side in ("keys", "values"):
                pool = np.empty((batch * count + 3, groups, page, head_dim), self.keys.dtype)
                pool[:] = arrays[side][0, 0, -1, 0]
                paged = arrays[side].reshape(batch, groups, count, page, head_dim)
                pool[table] = paged.transpose(0, 2, 1, 3, 4)
                arrays[side] = pool
            for row, first in enumerate(self.prefix):
                # What a table holds past the pages in use must not matter.
                table[row, -(-(first + self.query.shape[1]) // page) :] = 2**30
            arrays["block_table"] = table
        arrays["prefix_length"] = np.array(self.prefix, np.int32)
        arrays["ancestors"] = self.packed
        return {name: jnp.asarray(array) for name, array in arrays.items()}

    def expected(self, **settings: Any) -> np.ndarray:
        """The float64 result."""
        rows = [
            by_hand(
                self.query[one],
                self.keys[one],
                self.values[one],
                [first],
                tree,
                **settings,
            )
            for one, first, tree in zip(
                (slice(b, b + 1) for b in range(len(self.prefix))),
                self.prefix,
                self.trees,
                strict=True,
            )
        ]
        return np.concatenate(rows)


def draw_inputs(
    seed: int,
    prefix: list[int],
    *,
    nodes: int,
    heads: int,
    groups: int,
    slots: int,
    head_dim: int,
    dtype: Any,
    stale: float,
) -> Inputs:
    """Draw a call from a seed: normal entries, random trees."""
    rng = np.random.default_rng(seed)
    batch = len(prefix)
    query = rng.normal(size=(batch, nodes, heads, head_dim)).astype(dtype)
    keys = rng.normal(size=(batch, groups, slots, head_dim)).astype(dtype)
    values = rng.normal(size=(batch, groups, slots, head_dim)).astype(dtype)
    trees = []
    for row, first in enumerate(prefix):
        keys[row, :, first + nodes :] = stale
        values[row, :, first + nodes :] = stale
        # Some trees deep, some wide.
        reach = int(rng.choice([1, 3, nodes]))
        parents = [int(rng.integers(max(0, node - reach), node)) for node in range(1, nodes)]
        trees.append(pack([-1, *parents]))
    return Inputs(
        query, keys, values, prefix, np.stack([t[0] for t in trees]), [t[1] for t in trees]
    )
