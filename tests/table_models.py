"""A target and drafters that are tables: their laws are known exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import decoding, edits, randomness, sampling, trace, trees
from jspec.cache import KVCache
from jspec.drafting.protocol import Context, Dense, Drafter, PointMass, Proposal
from jspec.drafting.stateless import StatelessDrafter
from jspec.edits import RowEdits
from jspec.randomness import Purpose
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from jspec.trees import Topology
from pallas_kernels.dispatch import Kernels


@dataclasses.dataclass(frozen=True)
class TableTarget:
    """Logits are table[token before, token], params being the [V, V, V] float32 table.

    The token before (a node's parent) is read from the cache, which holds token ids as its keys: a
    cache that is wrong by one entry gives another law.

    Its feature of a node, in every layer, is the node's token, one-hot.
    """

    vocab_size: int

    @property
    def kernels(self) -> Kernels:
        return kv.DEFAULT_KERNELS

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        return KVCache(
            keys=(jnp.zeros((batch, 1, capacity, 1), jnp.float32),),
            values=(jnp.zeros((batch, 1, capacity, 1), jnp.float32),),
            length=jnp.zeros(batch, jnp.int32),
        )

    def forward(
        self,
        params: jax.Array,
        tokens: jax.Array,
        cache: KVCache,
        topology: Topology,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
        entries = tokens[:, :, None, None].astype(jnp.float32)
        keys, values = kv.write(cache, 0, entries, entries)
        cache = KVCache(keys=(keys,), values=(values,), length=cache.length)
        slot = cache.length[:, None] + topology.by_row().parents
        before = jnp.take_along_axis(keys[:, 0, :, 0], jnp.maximum(slot, 0), axis=1)
        state = before.astype(jnp.int32) * self.vocab_size + tokens
        feature = jax.nn.one_hot(tokens.reshape(-1), self.vocab_size, axis=0)
        return state.reshape(1, -1), cache, (feature,) * len(feature_layers)

    def logits(self, params: jax.Array, hidden: jax.Array) -> jax.Array:
        return jnp.take(params.reshape(-1, self.vocab_size), hidden[0], axis=0)


@dataclasses.dataclass(frozen=True)
class TableDrafter(StatelessDrafter):
    """Drafts from table[last token], params being [V, V]; drawn, or (deterministic) the argmax."""

    deterministic: bool = False

    def row(self, params: jax.Array, token: jax.Array) -> jax.Array:
        """Return the [B, V] logits after the [B] tokens."""
        return jnp.take(params, token, axis=0)

    def propose(
        self, params: jax.Array, state: tuple[()], context: Context, gamma: int
    ) -> tuple[Proposal, tuple[()]]:
        token = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        drafts: list[jax.Array] = []
        laws = []
        for step in range(gamma):
            path = jnp.stack(drafts, axis=1) if drafts else context.tokens[:, :0]
            logits = context.edit(self.row(params, token)[:, None], path[:, None])[:, 0]
            if self.deterministic:
                token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            else:
                log_q = sampling.log_probs(logits[:, None], context.sampling)[:, 0]
                node = jnp.full((token.shape[0], 1), step + 1, jnp.int32)
                keys = randomness.node_keys(context.keys, node, Purpose.DRAFT)[:, 0]
                token = sampling.draw(log_q, keys)
                laws.append(log_q)
            drafts.append(token)
        tokens = jnp.stack(drafts, axis=1)
        proposal = Proposal(
            tokens=tokens,
            topology=trees.chain(gamma),
            valid=jnp.ones(tokens.shape, bool),
            law=PointMass() if self.deterministic else Dense(log_q=jnp.stack(laws, axis=1)),
        )
        return proposal, ()


_prefill = jax.jit(decoding.prefill, static_argnums=(0, 1, 2))


def start(
    target: TableTarget,
    table: np.ndarray,
    prompts: np.ndarray,
    params: Sequence[SamplingParams],
    seeds: np.ndarray,
    gamma: int,
    drafter: Drafter | None = None,
    stops: Sequence[int] = (),
    drafter_params: Any = (),
) -> DecodeState:
    """Return prefilled rows.

    Args:
        target: the model.
        table: its parameters.
        prompts: [B, P].
        params: of the B rows, or one for all.
        seeds: [B] below 2^32.
        gamma: largest of the rounds to come.
        drafter: whose state is put in.
        stops: ids that end every row.
        drafter_params: the drafter's.
    """
    batch, length = prompts.shape
    given = list(params) * (batch // len(params))
    ends = length + np.array([p.max_new_tokens for p in given])
    capacity = int(ends.max()) + gamma + 1
    tokens = np.zeros((batch, capacity), np.int32)
    tokens[:, :length] = prompts
    asked = [
        RowEdits(p, row, [w for w in p.bad_words if not isinstance(w, str)], stops)
        for p, row in zip(given, prompts.tolist(), strict=True)
    ]
    return _prefill(
        target,
        drafter,
        max(length - 1, 1),
        table,
        drafter_params,
        DecodeState(
            tokens=jnp.asarray(tokens),
            length=jnp.full(batch, length, jnp.int32),
            end=jnp.asarray(ends.astype(np.int32)),
            active=jnp.ones(batch, bool),
            finish=jnp.zeros(batch, jnp.int32),
            sampling=sampling.rows(given, edits.rows(asked, target.vocab_size)),
            seeds=jnp.asarray(np.stack([np.zeros(batch), seeds], axis=1).astype(np.uint32)),
            stop_ids=jnp.tile(jnp.array([[*stops, -1]], jnp.int32), (batch, 1)),
            cache=target.init_cache(batch, capacity, jnp.float32),
            drafter=drafter.init(batch, capacity, jnp.float32) if drafter else (),
            trace=trace.init(batch, capacity),
        ),
    )
