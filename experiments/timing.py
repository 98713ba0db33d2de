"""Measuring step times, rounds and bandwidth: interleaved, medians, on donated buffers."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import trees
from jspec.cache import KVCache
from jspec.decoding import Target
from jspec.generation import Decoder, run_chunk, run_prefill
from jspec.model import Model
from jspec.requests import Request
from jspec.state import DecodeState


@functools.partial(jax.jit, static_argnames=("target", "nodes", "steps"), donate_argnames="cache")
def _steps(
    target: Target, nodes: int, steps: int, params: Any, tokens: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Run `steps` forward passes with logits; each feeds the next, so none can be skipped."""
    topology = trees.chain(nodes - 1)

    def body(_: Any, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        tokens, cache = carry
        hidden, cache, _ = target.forward(params, tokens, cache, topology)
        logits = target.logits(params, hidden)
        # Every logit must be needed, or XLA would not compute it.
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return best.reshape(tokens.shape), kv.commit(cache, jnp.ones_like(cache.length))

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))


def step_timer(
    model: Model, batch: int, nodes: int, capacity: int, context: int, steps: int
) -> Callable[[], float]:
    """Return a function that measures seconds a forward pass of `nodes` tokens in each row.

    Args:
        model: the target.
        batch: rows B.
        nodes: tokens a row and pass.
        capacity: cache slots a row.
        context: committed entries of each row at the start.
        steps: passes a measurement.
    """
    dtype = model.cache_dtype
    tokens = jnp.ones((batch, nodes), jnp.int32)

    def measure() -> float:
        cache = model.functions.init_cache(batch, capacity, dtype)
        length = jnp.full(batch, context, jnp.int32)
        cache = jax.block_until_ready(dataclasses.replace(cache, length=length))
        start = time.perf_counter()
        jax.block_until_ready(_steps(model.functions, nodes, steps, model.params, tokens, cache))
        return (time.perf_counter() - start) / steps

    return measure


def prefilled(decoder: Decoder, request: Request, batch: int = 1) -> DecodeState:
    """Return the state of `batch` rows of a request after its prefill."""
    program = decoder._program
    return run_prefill(
        target=program.target,
        drafter=program.drafter,
        width=min(128, len(request.token_ids)),
        params=decoder.target.params,
        drafter_params=decoder._drafter_params,
        state=decoder.new_state([request] * batch),
    )


def round_timer(decoder: Decoder, request: Request, batch: int, rounds: int) -> Callable[[], float]:
    """Return a function that measures seconds a round of `decoder` after a prefill of `request`.

    The request must leave room for `rounds` full rounds.
    """
    program = decoder._program
    drafter_params = decoder._drafter_params

    def measure() -> float:
        state = jax.block_until_ready(prefilled(decoder, request, batch))
        start = time.perf_counter()
        state, done = run_chunk(
            program=program,
            params=decoder.target.params,
            drafter_params=drafter_params,
            state=state,
            max_rounds=np.int32(rounds),
            until_finish=np.bool_(False),
        )
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / int(done)

    return measure


def warm_up(decoders: Sequence[Decoder], request: Request) -> None:
    """Compile and run every program that decoding the request takes, as shortly as possible."""
    short = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, max_new_tokens=2)
    )
    for decoder in decoders:
        same_bucket = decoder.capacity([short]) == decoder.capacity([request])
        decoder.generate([short if same_bucket else request])


@jax.jit
def _read(arrays: Any) -> jax.Array:
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(arrays)), start=jnp.float32(0))


def weight_bytes(params: Any) -> int:
    """Return bytes of all parameters."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))


def read_timer(params: Any) -> Callable[[], float]:
    """Return a function that measures seconds to read every parameter once (a sum)."""

    def measure() -> float:
        start = time.perf_counter()
        jax.block_until_ready(_read(params))
        return time.perf_counter() - start

    return measure


def interleave(timers: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run the timers in turn, `repeats` times over, after one unmeasured turn that compiles.

    Interleaving lets slow spells of the machine hit all alike.
    """
    for timer in timers.values():
        timer()
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            samples[name].append(timer())
    return samples


def ratio(samples: Mapping[str, list[float]], over: str, under: str) -> float:
    """Return the median over turns of one timer's seconds over another's, turn by turn."""
    return float(np.median(np.array(samples[over]) / np.array(samples[under])))
