"""What the tests of EAGLE drafters share: rounds one at a time, and what is drafted in each."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decoding, randomness
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.protocol import Proposal
from jspec.generation import Decoder, run_chunk, run_prefill
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from tests import tiny_eagle
from tests.tiny_eagle import TARGET, VOCAB, Variant

GAMMA = 3
NEW = 100
_propose = jax.jit(decoding.propose, static_argnames="program")


def program(bound: BoundDrafter, gamma: int | None = None) -> Program:
    return Program(
        TARGET.functions, bound.drafter, bound.drafts or GAMMA if gamma is None else gamma
    )


def new_state(
    bound: BoundDrafter, temperature: float, prompts: Sequence[tuple[int, ...]]
) -> DecodeState:
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=5)
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
    # As the decoder calls it, so that both run one program; the state is donated.
    after, _ = run_chunk(
        program=program(bound, gamma),
        params=TARGET.params,
        drafter_params=bound.params,
        state=jax.tree.map(jnp.copy, state),
        max_rounds=np.int32(rounds),
        until_finish=np.bool_(False),
        ended=np.zeros(len(state.length), bool),
    )
    return after


def drafts(bound: BoundDrafter, state: DecodeState) -> Proposal:
    """Return what would be drafted next."""
    keys = randomness.round_keys(state.seeds, state.length)
    proposal, _ = _propose(program(bound), bound.params, keys, state)
    return proposal


class Oracle:
    """The laws of one row's next drafts, from nothing but its tokens."""

    def __init__(self, kind: Variant, state: DecodeState, row: int) -> None:
        self._head = tiny_eagle.to_numpy(kind)
        self._tokens = state.tokens[row, : int(state.length[row])].tolist()
        self._features = tiny_eagle.features(kind, self._tokens[:-1])

    def log_q(self, drafted: Sequence[int]) -> np.ndarray:
        """Return the [V] log probabilities after some drafts."""
        logits = self._head.after(self._tokens, self._features, drafted, VOCAB)
        law: np.ndarray = logits - np.log(np.exp(logits).sum())
        return law


def check_greedy(bound: BoundDrafter, least: int) -> None:
    """Check the tokens of all rows, past the end of the head's context, and that it helped."""
    params = SamplingParams(max_new_tokens=NEW)
    asked = [Request(prompt, params) for prompt in tiny_eagle.prompts()]
    speculation = SpeculationConfig(bound.drafts or GAMMA)
    found = Decoder(TARGET, bound, speculation, batch_size=len(asked)).generate(asked)
    assert [done.token_ids for done in found] == tiny_eagle.greedy(NEW)
    assert sum(int(done.counts.accepted.sum()) for done in found) >= least
    for request, done in zip(asked, found, strict=True):
        # The token after its last position's is that of index CONTEXT + 1. All but a bonus token
        # after that take a round each.
        end = len(request.token_ids) + NEW
        assert done.counts.rounds > end - (tiny_eagle.CONTEXT + 3)
