"""The whole loop timed on the accelerator: T(B, rows) of a Llama with random weights."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.constant_drafter import ConstantDrafter
from experiments.kernel_budget import Compiler, Deadline, NotReached, quick_flags, result, said
from experiments.kernel_speed import repeated
from jspec import admission, decoding
from jspec.config import ModelConfig, RopeConfig
from jspec.decoding import Program
from jspec.drafting.ngram import NGramDrafter
from jspec.drafting.protocol import Context
from jspec.model import Model
from jspec.models import parameters
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from pallas_kernels.dispatch import KERNEL_OF, Kernels

# From each model's config.json.
LLAMA_8B = ModelConfig(
    name="llama-3.1-8b",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=131072,
    rope=RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_context=8192),
)
LLAMA_1B = dataclasses.replace(
    LLAMA_8B,
    name="llama-3.2-1b",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    head_dim=64,
    rope=dataclasses.replace(LLAMA_8B.rope, factor=32.0),
    tie_embeddings=True,
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        config: the model.
        batches: B, the most important first.
        nodes: rows of a pass, T: the pending token and T - 1 drafts.
        slots: of the cache.
        room: slots that are free at the start of every measurement.
        rounds: of a measurement.
        turns: interleaved measurements of each program.
        drafts: of the proposals whose cost is measured.
        dtype: of weights and cache.
        flags: of XLA.
    """

    config: ModelConfig = LLAMA_8B
    batches: tuple[int, ...] = (8, 32, 1)
    nodes: tuple[int, ...] = (1, 5, 17, 2, 9)
    slots: int = 8192
    room: int = 256
    rounds: int = 8
    turns: int = 3
    drafts: int = 8
    dtype: Any = jnp.bfloat16
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def that_fits(memory: int | None) -> Scale:
    """Return the largest scale for so many bytes of the device's memory; None is unknown."""
    scale = Scale(flags=quick_flags())
    if memory is None or memory > 80e9:
        return scale
    if memory > 28e9:
        return dataclasses.replace(scale, batches=(8, 1))
    return dataclasses.replace(scale, config=LLAMA_1B, batches=(8, 1))


def model_with(config: ModelConfig, params: Any, implementation: Any) -> Model:
    """Return the model whose programs ask for the implementation."""
    # As everybody's programs ask: what no kernel can run goes to XLA, and is on record.
    asked: Any = "auto" if implementation in KERNEL_OF.values() else implementation
    return Model(config.name, config, params, None, (), Kernels(asked))


def chunk(model: Model, nodes: int) -> Callable[..., Any]:
    """Return the decoding loop as a function of (params, state, rounds)."""
    drafter = ConstantDrafter() if nodes > 1 else None
    target = model.functions
    program = Program(target, drafter, nodes - 1, kernels=target.kernels)

    def run(params: Any, state: DecodeState, rounds: jax.Array) -> tuple[DecodeState, jax.Array]:
        return decoding.decode_chunk(program, params, (), state, rounds, jnp.bool_(False))

    return run


def new_state(model: Model, batch: int, scale: Scale) -> DecodeState:
    """Return rows that are `room` short of full, over a cache of zeros."""
    ids = tuple(index % model.config.vocab_size for index in range(scale.slots - scale.room))
    sampling = SamplingParams(max_new_tokens=scale.room, seed=1)
    requests = [Request(ids, sampling)] * batch
    state = admission.new_state(model, None, requests, batch, scale.dtype)
    return dataclasses.replace(
        state, cache=dataclasses.replace(state.cache, length=state.length - 1)
    )


def propose(model: Model, scale: Scale) -> Callable[..., Any]:
    """Return n-gram drafting as a function of (tokens, length, sampling, keys)."""

    def run(tokens: Any, length: Any, sampling: Any, keys: Any) -> Any:
        context = Context(
            tokens=tokens,
            length=length,
            room=jnp.full_like(length, scale.drafts),
            sampling=sampling,
            keys=keys,
            vocab_size=model.config.vocab_size,
        )
        proposal, _ = NGramDrafter().propose((), (), context, scale.drafts)
        return proposal.tokens, proposal.valid

    return run


