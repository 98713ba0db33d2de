"""Random cases of rejection sampling, and the decision written out in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rejection_sampling import Bias, Drafts, Penalties, Transforms
from pallas_kernels.rejection_sampling.inputs import Drawn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Case:
    logits: jax.Array
    transforms: Transforms
    drafts: Drafts
    coins: jax.Array
    noises: jax.Array  # [B, T, V], of every node; the op is given one node's

    def noise(self) -> Callable[[jax.Array], jax.Array]:
        return lambda node: self.noises[jnp.arange(node.shape[0]), node]


def packed(dense: np.ndarray) -> np.ndarray:
    """Pack bools along the last axis into uint32 words, lowest bit first."""
    words = -(-dense.shape[-1] // 32)
    padded = np.zeros((*dense.shape[:-1], words * 32), np.uint64)
    padded[..., : dense.shape[-1]] = dense
    bits = padded.reshape(*dense.shape[:-1], words, 32) << np.arange(32, dtype=np.uint64)
    return bits.sum(axis=-1).astype(np.uint32)


def ways(parents: list[int]) -> list[list[int]]:
    """Nodes from the root (without it) to each node (with it)."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([] if parent < 0 else [*found[parent], node])
    return found


def ancestors(parents: list[int]) -> np.ndarray:
    dense = np.zeros((len(parents), len(parents)), bool)
    for node, way in enumerate(ways(parents)):
        dense[node, [0, *way]] = True
    return packed(dense)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a case contains."""

    law: bool = False
    drawn: Drawn = "chain"  # from the law
    tree: bool = False
    own: bool = False  # a tree a row
    bias: bool = False
    penalties: bool = False
    forbidden: bool = False
    allowed: bool = False
    truncation: bool = True
    bad: bool = False  # one NaN, one +inf
    dtype: Any = np.float32


everything = Asked(law=True, bias=True, penalties=True, forbidden=True, allowed=True)


def make(batch: int, nodes: int, vocab: int, wish: Asked, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.5, 3.0, 8.0])
    # Draft and target agree on much: else hardly a second draft is looked at.
    base = rng.normal(size=(batch, nodes, vocab)) * scale
    logits = (base + 0.3 * rng.normal(size=base.shape)).astype(np.float32)
    logits[..., vocab - 3 :] = -np.inf  # padding ids
    trees = [[-1, *range(nodes - 1)]] * batch
    if wish.tree:
        trees = [[-1, *(int(rng.integers(0, node)) for node in range(1, nodes))] for _ in trees]
        trees = trees if wish.own else [trees[0]] * batch
    laws = nodes if wish.tree else nodes - 1
    q = base[:, :laws] + 0.3 * rng.normal(size=(batch, laws, vocab))
    log_q = (q - np.log(np.sum(np.exp(q), -1, keepdims=True))).astype(np.float32)
    tokens = np.zeros((batch, nodes - 1), np.int32)
    for b in range(batch):
        parents = np.array(trees[b])
        for j in range(nodes - 1):
            best = np.argsort(base[b, parents[j + 1]])[::-1]
            tokens[b, j] = best[rng.integers(0, 4)]
            if wish.law:
                p = np.exp(log_q[b, parents[j + 1]].astype(np.float64))
                if wish.drawn == "without replacement":
                    p[tokens[b, :j][parents[1 : j + 1] == parents[j + 1]]] = 0
                tokens[b, j] = rng.choice(vocab, p=p / p.sum())
    valid = rng.random((batch, nodes - 1)) < 0.95
    if wish.bad and nodes > 1:
        logits[rng.integers(0, batch), rng.integers(0, nodes), rng.integers(0, vocab)] = np.nan
        logits[rng.integers(0, batch), rng.integers(0, nodes), rng.integers(0, vocab)] = np.inf
        log_q[rng.integers(0, batch), rng.integers(0, laws), 0] = np.nan
    some = wish.truncation

    def pick(values: list[float], dtype: Any = np.float32) -> jax.Array:
        return jnp.asarray(rng.choice(values, size=batch), dtype)

    transforms = Transforms(
        temperature=pick([0.0, 0.7, 1.0, 1.6]),
        top_k=pick([0, 1, 3, 50, 10**6], np.int32) if some else jnp.zeros(batch, jnp.int32),
        top_p=pick([1.0, 0.9, 0.5, 0.05]) if some else jnp.ones(batch, jnp.float32),
        min_p=pick([0.0, 0.01, 0.3]) if some else jnp.zeros(batch, jnp.float32),
    )
    popular = np.concatenate([tokens.reshape(-1), np.argmax(base, -1).reshape(-1)])
    if wish.bias:
        ids = rng.choice([*popular, 0, vocab - 4, vocab], size=(batch, 4))
        values = rng.normal(size=(batch, 4)) * 2
        transforms = dataclasses.replace(
            transforms,
            bias=Bias(jnp.asarray(ids, jnp.int32), jnp.asarray(values, jnp.float32)),
        )
    if wish.penalties:
        prompt = rng.random((batch, vocab)) < 0.1
        generated = rng.poisson(0.3, (batch, vocab))
        transforms = dataclasses.replace(
            transforms,
            penalties=Penalties(
                repetition=pick([1.0, 1.3, 0.8]),
                frequency=pick([0.0, 0.4, -0.3]),
                presence=pick([0.0, 0.5]),
                in_prompt=jnp.asarray(prompt),
                generated=jnp.asarray(generated, jnp.int32),
            ),
        )
    if wish.forbidden:
        ids = rng.choice([*popular, vocab, vocab], size=(batch, nodes, 3))
        transforms = dataclasses.replace(transforms, forbidden=jnp.asarray(ids, jnp.int32))
    if wish.allowed:
        dense = rng.random((batch, nodes, vocab)) < 0.7
        dense[:, :, 5] = True
        transforms = dataclasses.replace(transforms, allowed=jnp.asarray(packed(dense)))
    return Case(
        logits=jnp.asarray(logits).astype(wish.dtype),
        transforms=transforms,
        drafts=Drafts(
            tokens=jnp.asarray(tokens),
            valid=jnp.asarray(valid),
            parents=jnp.asarray(trees if wish.own else trees[0], jnp.int32),
            ancestors=jnp.asarray(
                np.stack(list(map(ancestors, trees))) if wish.own else ancestors(trees[0])
            ),
            log_q=jnp.asarray(log_q) if wish.law and nodes > 1 else None,
            drawn=wish.drawn,
        ),
        coins=jnp.asarray(rng.random((batch, nodes - 1)), jnp.float32),
        noises=jnp.asarray(rng.gumbel(size=(batch, nodes, vocab)), jnp.float32),
    )
