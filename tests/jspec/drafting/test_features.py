"""A drafter that asks for the target's features gets those of the right tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.ngram import NGramDrafter
from jspec.drafting.protocol import Context, Outcome, Proposal
from jspec.generation import Decoder, run_chunk, run_prefill
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import rounds, tiny

TARGET = tiny.model()
LAYERS = (1, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Notes:
    """`features` [2, B, S, D] of the first `length` [B] tokens; `tokens` [B, S] as `extend` saw."""

    features: jax.Array
    tokens: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class Notebook:
    """Drafts as prompt lookup does, and notes the features of every committed token."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return LAYERS

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> Notes:
        width = TARGET.config.hidden_size
        return Notes(
            jnp.full((len(LAYERS), batch, capacity, width), jnp.nan, dtype),
            jnp.full((batch, capacity), -1, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        )

    def synced(self, state: Notes, length: jax.Array) -> jax.Array:
        return state.length

    def _note(
        self, state: Notes, start: jax.Array, count: jax.Array, features: jax.Array
    ) -> jax.Array:
        """Write features [2, B, W, D] of `count` tokens from each row's `start`."""
        batch, width = features.shape[1:3]
        step = jnp.arange(width, dtype=jnp.int32)[None, :]
        slot = jnp.where(step < count[:, None], start[:, None] + step, state.tokens.shape[1])
        row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], slot.shape)
        return state.features.at[:, row, slot].set(features, mode="drop")

    def extend(
        self,
        params: Any,
        state: Notes,
        tokens: jax.Array,
        count: jax.Array,
        features: tuple[jax.Array, ...],
    ) -> Notes:
        batch, width = tokens.shape
        stacked = jnp.stack([f.T.reshape(batch, width, -1) for f in features])
        step = jnp.arange(width, dtype=jnp.int32)[None, :]
        slot = jnp.where(step < count[:, None], state.length[:, None] + step, 10**6)
        row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], slot.shape)
        return Notes(
            self._note(state, state.length, count, stacked),
            state.tokens.at[row, slot].set(tokens, mode="drop"),
            state.length + count,
        )

    def propose(
        self, params: Any, state: Notes, context: Context, gamma: int
    ) -> tuple[Proposal, Notes]:
        proposal, _ = NGramDrafter(3, 1).propose((), (), context, gamma)
        return proposal, state

    def absorb(self, state: Notes, outcome: Outcome) -> Notes:
        batch, nodes = outcome.path.shape
        stacked = jnp.stack([f.T.reshape(batch, nodes, -1) for f in outcome.features])
        along = jnp.take_along_axis(stacked, outcome.path[None, :, :, None], axis=2)
        features = self._note(state, state.length, outcome.committed, along)
        return dataclasses.replace(state, features=features, length=outcome.length - 1)

    def permute_rows(self, state: Notes, source: jax.Array) -> Notes:
        raise NotImplementedError


@pytest.mark.parametrize("width", [4, 32])
def test_features_are_those_of_the_committed_tokens(width: int) -> None:
    drafter = BoundDrafter("notebook", Notebook())
    decoder = Decoder(TARGET, drafter, SpeculationConfig(3), batch_size=3)
    asked = [Request(p, SamplingParams(max_new_tokens=40)) for p in tiny.prompts(3)]
    state = run_prefill(
        target=TARGET.functions,
        drafter=drafter.drafter,
        width=width,
        params=TARGET.params,
        drafter_params=(),
        state=decoder.new_state(asked),
    )
    for row, request in enumerate(asked):
        known = len(request.token_ids) - 1
        assert int(state.drafter.length[row]) == known
        assert tuple(map(int, state.drafter.tokens[row, :known])) == request.token_ids[:-1]
    state, _ = run_chunk(
        program=decoder._program,
        params=TARGET.params,
        drafter_params=(),
        state=state,
        max_rounds=np.int32(100),
        until_finish=np.bool_(False),
    )
    prompts = [len(request.token_ids) for request in asked]
    counts = [rounds.counted(state, prompt, row, 3) for row, prompt in enumerate(prompts)]
    histogram = np.sum([c.histogram for c in counts], axis=0)
    assert histogram[3, 0] > 0  # rejections,
    assert histogram[:, 1:].sum() > 0  # acceptances,
    assert histogram[0, 0] > 0  # and rounds in which no row had a draft or this one had none
    reference = tiny.to_numpy(TARGET.config, TARGET.params)
    for row in range(3):
        length = int(state.length[row])
        assert int(state.drafter.length[row]) == length - 1
        _, residuals = reference.run([int(t) for t in state.tokens[row, : length - 1]])
        for index, layer in enumerate(LAYERS):
            found = state.drafter.features[index, row]
            np.testing.assert_allclose(found[: length - 1], residuals[layer], atol=1e-4)
            assert np.isnan(found[length:]).all()
