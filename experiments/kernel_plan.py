"""Which cases the kernels experiment takes, the most important first."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from experiments import kernel_loop, kernel_speed
from experiments.kernel_cases import Attention, Cache, Case, Rejection, case
from jspec.config import ModelConfig
from pallas_kernels import shapes

LLAMA_VOCABULARY = 128256


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one run does, and how long each part may take.

    Attributes:
        checked: cases compared with the reference.
        implementations: of the kernels that are compared; the last one is timed.
        timed: cases that are timed.
        speed: how much of each.
        loop: the whole loop, or None.
        seconds: of checks, timed ops and loop.
    """

    checked: tuple[Case, ...]
    implementations: tuple[str, ...]
    timed: tuple[Case, ...] = ()
    speed: kernel_speed.Scale = dataclasses.field(default_factory=kernel_speed.Scale)
    loop: kernel_loop.Scale | None = None
    seconds: tuple[float, float, float] = (30.0, 55.0, 130.0)


def full(kernel: str, memory: int | None) -> Plan:
    """Return the plan for an accelerator.

    Args:
        kernel: the platform's implementation.
        memory: bytes of the device, None where it is not known.
    """
    scale = kernel_loop.that_fits(memory)
    small = memory is not None and memory < 30e9
    timed: list[Case] = [
        Attention(case("llama-3.1-8b", 8, 5, 8192), tree=False),
        Attention(case("llama-3.1-8b", 1, 5, 8192), tree=False),
        Rejection(LLAMA_VOCABULARY, 8, 5),
        Rejection(LLAMA_VOCABULARY, 8, 5, "top-p"),
        Attention(case("llama-3.1-8b", 8, 1, 8192), tree=False),
        Attention(case("llama-3.1-8b", 32, 5, 8192), tree=False),
        Attention(case("llama-3.1-70b-tp8", 8, 16, 32768)),
        Cache(case("llama-3.1-8b", 8, 5, 8192), "cache_write"),
        Cache(case("llama-3.1-8b", 8, 16, 8192), "cache_commit"),
        Attention(case("llama-3.1-8b", 1, 16, 32768)),
        Attention(case("llama-3.1-8b", 8, 64, 8192)),
        Rejection(LLAMA_VOCABULARY, 32, 5),
        Rejection(LLAMA_VOCABULARY, 32, 5, "top-p"),
        Rejection(LLAMA_VOCABULARY, 1, 5),
        Attention(case("llama-3.1-8b", 8, 5, 8192), lengths="ragged"),
        Attention(case("llama-3.1-8b", 8, 5, 8192), page=64),
        Attention(case("llama-3.2-1b", 8, 5, 8192), tree=False),
        Attention(case("gemma-3-27b-tp8", 8, 5, 8192), tree=False),
        Rejection(LLAMA_VOCABULARY, 8, 16, "top-p", law=False),
        Rejection(LLAMA_VOCABULARY, 8, 5, "all"),
        Cache(case("llama-3.1-8b", 32, 5, 8192), "cache_write"),
    ]
    if small:
        timed = [each for each in timed if not isinstance(each, Attention) or each.case.batch < 32]
    return Plan(_checked(), (kernel,), tuple(timed), kernel_speed.Scale(), scale)


def _checked() -> tuple[Case, ...]:
    soft = dataclasses.replace(
        case("llama-3.1-8b", 4, 33, 2048),
        model=shapes.AttentionShape("wide", 16, 4, 256, 1, window=700),
    )
    odd = shapes.Case(shapes.AttentionShape("odd", 16, 4, 96, 1), 4, 40, 1024)
    return (
        Attention(case("llama-3.1-8b", 8, 5, 2048), lengths="ragged"),
        Rejection(LLAMA_VOCABULARY, 8, 5, "top-p", greedy=True),
        Cache(case("llama-3.1-8b", 8, 5, 2048), "cache_write"),
        Cache(case("llama-3.1-8b", 8, 16, 2048), "cache_commit"),
        Attention(case("llama-3.1-8b", 1, 1, 8192), lengths="full", tree=False),
        Attention(case("llama-3.1-8b", 8, 16, 2048), jnp.float32, lengths="ragged"),
        Rejection(LLAMA_VOCABULARY, 8, 16, "all", law=False, greedy=True),
        Rejection(LLAMA_VOCABULARY, 8, 8, "all", drawn="without replacement", greedy=True),
        Rejection(LLAMA_VOCABULARY, 8, 8, "top-p", drawn="with replacement", greedy=True),
        Attention(case("smollm2-135m", 8, 16, 2048), lengths="ragged", page=16),
        Attention(soft, lengths="ragged", softcap=30.0),
        Attention(odd, lengths="ragged"),
        Rejection(LLAMA_VOCABULARY, 32, 1, "top-p", dtype=jnp.bfloat16),
        Attention(case("llama-3.1-70b-tp8", 8, 64, 2048), lengths="ragged"),
        Rejection(262208, 4, 5, "all", greedy=True),
        Attention(case("gemma-3-27b-tp8", 8, 5, 2048), lengths="ragged"),
        Cache(case("llama-3.2-1b", 8, 5, 2048), "cache_write", jnp.float32),
        Cache(case("smollm2-135m", 8, 16, 2048), "cache_commit", jnp.float32),
        Rejection(49152, 32, 5, "none"),
    )


_TINY = shapes.AttentionShape("tiny", 4, 2, 64, 1)


def interpreted() -> Plan:
    """Return what a CPU can do: compare the kernels' own code, interpreted, on small shapes."""
    checked = (
        Attention(shapes.Case(_TINY, 3, 5, 256), lengths="ragged"),
        Attention(shapes.Case(_TINY, 2, 3, 256), jnp.float32, lengths="ragged", page=128),
        Rejection(300, 3, 5, "all", law=False, greedy=True),
        Cache(shapes.Case(_TINY, 3, 4, 128), "cache_write"),
        Cache(shapes.Case(_TINY, 3, 6, 128), "cache_commit", jnp.float32),
        Rejection(300, 4, 6, "all", drawn="without replacement", greedy=True),
    )
    return Plan(checked, ("tpu_interpret", "gpu_interpret"), seconds=(120.0, 0.0, 0.0))


def rehearsal() -> Plan:
    """Return a run of every part at sizes that mean nothing, to try the experiment itself."""
    small = shapes.Case(_TINY, 2, 3, 128)
    write, commit = Cache(small, "cache_write"), Cache(small, "cache_commit")
    attention, rejection = Attention(small, tree=False), Rejection(300, 2, 2)
    config = ModelConfig(
        name="tiny",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        max_context=128,
    )
    return Plan(
        checked=(attention, commit),
        implementations=("gpu_interpret",),
        timed=(attention, rejection, write),
        speed=kernel_speed.Scale(stream=2**20, apart=1, seconds=1e-9, turns=1),
        loop=kernel_loop.Scale(
            config, (2,), (2,), slots=128, room=64, rounds=2, turns=1, drafts=3, dtype=jnp.float32
        ),
        seconds=(60.0, 60.0, 60.0),
    )
