"""What the kernels experiment calls the ops with: cases, and random operands made on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree_shapes, trees
from pallas_kernels import rejection_sampling as rejection
from pallas_kernels import shapes

Lengths = Literal["full", "ragged"]
Edits = Literal["none", "top-p", "all"]

MODELS = {model.name: model for model in shapes.MODELS}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of tree attention.

    Attributes:
        case: model, batch, nodes and slots.
        dtype: of query, keys and values.
        lengths: prefixes that fill the slots, or ragged ones (0, 1, edges of blocks, full).
        tree: a random tree a row; else one chain.
        page: slots a page, or None where the cache is contiguous.
        softcap: bound of the scores, or None.
    """

    case: shapes.Case
    dtype: Any = jnp.bfloat16
    lengths: Lengths = "full"
    tree: bool = True
    page: int | None = None
    softcap: float | None = None

    @property
    def name(self) -> str:
        """For tables."""
        more = [jnp.dtype(self.dtype).name] if self.dtype != jnp.bfloat16 else []
        more += [f"page {self.page}"] if self.page else []
        more += [f"window {self.case.model.window}"] if self.case.model.window else []
        more += ["softcap"] if self.softcap else []
        more += ["ragged"] if self.lengths == "ragged" else []
        return " ".join([self.case.name, *more])

    @property
    def static(self) -> dict[str, Any]:
        """Settings of the op."""
        return {"window": self.case.model.window, "softcap": self.softcap}

    def prefixes(self, seed: int) -> np.ndarray:
        """Return the [B] prefix lengths."""
        batch, full = self.case.batch, self.case.slots - self.case.nodes
        if self.lengths == "full":
            return np.full(batch, full, np.int32)
        edges = [0, full, 1, 127, 128, 129, full // 2]
        drawn = np.random.default_rng(seed).integers(0, full + 1, batch)
        drawn[: len(edges)] = edges[:batch]
        return np.clip(drawn, 0, full).astype(np.int32)

    def read_bytes(self, prefixes: np.ndarray) -> int:
        """Bytes that must move: the keys and values in reach, the query and the output."""
        model, size = self.case.model, jnp.dtype(self.dtype).itemsize
        reach = prefixes.astype(np.int64) + self.case.nodes
        if model.window is not None:
            reach = np.minimum(reach, model.window + self.case.nodes)
        cache = 2 * int(reach.sum()) * model.groups * model.head_dim
        rows = 2 * self.case.batch * self.case.nodes * model.heads * model.head_dim
        return (cache + rows) * size


@dataclasses.dataclass(frozen=True)
class Rejection:
    """One call of rejection sampling.

    Attributes:
        vocab: V.
        batch: B.
        nodes: T.
        edits: transforms of the rows: none, temperature and top-p, or every one there is.
        law: a chain with the law that its drafts were drawn from; else a tree of chosen drafts.
        drawn: how the drafts of a tree were drawn, each row having a tree of its own; None for
            those kinds.
        dtype: of the logits.
        greedy: some rows are.
    """

    vocab: int
    batch: int
    nodes: int
    edits: Edits = "none"
    law: bool = True
    drawn: Literal["with replacement", "without replacement"] | None = None
    dtype: Any = jnp.float32
    greedy: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        kind = "chain with q" if self.law else "tree"
        kind = kind if self.drawn is None else f"trees drawn {self.drawn}"
        more = "" if self.dtype == jnp.float32 else f" {jnp.dtype(self.dtype).name}"
        edits = {"none": "no edits", "top-p": "top-p 0.9", "all": "all edits"}[self.edits]
        return f"V{self.vocab}-B{self.batch}-T{self.nodes} {kind}, {edits}{more}"

    @property
    def read_bytes(self) -> int:
        """Bytes that must move: one read of the logits, and of q."""
        law = 4 * self.batch * (self.nodes - 1) * self.vocab if self.law and not self.drawn else 0
        size = jnp.dtype(self.dtype).itemsize
        return self.batch * self.nodes * self.vocab * size + law


@dataclasses.dataclass(frozen=True)
class Cache:
    """One ragged write, or one move of an accepted path.

    Attributes:
        case: model, batch, nodes and slots.
        op: which of the two.
        dtype: of the cache.
    """

    case: shapes.Case
    op: Literal["cache_write", "cache_commit"]
    dtype: Any = jnp.bfloat16

    @property
    def name(self) -> str:
        """For tables."""
        more = "" if self.dtype == jnp.bfloat16 else f" {jnp.dtype(self.dtype).name}"
        return f"{self.case.name}{more}"

    @property
    def moved(self) -> int:
        """Entries a row that are read and written."""
        return self.case.nodes if self.op == "cache_write" else min(self.case.nodes, 6)

    @property
    def read_bytes(self) -> int:
        """Bytes that must move: the entries, read and written."""
        model = self.case.model
        entries = self.case.batch * self.moved * model.groups * model.head_dim
        return 2 * entries * jnp.dtype(self.dtype).itemsize


def case(model: str, batch: int, nodes: int, slots: int) -> shapes.Case:
    """Return a case of one of `shapes.MODELS`."""
    return shapes.Case(MODELS[model], batch, nodes, slots)


Case = Attention | Rejection | Cache


def op_of(case: Case) -> str:
    """Return the op's name."""
    if isinstance(case, Cache):
        return case.op
    return "tree_attention" if isinstance(case, Attention) else "rejection_sampling"


def tree_of(nodes: int, branching: bool, seed: int) -> trees.Topology:
    """Return a random tree, or a chain."""
    if not branching:
        return trees.chain(nodes - 1)
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, node - 6), node)) for node in range(1, nodes)]
    return trees.from_parents((-1, *parents))