def run(
    implementation: str,
    compiler: Compiler,
    scale: Scale,
    deadline: Deadline,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Yield a row for each batch and number of nodes, and one a batch for drafting.

    Args:
        implementation: of the kernels, beside XLA.
        compiler: of the programs.
        scale: how much is measured.
        deadline: past it rows say that they were not reached.
        progress: told what is going on.
    """
    config = scale.config
    compiling = deadline.earlier(0.65 * deadline.left())
    futures: dict[tuple[int, int, str], Any] = {}
    abstract = parameters.abstract(config, scale.dtype)
    for batch in scale.batches:
        for nodes in scale.nodes:
            for way, name in (("kernel", implementation), ("xla", "xla")):
                futures[batch, nodes, way] = _submit(
                    compiler, config, abstract, name, batch, nodes, scale
                )
    progress(f"filling {config.name} with random weights")
    params = jax.block_until_ready(parameters.initialize(config, jax.random.key(0), scale.dtype))
    ready: dict[tuple[int, int, str], Any] = {}
    errors: dict[tuple[int, int, str], str] = {}
    for key, future in futures.items():
        progress(f"compiling the loop, B {key[0]}, {key[1]} rows, {key[2]}")
        try:
            if isinstance(future, Exception):
                raise future
            ready[key] = result(future, compiling)
        except Exception as error:
            errors[key] = said(error)
    compiler.settle()
    models = {
        way: model_with(config, params, name)
        for way, name in (("kernel", implementation), ("xla", "xla"))
        if any(key[2] == way for key in ready)
    }
    for batch in scale.batches:
        yield from _batch(models, params, batch, scale, ready, errors, deadline, progress)


def _submit(
    compiler: Compiler,
    config: ModelConfig,
    params: Any,
    implementation: Any,
    batch: int,
    nodes: int,
    scale: Scale,
) -> concurrent.futures.Future[Any] | Exception:
    try:
        model = model_with(config, params, implementation)
        state = jax.eval_shape(functools.partial(new_state, model, batch, scale))
        rounds = jax.ShapeDtypeStruct((), jnp.int32)
        return compiler.submit(
            chunk(model, nodes), params, state, rounds, flags=scale.flags, donate_argnums=1
        )
    except Exception as error:
        return error


def _batch(
    models: dict[str, Model],
    params: Any,
    batch: int,
    scale: Scale,
    ready: dict[tuple[int, int, str], Any],
    errors: dict[tuple[int, int, str], str],
    deadline: Deadline,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure one batch's programs in turn, all on the same state where its shape is the same."""
    mine = {key: compiled for key, compiled in ready.items() if key[0] == batch}
    samples: dict[tuple[int, int, str], list[float]] = {}
    drafting: float | None = None
    problem: str | None = None
    states: dict[Any, DecodeState] = {}
    try:
        if not mine or deadline.left() == 0:
            raise NotReached
        progress(f"timing the loop, B {batch}")
        shape_of = {
            way: jax.eval_shape(functools.partial(new_state, model, batch, scale))
            .cache.keys[0]
            .shape
            for way, model in models.items()
        }
        for way, model in models.items():
            if shape_of[way] not in states:
                states[shape_of[way]] = jax.block_until_ready(new_state(model, batch, scale))
        some = next(iter(states.values()))
        bare = dataclasses.replace(some.cache, keys=(), values=())
        small = jax.device_get(dataclasses.replace(some, cache=bare))
        length = np.asarray(some.cache.length)
        for turn in range(scale.turns + 1):
            for key, compiled in mine.items():
                if deadline.left() == 0:
                    continue
                cache = states.pop(shape_of[key[2]]).cache
                cache = dataclasses.replace(cache, length=jnp.asarray(length))
                fresh = dataclasses.replace(jax.tree.map(jnp.asarray, small), cache=cache)
                fresh = jax.block_until_ready(fresh)
                start = time.perf_counter()
                state, done = compiled(params, fresh, np.int32(scale.rounds))
                jax.block_until_ready(state)
                seconds = time.perf_counter() - start
                states[shape_of[key[2]]] = state
                if turn > 0:
                    samples.setdefault(key, []).append(seconds / int(done))
        drafting = _drafting(next(iter(models.values())), small, scale)
    except Exception as error:  # the state went with the program that failed
        problem = said(error)
    for nodes in scale.nodes:
        row: Row = {"batch": batch, "nodes": nodes, "seconds": {}, "samples": {}, "errors": {}}
        for way in ("kernel", "xla"):
            key = (batch, nodes, way)
            if key in samples:
                row["samples"][way] = samples[key]
                row["seconds"][way] = float(np.median(samples[key]))
            else:
                row["errors"][way] = errors.get(key) or problem or said(NotReached())
        yield row
    if drafting is not None:
        yield {"batch": batch, "drafting": drafting, "drafts": scale.drafts}


def _drafting(model: Model, small: DecodeState, scale: Scale) -> float:
    """Return seconds of one n-gram proposal on the device."""
    rounds = 50
    keys = jnp.zeros((small.length.shape[0], 2), jnp.uint32)
    program = jax.jit(repeated(propose(model, scale), rounds))
    operands = jax.tree.map(jnp.asarray, (small.tokens, small.length, small.sampling, keys))
    samples = []
    for _ in range(scale.turns + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(operands))
        samples.append((time.perf_counter() - start) / rounds)
    return float(np.median(samples[1:]))
