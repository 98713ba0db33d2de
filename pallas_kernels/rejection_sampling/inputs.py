"""What verification is given, and what a pass over the vocabulary leaves of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

# How drafts were drawn from their law: each the only child of the node before it; siblings
# independently of each other; or siblings one after another, as by Gumbel top-k.
Drawn = Literal["chain", "with replacement", "without replacement"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """Sparse additive bias.

    Attributes:
        tokens: [B, K] int32; V is padding. A token named twice gets the sum.
        values: [B, K] float32.
    """

    tokens: jax.Array
    values: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Penalties:
    """Penalties, and counts of the committed tokens; a node's own path is added to them.

    Attributes:
        repetition: [B] float32; 1 is none. Goes by the prompt too.
        frequency: [B] float32; 0 is none.
        presence: [B] float32; 0 is none.
        in_prompt: [B, V] bool.
        generated: [B, V] int32, at most 2 ** 22.
    """

    repetition: jax.Array
    frequency: jax.Array
    presence: jax.Array
    in_prompt: jax.Array
    generated: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transforms:
    """From logits to the law that tokens are drawn from, in this order.

    Bias, penalties, forbidden tokens, allowed tokens; temperature, top-k, top-p, min-p, each on
    what the one before left, ties kept. What no row asks for is None and not compiled.

    Attributes:
        temperature: [B] float32; 0 is greedy: all mass on the argmax, lowest id on ties.
        top_k: [B] int32; 0 keeps all.
        top_p: [B] float32; 1 keeps all.
        min_p: [B] float32; 0 keeps all.
        bias: of the rows.
        penalties: of the rows.
        forbidden: [B, T, F] int32, tokens of probability 0 at each node; V is padding.
        allowed: [B, T, ceil(V / 32)] uint32, bit v % 32 of word v // 32 set where token v is
            allowed at the node.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    bias: Bias | None = None
    penalties: Penalties | None = None
    forbidden: jax.Array | None = None
    allowed: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """One round's drafts: nodes 1 .. T - 1 of a tree whose root is the pending token.

    Siblings are examined in the order of their indices. Rows may have trees of their own.

    Attributes:
        tokens: [B, T - 1] int32.
        valid: [B, T - 1] bool; a draft that is not is never accepted, nor what descends from it.
        parents: [T] or [B, T] int32, -1 for the root; a parent comes before its children.
        ancestors: [T, ceil(T / 32)] or [B, T, ceil(T / 32)] uint32, packed ancestor-or-self bits.
        log_q: [B, P, V] float32, the law that the children of each node were drawn from (the first
            of them, where they were drawn without replacement). Of a chain P is T - 1, in a tree
            nodes at or past P have no children. None: the drafts were chosen without chance.
        drawn: static; how drafts were drawn from `log_q`, if there is one.
    """

    tokens: jax.Array
    valid: jax.Array
    parents: jax.Array
    ancestors: jax.Array
    log_q: jax.Array | None = None
    drawn: Drawn = dataclasses.field(default="chain", metadata={"static": True})

    @property
    def chain_log_q(self) -> jax.Array | None:
        """`log_q` of a chain that has a draft: the only law that the statistics are made with."""
        return self.log_q if self.drawn == "chain" and self.tokens.shape[1] > 0 else None

    @property
    def own_trees(self) -> bool:
        """Whether every row has a tree of its own."""
        return jnp.ndim(self.parents) == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """All that a decision needs to know of the target's logits. p is the law after transforms.

    With x the edited logits, a node's scores are (x - highest) / temperature, and
    log p = score - log_total where score >= threshold, -inf elsewhere. Only `usable` means
    anything at a node that is not.

    Attributes:
        usable: [B, T] bool, the edited logits have no NaN and no +inf and are not all -inf.
        best: [B, T] int32, argmax of the edited logits.
        highest: [B, T] float32, their maximum.
        threshold: [B, T] float32.
        log_total: [B, T] float32, log sum of exp(score) over what is kept.
        raw_total: [B, T] float32, log sum of exp(logit) before any edit; nothing to go by where
            logits of forbidden tokens are NaN or +inf.
        log_p: [B, T - 1] float32, of each draft at its parent.
        raw_log_p: [B, T - 1] float32, the same before any transform.
        overlap: [B, T - 1] float32, sum min(p, q) at each draft's parent; NaN where q is no
            distribution (NaN, +inf or all -inf). Drafts that are no chain drawn from q are taken
            as point masses here: it is p of each.
        q: [B, T - 1] float32, of each draft; 1 for point masses.
    """

    usable: jax.Array
    best: jax.Array
    highest: jax.Array
    threshold: jax.Array
    log_total: jax.Array
    raw_total: jax.Array
    log_p: jax.Array
    raw_log_p: jax.Array
    overlap: jax.Array
    q: jax.Array