def attention_operands(case: Attention, seed: int, stale: float = 0.0) -> dict[str, Any]:
    """Return the op's operands by name, with `stale` in every slot that is not to be read."""
    batch, nodes, slots = case.case.batch, case.case.nodes, case.case.slots
    prefixes = case.prefixes(seed)
    rows = batch if case.tree else 1
    topologies = [tree_of(nodes, case.tree, seed + row) for row in range(rows)]
    ancestors = np.stack([np.asarray(topology.ancestors) for topology in topologies])
    table = None
    if case.page is not None:
        pages = batch * slots // case.page
        table = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    query, keys, values = _query_and_cache(
        jax.random.key(seed),
        jnp.asarray(prefixes),
        None if table is None else jnp.asarray(np.argsort(table)),
        jnp.float32(stale),
        case,
    )
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "prefix_length": jnp.asarray(prefixes),
        "ancestors": jnp.asarray(ancestors if case.tree else ancestors[0]),
        "block_table": None if table is None else jnp.asarray(table.reshape(batch, -1)),
    }


@functools.partial(jax.jit, static_argnames="case")
def _query_and_cache(
    key: jax.Array,
    prefixes: jax.Array,
    order: jax.Array | None,
    stale: jax.Array,
    case: Attention,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return query, keys and values; the caches as pages in the order given, if one is."""
    model, batch, nodes, slots = case.case.model, case.case.batch, case.case.nodes, case.case.slots
    query_key, *cache_keys = jax.random.split(key, 3)
    # Scores of standard deviation 2, so that some of a thousand slots matter more than others.
    query = 2 * jax.random.normal(query_key, (batch, nodes, model.heads, model.head_dim))
    used = jnp.arange(slots, dtype=jnp.int32)[None, :] < prefixes[:, None] + nodes

    def filled(key: jax.Array) -> jax.Array:
        shape = (batch, model.groups, slots, model.head_dim)
        whole = jax.random.normal(key, shape, jnp.float32)
        whole = jnp.where(used[:, None, :, None], whole, stale).astype(case.dtype)
        if order is None or case.page is None:
            return whole
        pages = whole.reshape(batch, model.groups, slots // case.page, case.page, -1)
        return jnp.moveaxis(pages, 2, 1).reshape(-1, *pages.shape[1:2], *pages.shape[3:])[order]

    return query.astype(case.dtype), filled(cache_keys[0]), filled(cache_keys[1])


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_array(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return normal numbers."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def rejection_operands(case: Rejection, seed: int) -> tuple[Any, ...]:
    """Return (logits, transforms, drafts, coins, noise [B, V])."""
    batch, nodes, vocab = case.batch, case.nodes, case.vocab
    rng = np.random.default_rng(seed)
    key, shape = jax.random.key(seed), (batch, nodes, vocab)
    if case.drawn is None:
        topology = tree_of(nodes, not case.law, seed)
        parents, ancestors = jnp.asarray(topology.parents), jnp.asarray(topology.ancestors)
        logits, log_q, tokens = _logits(key, parents, shape, case)
    else:
        own = [tree_of(nodes, True, seed + row) for row in range(batch)]
        parents = jnp.asarray(np.stack([topology.parents for topology in own]))
        ancestors = jnp.asarray(np.stack([topology.ancestors for topology in own]))
        places = [tree_shapes.ranks(tuple(topology.parents.tolist())) for topology in own]
        ranks = jnp.asarray(np.stack(places).astype(np.int32))
        logits, log_q, tokens = _drawn_trees(key, parents, ranks, shape, case)
    drafts = rejection.Drafts(
        tokens=tokens,
        valid=jnp.asarray(rng.random((batch, nodes - 1)) < 0.95),
        parents=parents,
        ancestors=ancestors,
        log_q=log_q,
        drawn="chain" if case.drawn is None else case.drawn,
    )
    coins = jnp.asarray(rng.random((batch, nodes - 1)), jnp.float32)
    noise = jnp.asarray(rng.gumbel(size=(batch, vocab)), jnp.float32)
    return logits, _transforms(case, tokens, rng), drafts, coins, noise


@functools.partial(jax.jit, static_argnames=("shape", "case"))
def _logits(
    key: jax.Array, parents: jax.Array, shape: tuple[int, int, int], case: Rejection
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    batch, nodes, vocab = shape
    keys = jax.random.split(key, 4)
    # Draft and target agree on much: else hardly a second draft is looked at.
    base = 4.0 * jax.random.normal(keys[0], shape, jnp.float32)
    logits = (base + 0.3 * jax.random.normal(keys[1], shape, jnp.float32)).astype(case.dtype)
    if not case.law:
        # Of the five best at the parent, by the draft's place among all nodes.
        _, best = jax.lax.top_k(base, 5)
        rank = jnp.broadcast_to(
            jnp.arange(1, nodes, dtype=jnp.int32)[None, :, None] % 5, (batch, nodes - 1, 1)
        )
        best = jnp.take(best, parents[1:], axis=1)
        return logits, None, jnp.take_along_axis(best, rank, axis=-1)[..., 0].astype(jnp.int32)
    noisy = base[:, :-1] + 0.3 * jax.random.normal(keys[2], (batch, nodes - 1, vocab), jnp.float32)
    log_q = jax.nn.log_softmax(noisy, axis=-1)
    drawn = jax.random.categorical(keys[3], log_q, axis=-1).astype(jnp.int32)
    return logits, log_q, drawn


@functools.partial(jax.jit, static_argnames=("shape", "case"))
def _drawn_trees(
    key: jax.Array,
    parents: jax.Array,
    ranks: jax.Array,
    shape: tuple[int, int, int],
    case: Rejection,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw every node's children from its own q; siblings differ where nothing is put back."""
    batch, nodes, _ = shape
    keys = jax.random.split(key, 4)
    base = 4.0 * jax.random.normal(keys[0], shape, jnp.float32)
    logits = (base + 0.3 * jax.random.normal(keys[1], shape, jnp.float32)).astype(case.dtype)
    log_q = jax.nn.log_softmax(base + 0.3 * jax.random.normal(keys[2], shape, jnp.float32), axis=-1)
    row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, nodes - 1))
    if case.drawn == "with replacement":
        drawn = jax.random.categorical(keys[3], log_q[row, parents[:, 1:]], axis=-1)
        return logits, log_q, drawn.astype(jnp.int32)
    _, order = jax.lax.top_k(log_q + jax.random.gumbel(keys[3], shape, jnp.float32), nodes - 1)
    return logits, log_q, order[row, parents[:, 1:], ranks[:, 1:]].astype(jnp.int32)


