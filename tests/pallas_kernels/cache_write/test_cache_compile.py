"""The cache kernels compiled for chips that are not here, at the shapes of real models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_commit import gpu as commit_gpu
from pallas_kernels.cache_commit import tpu as commit_tpu
from pallas_kernels.cache_write import gpu as write_gpu
from pallas_kernels.cache_write import tpu as write_tpu
from tests import compilers
from tests.oracles import hlo

EXPLICIT = jax.sharding.AxisType.Explicit
# B, G, S, H, T: SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B, a share of it, a share of Gemma-3-27B.
SIZES = [
    (1, 3, 2048, 64, 5),
    (8, 8, 8192, 64, 16),
    (32, 8, 8192, 128, 5),
    (8, 8, 8192, 128, 64),
    (64, 1, 32768, 128, 1),
    (8, 2, 8192, 256, 16),
]
Case = tuple[int, int, int, int, int]


def call(op: str, backend: str, case: Case, dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    batch, heads, slots, head_dim, nodes = case
    cache = jax.ShapeDtypeStruct((batch, heads, slots, head_dim), dtype)
    start = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if op == "write":
        entries = jax.ShapeDtypeStruct((batch, nodes, heads, head_dim), dtype)
        module: Any = {"tpu": write_tpu, "gpu": write_gpu}[backend]
        return module.cache_write, [cache, entries, start]
    path = jax.ShapeDtypeStruct((batch, min(nodes, 6)), jnp.int32)
    module = {"tpu": commit_tpu, "gpu": commit_gpu}[backend]
    return functools.partial(module.cache_commit, nodes=nodes), [cache, start, path]


@pytest.mark.parametrize("op", ["write", "commit"])
@pytest.mark.parametrize(
    ("case", "dtype", "chip"),
    [
        *((case, jnp.bfloat16, "v5e") for case in SIZES),
        *((case, jnp.float32, "v6e") for case in SIZES[1:3]),
        (SIZES[2], jnp.bfloat16, "v6e"),
    ],
    ids=str,
)
def test_tpu_writes_in_place(op: str, dtype: Any, chip: str, case: Case) -> None:
    device = compilers.tpu(chip)
    mesh = jax.sharding.Mesh(np.array([device]), ("x",), axis_types=(EXPLICIT,))
    sharding = jax.sharding.SingleDeviceSharding(device)
    function, arguments = call(op, "tpu", case, dtype)
    arguments = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in arguments
    ]

    def rounds(cache: jax.Array, count: jax.Array, *rest: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, cache: function(cache, *rest), cache)

    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = (
            jax.jit(rounds, donate_argnums=0)
            .trace(arguments[0], count, *arguments[1:])
            .lower(lowering_platforms=("tpu",))
        )
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    size = arguments[0].size * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes == size
    copies = [
        write
        for write in hlo.loop_writes(compiled.as_text())
        if write.op in ("copy", "transpose") and write.size == arguments[0].size
    ]
    assert copies == []
    if case[3] % 128 == 0:
        assert memory.temp_size_in_bytes < size / 20
    else:
        # XLA keeps a program's arguments without the padding to 128 lanes that Mosaic wants, so
        # the cache changes its layout at the program's start and end; not in its loop.
        assert memory.temp_size_in_bytes < 2.2 * size


@pytest.mark.parametrize("op", ["write", "commit"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_h100(op: str, head_dim: int, tmp_path: Path) -> None:
    function, arguments = call(op, "gpu", (8, 8, 8192, head_dim, 16), jnp.bfloat16)
    lowered = (
        jax.jit(function, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",))
    )
    (kernel,) = compilers.triton_kernels(lowered)
    found = compilers.compile_for_h100(kernel, tmp_path)
    print(f"H100 cache_{op} H {head_dim}, compiled only: {found}")
    assert found.spilled == 0
    assert found.registers <= 64
    assert found.shared_memory == 0
