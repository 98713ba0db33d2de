"""A target and a drafter that do exactly what a test tells them, for the loop's own logic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec import sampling, trace, trees
from jspec.cache import KVCache
from jspec.drafting.protocol import Context, Outcome, PointMass, Proposal
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from jspec.trees import Topology

VOCAB = 32
SLOTS = 64
STOP = 12


def table(**changes: float) -> jax.Array:
    """Return bigram logits [V, V]: 1 -> 10 -> 11 -> 12 -> 20 -> 21 -> 22 -> ..; x -> x + 1 else."""
    following = {token: (token + 1) % VOCAB for token in range(VOCAB)}
    following |= {1: 10, 10: 11, 11: 12, 12: 20}
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    for token, after in following.items():
        logits[token, after] = 9.0
    for name, value in changes.items():  # _11=nan fills row 11
        logits[int(name[1:])] = value
    return jnp.asarray(logits)


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Each token's logits are the row of its predecessor in the parameters [V, V]."""

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        buffer = (jnp.zeros((batch, 1, capacity, 2), dtype),)
        return KVCache(buffer, buffer, jnp.zeros(batch, jnp.int32))

    def forward(
        self,
        params: jax.Array,
        tokens: jax.Array,
        cache: KVCache,
        topology: Topology,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
        hidden = tokens.reshape(1, -1).astype(jnp.float32)
        return hidden, cache, (hidden,) * len(feature_layers)

    def logits(self, params: jax.Array, hidden: jax.Array) -> jax.Array:
        return params[hidden[0].astype(jnp.int32)]


@dataclasses.dataclass(frozen=True)
class Script:
    """Proposes params = (tokens [B, K], valid [B, K]) in every round; its state counts absorbs."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return ()

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> jax.Array:
        return jnp.zeros(batch, jnp.int32)

    def synced(self, state: jax.Array, length: jax.Array) -> jax.Array:
        return length

    def extend(
        self,
        params: Any,
        state: jax.Array,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> jax.Array:
        return state

    def propose(
        self, params: Any, state: jax.Array, context: Context, gamma: int
    ) -> tuple[Proposal, jax.Array]:
        tokens, valid = params
        proposal = Proposal(tokens[:, :gamma], trees.chain(gamma), valid[:, :gamma], PointMass())
        return proposal, state

    def absorb(self, state: jax.Array, outcome: Outcome) -> jax.Array:
        return state + outcome.committed

    def permute_rows(self, state: jax.Array, source: jax.Array) -> jax.Array:
        return state[source]


def script(*rows: Sequence[int], width: int = 5) -> tuple[jax.Array, jax.Array]:
    """Return the parameters of `Script`; rows shorter than `width` draft less."""
    tokens = np.zeros((len(rows), width), np.int32)
    valid = np.zeros((len(rows), width), bool)
    for row, drafts in enumerate(rows):
        tokens[row, : len(drafts)] = drafts
        valid[row, : len(drafts)] = True
    return jnp.asarray(tokens), jnp.asarray(valid)


def state(
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    stops: Sequence[int] = (STOP,),
    params: SamplingParams | None = None,
) -> DecodeState:
    """Return prefilled rows: the cache holds all but the pending token."""
    batch = len(prompts)
    tokens = np.zeros((batch, SLOTS), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    length = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    cache = Bigram().init_cache(batch, SLOTS, jnp.float32)
    return DecodeState(
        tokens=jnp.asarray(tokens),
        length=length,
        end=length + jnp.array(budgets, jnp.int32),
        active=jnp.ones(batch, bool),
        finish=jnp.zeros(batch, jnp.int32),
        sampling=sampling.rows([params or SamplingParams()] * batch),
        seeds=jnp.asarray(np.arange(2 * batch, dtype=np.uint32).reshape(batch, 2)),
        stop_ids=jnp.tile(jnp.array([[*stops, *[-1] * (4 - len(stops))]], jnp.int32), (batch, 1)),
        cache=dataclasses.replace(cache, length=length - 1),
        drafter=jnp.zeros(batch, jnp.int32),
        trace=trace.init(batch, SLOTS),
    )
