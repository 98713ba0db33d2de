"""The draft model's cache: never a hole, never behind after catching up; vocabularies; contexts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decoding
from jspec.cache import KVCache
from jspec.config import ModelConfig, SpeculationConfig
from jspec.decoding import Program
from jspec.drafting.draft_model import DraftModelDrafter, draft_model, early_exit
from jspec.errors import InputError
from jspec.generation import Decoder, run_prefill
from jspec.models.parameters import TransformerParams
from jspec.models.transformer import Transformer
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from tests import rounds, tiny
from tests.oracles import numpy_llama

GAMMA = 3
TARGET = tiny.model()
NEARBY = draft_model(TARGET.config, tiny.nearby(TARGET.params, 0.1))
chunk = jax.jit(decoding.decode_chunk, static_argnames="program")
_catch_up = jax.jit(decoding.catch_up, static_argnames=("target", "drafter", "width"))


def catch_up(state: DecodeState, width: int) -> DecodeState:
    after = _catch_up(
        target=TARGET.functions,
        drafter=NEARBY.drafter,
        width=width,
        params=TARGET.params,
        drafter_params=NEARBY.params,
        state=state,
    )
    return after


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def decoder() -> Decoder:
    return Decoder(TARGET, NEARBY, SpeculationConfig(GAMMA), batch_size=3)


def program(gamma: int) -> Program:
    return Program(TARGET.functions, NEARBY.drafter, gamma)


def prefilled(temperature: float = 0.0) -> DecodeState:
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=5)
    return run_prefill(
        target=TARGET.functions,
        drafter=NEARBY.drafter,
        width=32,
        params=TARGET.params,
        drafter_params=NEARBY.params,
        state=decoder().new_state([Request(p, params) for p in tiny.prompts(3)]),
    )


def advance(state: DecodeState, gamma: int, rounds: int) -> DecodeState:
    after, _ = chunk(
        program=program(gamma),
        params=TARGET.params,
        drafter_params=NEARBY.params,
        state=state,
        max_rounds=np.int32(rounds),
        until_finish=np.bool_(False),
    )
    return after


def check_cache(cache: KVCache, params: TransformerParams, state: DecodeState) -> None:
    """Compare a cache's live entries with those of a reference that ran the row at once."""
    reference = tiny.to_numpy(TARGET.config, params)
    for row in range(3):
        live = int(cache.length[row])
        if live == 0:
            continue
        tokens = [int(t) for t in state.tokens[row, :live]]
        memory = numpy_llama.Cache([], [])
        reference.run(tokens, memory)
        for layer in range(len(cache.keys)):
            np.testing.assert_allclose(
                cache.keys[layer][row, :, :live], memory.keys[layer], atol=1e-4
            )
            np.testing.assert_allclose(
                cache.values[layer][row, :, :live], memory.values[layer], atol=1e-4
            )


def test_prefill_fills_both_caches_short_of_the_pending_token() -> None:
    state = prefilled()
    assert list(state.cache.length) == list(state.length - 1)
    assert list(state.drafter.length) == list(state.length - 1)
    check_cache(state.drafter, NEARBY.params.model, state)
    check_cache(state.cache, TARGET.params, state)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_cache_is_rolled_back_by_its_own_amount(temperature: float) -> None:
    state = prefilled(temperature)
    lags: set[int] = set()
    for _ in range(8):
        before = state
        state = advance(state, GAMMA, 1)
        committed = np.asarray(state.length - before.length)
        assert ((committed >= 1) & (committed <= GAMMA + 1)).all()
        assert list(state.cache.length) == list(state.length - 1)
        # One behind, and two after a full acceptance: its last draft was never run.
        lag = np.asarray(state.length - state.drafter.length)
        np.testing.assert_array_equal(lag, np.where(committed == GAMMA + 1, 2, 1))
        lags |= set(map(int, lag))
    assert lags == {1, 2}
    assert len(set(map(int, state.length - prefilled().length))) > 1  # ragged
    check_cache(state.cache, TARGET.params, state)
    check_cache(state.drafter, NEARBY.params.model, state)


def test_catching_up_after_rounds_without_speculation() -> None:
    together = advance(prefilled(), GAMMA, 2)
    # Plain rounds leave the drafter alone ..
    paused = advance(together, 0, 9)
    np.testing.assert_array_equal(paused.length, together.length + 9)
    np.testing.assert_array_equal(paused.drafter.length, together.drafter.length)
    # .. and it takes in what it missed in steps of any width.
    for width in (4, 16):
        ready = catch_up(paused, width)
        np.testing.assert_array_equal(ready.drafter.length, paused.length - 1)
        np.testing.assert_array_equal(ready.cache.length, paused.cache.length)
        check_cache(ready.drafter, NEARBY.params.model, ready)
    # From here on it drafts as one that prefilled everything.
    fresh = dataclasses.replace(
        paused, drafter=NEARBY.drafter.init(3, paused.cache.capacity, jnp.float32)
    )
    fresh = catch_up(fresh, 16)
    ready, fresh = advance(ready, GAMMA, 6), advance(fresh, GAMMA, 6)
    np.testing.assert_array_equal(ready.tokens, fresh.tokens)
    np.testing.assert_array_equal(ready.trace.rounds, fresh.trace.rounds)
    last = [rounds.counted(ready, int(paused.length[row]), row) for row in range(3)]
    assert sum(int(counts.accepted.sum()) for counts in last) > 0
    # Nothing to do is done at once.
    same = catch_up(prefilled(), 16)
    np.testing.assert_array_equal(same.drafter.length, same.length - 1)