def unpack(bits: jax.Array, size: int) -> jax.Array:
    """Unpack [..., W] uint32 to [..., size] bool, lowest bit of word 0 first."""
    index = jnp.arange(size, dtype=jnp.uint32)
    words = jnp.take(bits, index // 32, axis=-1)
    shift = jnp.broadcast_to(index % 32, words.shape)
    return (jnp.right_shift(words, shift) & jnp.uint32(1)) == jnp.uint32(1)


def on_path(drafts: Drafts) -> jax.Array:
    """Return [B or 1, T, T - 1] bool: draft j + 1 is on the way to the node, or the node itself."""
    dense = unpack(jnp.asarray(drafts.ancestors), drafts.tokens.shape[1] + 1)[..., 1:]
    return dense if drafts.own_trees else dense[None]


def parents_of(drafts: Drafts) -> jax.Array:
    """Return the parent of every draft, [B, T - 1] int32."""
    return jnp.broadcast_to(jnp.asarray(drafts.parents)[..., 1:], drafts.tokens.shape)


def of_parents(array: jax.Array, drafts: Drafts) -> jax.Array:
    """Return array[b, parent of j] of every draft j: [B, T] to [B, T - 1]."""
    return jnp.take_along_axis(array, parents_of(drafts), axis=1)


def node_of(array: jax.Array, node: jax.Array) -> jax.Array:
    """Return array[b, node[b]] for [B, K, ...] and [B]."""
    shape = (-1,) + (1,) * (array.ndim - 1)
    return jnp.take_along_axis(array, node.reshape(shape), axis=1)[:, 0]


def row_of(array: jax.Array, node: jax.Array) -> jax.Array:
    """Return array[b, node[b]] for [B, K, V] of long rows and [B].

    XLA on TPU makes a gather of long rows out of passes over the whole array, and slices of one row
    each out of nothing but these rows.
    """

    def sliced(array: jax.Array, node: jax.Array) -> jax.Array:
        def one(row: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(array, (row, node[row], 0), (1, 1, array.shape[2]))[0, 0]

        return jax.lax.map(one, jnp.arange(array.shape[0], dtype=jnp.int32))

    return jax.lax.platform_dependent(array, node, tpu=sliced, default=node_of)


def fault(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> str | None:
    """Return what is wrong with shapes and dtypes, or None."""
    if logits.ndim != 3:
        return f"logits must be [B, T, V], not {logits.shape}"
    batch, nodes, vocab = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits must be float32 or bfloat16, not {logits.dtype}"
    wanted: dict[str, tuple[jax.Array, tuple[int, ...]]] = {
        name: (getattr(transforms, name), (batch,))
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    wanted["tokens"] = (drafts.tokens, (batch, nodes - 1))
    wanted["valid"] = (drafts.valid, (batch, nodes - 1))
    rows = (batch,) if drafts.own_trees else ()
    wanted["parents"] = (drafts.parents, (*rows, nodes))
    wanted["ancestors"] = (drafts.ancestors, (*rows, nodes, -(-nodes // 32)))
    if drafts.log_q is not None:
        laws = nodes - 1 if drafts.drawn == "chain" else min(drafts.log_q.shape[1], nodes)
        wanted["log_q"] = (drafts.log_q, (batch, laws, vocab))
    if transforms.allowed is not None:
        wanted["allowed"] = (transforms.allowed, (batch, nodes, -(-vocab // 32)))
    if transforms.forbidden is not None:
        wanted["forbidden"] = (
            transforms.forbidden,
            (batch, nodes, transforms.forbidden.shape[-1]),
        )
    if transforms.penalties is not None:
        for name in ("in_prompt", "generated"):
            wanted[name] = (getattr(transforms.penalties, name), (batch, vocab))
    for name, (array, shape) in wanted.items():
        if tuple(array.shape) != shape:
            return f"{name} must have shape {shape}, not {tuple(array.shape)}"
    return None
