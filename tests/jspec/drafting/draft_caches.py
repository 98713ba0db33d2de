"""What the tests of tree drafters share: requests, and a cache against one that is filled anew."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec import trees
from jspec.cache import KVCache
from jspec.drafting import BoundDrafter
from jspec.generation import Decoder, run_chunk, run_prefill
from jspec.model import Model
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from tests import tiny

NEW = 30
ROUNDS = 5
WIDTH = 64  # slots compared, all that the rounds fill


def requests(temperature: float = 0.0, new: int = NEW) -> list[Request]:
    params = SamplingParams(
        temperature=temperature,
        seed=3,
        max_new_tokens=new,
        repetition_penalty=1.2,
        bad_words=((11,), (12, 13)),
    )
    return [Request(prompt, params) for prompt in tiny.prompts(5)]


@functools.partial(jax.jit, static_argnames="functions")
def fill(functions: Transformer, params: TransformerParams, tokens: jax.Array) -> KVCache:
    """Run whole rows at once."""
    batch, width = tokens.shape
    cache = functions.init_cache(batch, width, jnp.float32)
    return functions.forward(params, tokens, cache, trees.chain(width - 1))[1]


def prefilled(decoder: Decoder, asked: Sequence[Request]) -> DecodeState:
    """Return the state of a decoder's rows before their first round."""
    drafter = decoder.drafter
    assert drafter is not None
    return run_prefill(
        target=decoder.target.functions,
        drafter=drafter.drafter,
        width=32,
        params=decoder.target.params,
        drafter_params=drafter.params,
        state=decoder.new_state(asked),
    )


def check_caches(target: Model, bound: BoundDrafter, asked: Sequence[Request]) -> None:
    """Check target's and drafter's caches after each of some rounds.

    Args:
        target: the model, whose architecture the draft model has.
        bound: a `TreeCacheDrafter`.
        asked: one request a row, longer than the rounds take.
    """
    decoder = Decoder(target, bound, batch_size=len(asked))
    state = prefilled(decoder, asked)
    seen = set()
    for _ in range(ROUNDS):
        state, _ = run_chunk(
            program=decoder._program,
            params=target.params,
            drafter_params=bound.params,
            state=state,
            max_rounds=np.int32(1),
            until_finish=np.bool_(False),
        )
        length = np.asarray(state.length)
        np.testing.assert_array_equal(state.cache.length, length - 1)
        kept = np.asarray(state.drafter.cache.length)
        seen |= set((length - kept).tolist())
        tokens = state.tokens[:, :WIDTH]
        for params, found, known in (
            (target.params, state.cache, length - 1),
            (bound.params.model, state.drafter.cache, kept),
        ):
            fresh = fill(target.functions, params, tokens)
            for ours, theirs in zip(
                (*found.keys, *found.values), (*fresh.keys, *fresh.values), strict=True
            ):
                for row, entries in enumerate(known):
                    np.testing.assert_allclose(
                        ours[row, :, :entries], theirs[row, :, :entries], rtol=1e-4, atol=1e-4
                    )
    # Both kinds of last accepted nodes came up: those that ran, and those that never did.
    assert seen == {1, 2}