def test_permuted_rows_go_on_as_before() -> None:
    state = advance(prefilled(0.7), GAMMA, 2)
    order = jnp.array([2, 0, 1], jnp.int32)
    moved = jax.tree.map(lambda leaf: leaf[order], dataclasses.replace(state, drafter=()))
    moved = dataclasses.replace(moved, drafter=NEARBY.drafter.permute_rows(state.drafter, order))
    after, moved = advance(state, GAMMA, 4), advance(moved, GAMMA, 4)
    np.testing.assert_array_equal(moved.length, after.length[order])
    for row, source in enumerate([2, 0, 1]):
        end = int(moved.length[row])
        np.testing.assert_array_equal(moved.tokens[row, :end], after.tokens[source, :end])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_of_shorter_context_drafts_nothing_beyond_it(temperature: float) -> None:
    short = dataclasses.replace(TARGET.config, max_context=16)
    drafter = draft_model(short, TARGET.params)  # the target itself, so that all is accepted
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3)
    asked = [Request(prompt, params) for prompt in tiny.prompts(3)]  # 1, 9 and 20 tokens
    found = Decoder(TARGET, drafter, SpeculationConfig(GAMMA), batch_size=3).generate(asked)
    for request, completion in zip(asked, found, strict=True):
        assert len(completion.token_ids) == 40
        counts = completion.counts
        # Positions 0 .. 15 can be run, so the tokens at 1 .. 16 can be drafted. All are accepted.
        length, drafted = len(request.token_ids), 0
        while length <= 16:
            drafts = min(GAMMA, 17 - length)
            drafted += drafts
            length += drafts + 1
        assert counts.proposed.sum() == counts.accepted.sum() == drafted
    if temperature == 0:
        plain = Decoder(TARGET, batch_size=3).generate(asked)
        assert [c.token_ids for c in found] == [c.token_ids for c in plain]


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 61), (61, 64), (64, 68)])
def test_embeddings_padded_to_different_sizes(target_rows: int, draft_rows: int) -> None:
    # 61 real tokens; the padding rows are large, so that a leak would be seen at once.
    def padded(rows: int) -> tuple[ModelConfig, TransformerParams]:
        config = dataclasses.replace(TARGET.config, vocab_size=rows, token_count=61)
        more = jnp.full((rows - 61, config.hidden_size), 3.0, jnp.float32)
        params = dataclasses.replace(
            TARGET.params,
            embedding=jnp.concatenate([TARGET.params.embedding, more]),
            head=jnp.concatenate([TARGET.params.head, 50 * more]),
        )
        return config, params

    config, params = padded(target_rows)
    target = dataclasses.replace(TARGET, config=config, params=params)
    drafter = draft_model(*padded(draft_rows))
    rows = [
        SamplingParams(max_new_tokens=30, temperature=t, seed=i)
        for i, t in enumerate((0.0, 1.0, 3.0))
    ]
    asked = [Request(p, params) for p, params in zip(tiny.prompts(3), rows, strict=True)]
    found = Decoder(target, drafter, SpeculationConfig(2), batch_size=3).generate(asked)
    for completion in found:
        assert len(completion.token_ids) == 30
        assert max(completion.token_ids) < 61
        # The same weights draft, so only sampling in another order can reject.
        assert completion.counts.accepted.sum() == completion.counts.proposed.sum() > 0
    plain = Decoder(TARGET, batch_size=3).generate(asked[:1])
    assert found[0].token_ids == plain[0].token_ids


def test_early_exit_shares_the_targets_parameters() -> None:
    bound = early_exit(TARGET.config, TARGET.params, 1)
    assert bound.name == "early-exit-1l"
    assert len(bound.params.model.layers) == 1
    assert bound.params.model.layers[0] is TARGET.params.layers[0]
    assert bound.params.model.embedding is TARGET.params.embedding
    assert isinstance(bound.drafter, DraftModelDrafter)
    model = bound.drafter.model
    assert isinstance(model, Transformer)
    assert len(bound.drafter.init(2, 8, jnp.float32).keys) == 1


@pytest.mark.parametrize("layers", [0, 2, -1])
def test_early_exit_after_no_or_all_layers(layers: int) -> None:
    with pytest.raises(InputError, match="layers") as caught:
        early_exit(TARGET.config, TARGET.params, layers)
    assert caught.value.value == layers
    assert caught.value.remedy
