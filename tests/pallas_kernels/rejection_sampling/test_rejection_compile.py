"""The rejection-sampling kernels compiled for chips that are not here, at real vocabularies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rejection_sampling import (
    Bias,
    Drafts,
    Outcome,
    Penalties,
    Transforms,
    gpu,
    rejection_sampling,
    tpu,
)
from tests import compilers

EXPLICIT = jax.sharding.AxisType.Explicit
# V, T, B. `experiments.compile_facts` compiles for more.
SIZES = [
    (49152, 1, 32),
    (128256, 1, 1),
    (128256, 5, 8),
    (128256, 16, 32),
    (151936, 16, 1),
    (151936, 5, 32),
]


def abstract(
    batch: int, nodes: int, vocab: int, full: bool, dtype: Any = jnp.float32
) -> tuple[Any, Transforms, Drafts]:
    """Return abstract arguments: with every transform and a dense q or a tree a row, or plain."""

    def of(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    integer = jnp.int32
    transforms = Transforms(of(batch), of(batch, dtype=integer), of(batch), of(batch))
    if full:
        transforms = dataclasses.replace(
            transforms,
            bias=Bias(of(batch, 8, dtype=integer), of(batch, 8)),
            penalties=Penalties(
                of(batch),
                of(batch),
                of(batch),
                of(batch, vocab, dtype=jnp.bool_),
                of(batch, vocab, dtype=integer),
            ),
            forbidden=of(batch, nodes, 4, dtype=integer),
            allowed=of(batch, nodes, vocab // 32, dtype=jnp.uint32),
        )
    trees = full and (nodes, batch) == (16, 1)
    rows = (batch,) if trees else ()
    drafts = Drafts(
        of(batch, nodes - 1, dtype=integer),
        of(batch, nodes - 1, dtype=jnp.bool_),
        of(*rows, nodes, dtype=integer),
        of(*rows, nodes, 1, dtype=jnp.uint32),
        of(batch, nodes - 1, vocab) if full and nodes > 1 and not trees else None,
    )
    return of(batch, nodes, vocab, dtype=dtype), transforms, drafts


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(("vocab", "nodes", "batch"), SIZES)
def test_tpu(chip: str, vocab: int, nodes: int, batch: int, full: bool) -> None:
    device = compilers.tpu(chip)
    mesh = jax.sharding.Mesh(np.array([device]), ("x",), axis_types=(EXPLICIT,))
    sharding = jax.sharding.SingleDeviceSharding(device)
    dtype = jnp.float32 if full else jnp.bfloat16
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract(batch, nodes, vocab, full, dtype),
    )
    assert tpu.supports(*arguments) is None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(tpu.statistics).trace(*arguments).lower(lowering_platforms=("tpu",))
    memory = lowered.compile().memory_analysis()
    print(
        f"{chip} V {vocab} T {nodes} B {batch} {'all' if full else 'no'} transforms, compiled only:"
        f" at most {tpu.vmem_bytes(*arguments) / 2**20:.1f} MiB VMEM,"
        f" {memory.temp_size_in_bytes} bytes of scratch in HBM"
    )
    # Small tables of numbers a node, and no probabilities. Arguments may come in another layout
    # than the kernel's, which costs a copy here that their producer would save.
    padded = 16 * -(-nodes // 16) * batch * vocab * 4
    assert memory.temp_size_in_bytes <= (padded if full else 2**21) + 2**22
    assert memory.output_size_in_bytes < 2**20


def test_a_walk_writes_rows_alone() -> None:
    batch, nodes, vocab = 32, 16, 128256  # too much for VMEM
    device = compilers.tpu("v5e")
    logits, transforms, drafts = abstract(batch, nodes, vocab, False)
    laws: Any = jax.ShapeDtypeStruct((batch, nodes, vocab), jnp.float32)
    drafts = dataclasses.replace(drafts, log_q=laws, drawn="without replacement")
    coins = jax.ShapeDtypeStruct((batch, nodes - 1), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def verify(logits: Any, transforms: Any, drafts: Any, coins: Any, key: Any) -> Outcome:
        def noise(node: jax.Array) -> jax.Array:
            keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(node)
            return jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32))(keys)

        return rejection_sampling(logits, transforms, drafts, coins, noise, implementation="tpu")

    mesh = jax.sharding.Mesh(np.array([device]), ("x",), axis_types=(EXPLICIT,))
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (logits, transforms, drafts, coins, key),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(verify).trace(*arguments).lower(lowering_platforms=("tpu",))
    memory = lowered.compile().memory_analysis()
    row = batch * vocab * 4
    print(f"v5e, whole op, compiled only: {memory.temp_size_in_bytes / row:.1f} rows of a batch")
    assert memory.temp_size_in_bytes < 10 * row


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("vocab", "nodes", "batch"), SIZES[1:5])
def test_h100(vocab: int, nodes: int, batch: int, full: bool, tmp_path: Path) -> None:
    arguments = abstract(batch, nodes, vocab, full)
    assert gpu.supports(*arguments) is None
    lowered = jax.jit(gpu.statistics).trace(*arguments).lower(lowering_platforms=("cuda",))
    (kernel,) = compilers.triton_kernels(lowered)
    found = compilers.compile_for_h100(kernel, tmp_path)
    print(f"H100 V {vocab} T {nodes} B {batch} full {full}, compiled only: {found}")
    assert found.spilled == 0
    assert found.registers <= 128  # 16 warps of them fill a multiprocessor
    assert found.shared_memory <= 8192
