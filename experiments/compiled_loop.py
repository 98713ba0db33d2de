"""The whole loop compiled for a chip that is not here: real models' shapes, weights never made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments import compilers
from experiments.kernel_loop import LLAMA_1B, LLAMA_8B
from jspec.config import ModelConfig, SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.ngram import ngram
from jspec.generation import Decoder, run_chunk
from jspec.model import Model
from jspec.models import parameters
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from jspec.state import DecodeState
from pallas_kernels.dispatch import Kernels


@dataclasses.dataclass(frozen=True)
class Whole:
    """A chunk of rounds of a model on a chip, bfloat16, with sampling in it.

    Attributes:
        chip: one of `compilers.TPUS`, or "h100".
        config: the model.
        rows: B.
        slots: S.
        gamma: drafts a round.
        drafter: proposes them.
    """

    chip: str
    config: ModelConfig
    rows: int = 8
    slots: int = 8192
    gamma: int = 4
    drafter: BoundDrafter = dataclasses.field(default_factory=ngram)

    @property
    def name(self) -> str:
        """For test ids and tables."""
        shape = f"{self.config.num_layers}l-B{self.rows}-T{self.gamma + 1}-S{self.slots}"
        return f"{self.config.name}-{shape}-{self.drafter.name}"

    @property
    def logits_bytes(self) -> int:
        """Bytes of a round's float32 logits, the largest array beside weights and caches."""
        return self.rows * (self.gamma + 1) * self.config.vocab_size * 4


WHOLE = (
    Whole("v5e", LLAMA_1B),
    Whole("v5p", LLAMA_8B),
    Whole("v6e", LLAMA_8B),
    Whole("h100", LLAMA_8B),
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of it.

    Attributes:
        text: the optimized HLO.
        arguments: bytes.
        aliased: bytes of arguments that the results take the place of.
        scratch: bytes beside arguments and results.
        caches: bytes of the caches, the drafter's too.
        cache_sizes: how many elements one layer's keys have.
        state: abstract.
    """

    text: str
    arguments: int
    aliased: int
    scratch: int
    caches: int
    cache_sizes: frozenset[int]
    state: DecodeState


@functools.cache
def compile_chunk(whole: Whole) -> Compiled:
    """Compile the chunk.

    Raises:
        compilers.UnavailableError: the chip's compiler is not here.
    """
    gpu = whole.chip == "h100"
    platform = "cuda" if gpu else "tpu"
    device = compilers.h100() if gpu else compilers.tpu(whole.chip)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    params = parameters.abstract(whole.config, jnp.bfloat16)
    model = Model(whole.config.name, whole.config, params, None, (2,), Kernels(platform=platform))
    speculation = SpeculationConfig(whole.gamma)
    decoder = Decoder(model, whole.drafter, speculation, batch_size=whole.rows)
    scratch = whole.drafter.drafts or 0
    sampling = SamplingParams(
        max_new_tokens=whole.slots - scratch - 3, temperature=1.0, top_p=0.9, seed=1
    )
    asked = [Request((1, 2, 3), sampling)] * whole.rows
    state = jax.eval_shape(lambda: decoder.new_state(asked))
    assert state.cache.capacity == whole.slots
    where = compilers.as_on_an_h100() if gpu else compilers.as_on(device)
    with jax.default_matmul_precision("default"), where:
        traced = run_chunk.trace(
            program=decoder._program,
            params=placed(params),
            drafter_params=placed(jax.eval_shape(lambda: decoder._drafter_params)),
            state=placed(state),
            max_rounds=placed(jax.ShapeDtypeStruct((), jnp.int32)),
            until_finish=placed(jax.ShapeDtypeStruct((), jnp.bool_)),
        )
        lowered = traced.lower(lowering_platforms=(platform,))
        options: contextlib.AbstractContextManager[dict[str, str]]
        options = compilers.h100_options() if gpu else contextlib.nullcontext({})
        with options as given:
            compiled = lowered.compile(given)
    memory = compiled.memory_analysis()
    caches = [leaf for leaf in jax.tree.leaves((state.cache, state.drafter)) if leaf.ndim == 4]
    return Compiled(
        text=compiled.as_text(),
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        scratch=memory.temp_size_in_bytes,
        caches=sum(leaf.size * leaf.dtype.itemsize for leaf in caches),
        cache_sizes=frozenset(leaf.size for leaf in caches),
        state=state,
    )
