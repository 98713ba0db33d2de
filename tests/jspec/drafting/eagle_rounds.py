"""What the tests of EAGLE drafters share: rounds one at a time, and what is drafted in each."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jspec import decoding, randomness
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.protocol import Proposal
from jspec.generation import Decoder, run_prefill
from jspec.models.eagle import EagleKind
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from tests import tiny_eagle
from tests.tiny_eagle import TARGET, VOCAB

GAMMA = 3
chunk = jax.jit(decoding.decode_chunk, static_argnames="program")
_propose = jax.jit(decoding.propose, static_argnames="program")


def program(bound: BoundDrafter, gamma: int | None = None) -> Program:
    return Program(
        TARGET.functions, bound.drafter, bound.drafts or GAMMA if gamma is None else gamma
    )


def new_state(
    bound: BoundDrafter, temperature: float, prompts: Sequence[tuple[int, ...]]
) -> DecodeState:
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=5)
    speculation = SpeculationConfig(bound.drafts or GAMMA)
    decoder = Decoder(TARGET, bound, speculation, batch_size=len(prompts))
    return decoder.new_state([Request(prompt, params) for prompt in prompts])


def prefilled(bound: BoundDrafter, temperature: float, width: int = 32) -> DecodeState:
    return run_prefill(
        target=TARGET.functions,
        drafter=bound.drafter,
        width=width,
        params=TARGET.params,
        drafter_params=bound.params,
        state=new_state(bound, temperature, tiny_eagle.prompts()),
    )


def advance(
    bound: BoundDrafter, state: DecodeState, rounds: int = 1, gamma: int | None = None
) -> DecodeState:
    after, _ = chunk(
        program=program(bound, gamma),
        params=TARGET.params,
        drafter_params=bound.params,
        state=state,
        max_rounds=np.int32(rounds),
        until_finish=np.bool_(False),
    )
    return after


def drafts(bound: BoundDrafter, state: DecodeState) -> Proposal:
    """Return what would be drafted next."""
    keys = randomness.round_keys(state.seeds, state.length)
    proposal, _ = _propose(program(bound), bound.params, keys, state)
    return proposal


class Oracle:
    """The laws of one row's next drafts, from nothing but its tokens."""

    def __init__(self, kind: EagleKind, state: DecodeState, row: int) -> None:
        self._head = tiny_eagle.to_numpy(kind)
        self._tokens = state.tokens[row, : int(state.length[row])].tolist()
        self._features = tiny_eagle.features(kind, self._tokens[:-1])

    def log_q(self, drafted: Sequence[int]) -> np.ndarray:
        """Return the [V] log probabilities after some drafts."""
        logits = self._head.after(self._tokens, self._features, drafted, VOCAB)
        law: np.ndarray = logits - np.log(np.exp(logits).sum())
        return law