def _transforms(
    case: Rejection, tokens: jax.Array, rng: np.random.Generator
) -> rejection.Transforms:
    batch, nodes, vocab = case.batch, case.nodes, case.vocab

    def each(values: list[float], dtype: Any = np.float32) -> jax.Array:
        return jnp.asarray(np.resize(values, batch), dtype)

    cut = case.edits != "none"
    temperature = [0.0, 1.0, 0.7] if case.greedy else [1.0, 0.7]
    transforms = rejection.Transforms(
        temperature=each(temperature),
        top_k=each([0, 50] if case.edits == "all" else [0], np.int32),
        top_p=each([0.9] if cut else [1.0]),
        min_p=each([0.0, 0.01] if case.edits == "all" else [0.0]),
    )
    if case.edits != "all":
        return transforms
    first = tokens[:, :1] if nodes > 1 else jnp.zeros((batch, 1), jnp.int32)
    some = (first + jnp.arange(4, dtype=jnp.int32)[None, :]) % vocab
    words = rng.integers(0, 2**32, (batch, nodes, -(-vocab // 32)), np.uint32)
    words |= rng.integers(0, 2**32, words.shape, np.uint32)
    return dataclasses.replace(
        transforms,
        bias=rejection.Bias(some, jnp.asarray(rng.normal(size=some.shape), jnp.float32)),
        penalties=rejection.Penalties(
            repetition=each([1.0, 1.3]),
            frequency=each([0.4, 0.0]),
            presence=each([0.0, 0.5]),
            in_prompt=jnp.asarray(rng.random((batch, vocab)) < 0.1),
            generated=jnp.asarray(rng.poisson(0.3, (batch, vocab)), jnp.int32),
        ),
        forbidden=jnp.asarray(rng.integers(0, vocab, (batch, nodes, 3)), jnp.int32),
        allowed=jnp.asarray(words),
    )


def cache_operands(case: Cache, seed: int) -> tuple[jax.Array, ...]:
    """Return (cache, entries, start) of a write, (cache, start, path) of a commit."""
    model, batch, nodes, slots = (
        case.case.model,
        case.case.batch,
        case.case.nodes,
        case.case.slots,
    )
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    shape = (batch, model.groups, slots, model.head_dim)
    cache = random_array(jax.random.fold_in(key, 0), shape, np.dtype(case.dtype))
    # The last row's nodes run past the capacity; the first row is empty.
    start = rng.integers(0, slots - nodes + 1, batch)
    start[-1] = slots - max(1, nodes // 2)
    start[0] = 0
    starts = jnp.asarray(start, jnp.int32)
    if case.op == "cache_write":
        entries = (batch, nodes, model.groups, model.head_dim)
        return (
            cache,
            random_array(jax.random.fold_in(key, 1), entries, np.dtype(case.dtype)),
            starts,
        )
    path = np.full((batch, case.moved), -1, np.int32)
    for row in range(batch):
        length = int(rng.integers(1, case.moved + 1))
        inner = np.sort(rng.choice(np.arange(1, nodes), length - 1, replace=False))
        path[row, :length] = [0, *inner]
    # At least one entry has a way to go.
    path[0] = -1
    path[0, :2] = [0, nodes - 1]
    return cache, starts, jnp.asarray(path)
