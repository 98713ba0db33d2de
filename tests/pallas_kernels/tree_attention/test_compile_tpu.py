"""The TPU kernel compiled for real models' shapes, where libtpu is installed; no TPU is needed."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import shapes, tree_attention
from pallas_kernels.tree_attention import tpu
from tests import compilers


def compiled(
    chip: str,
    case: shapes.Case,
    *,
    dtype: Any = jnp.bfloat16,
    page: int | None = None,
    own_trees: bool = False,
    softcap: float | None = None,
) -> Any:
    """Compile the op as "auto" has it for the chip."""
    sharding = jax.sharding.SingleDeviceSharding(compilers.tpu(chip))
    model, words = case.model, -(-case.nodes // 32)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    cache: tuple[int, ...] = (case.batch, model.groups, case.slots, model.head_dim)
    table = None
    if page is not None:
        count = case.slots // page
        cache = (case.batch * count + 1, model.groups, page, model.head_dim)
        table = array((case.batch, count), jnp.int32)
    tree = (case.nodes, words)

    def attention(table: Any, *arrays: Any) -> jax.Array:
        return tree_attention.tree_attention(
            *arrays, block_table=table, window=model.window, softcap=softcap
        )

    arguments = [
        table,
        array((case.batch, case.nodes, model.heads, model.head_dim), dtype),
        array(cache, dtype),
        array(cache, dtype),
        array((case.batch,), jnp.int32),
        array((case.batch, *tree) if own_trees else tree, jnp.uint32),
    ]
    with jax.default_matmul_precision("default"):
        lowered = jax.jit(attention).trace(*arguments).lower(lowering_platforms=("tpu",))
        program = lowered.compile()
    check(program, case, cache, jnp.dtype(dtype).itemsize)
    return program


def check(program: Any, case: shapes.Case, cache: tuple[int, ...], itemsize: int) -> None:
    """The kernel is in it once, and nothing else writes an array as large as the keys."""
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    size = math.prod(cache)
    written = [
        line.strip()[:150]
        for line in text.splitlines()
        if (found := re.search(r"= \(?\w+\[([\d,]+)\].*? ([a-z][\w-]*)\(", line))
        and math.prod(map(int, found[1].split(","))) == size
        and found[2] not in ("parameter", "bitcast", "get-tuple-element")
    ]
    assert written == []
    memory = program.memory_analysis()
    output = case.batch * case.nodes * case.model.heads * case.model.head_dim * itemsize
    # Where the head dimension is below 128, the folded query and the output are padded.
    assert memory.temp_size_in_bytes < 0.05 * 2 * size * itemsize + 16 * output + 2**18


@pytest.mark.parametrize("case", shapes.spread(9), ids=lambda case: case.name)
def test_real_models_compile_for_v5e(case: shapes.Case) -> None:
    compiled("v5e", case)


@pytest.mark.parametrize("chip", ["v6e", "v5p"])
@pytest.mark.parametrize("case", shapes.spread(4), ids=lambda case: case.name)
def test_real_models_compile_for_other_generations(chip: str, case: shapes.Case) -> None:
    compiled(chip, case)


def test_the_largest_tiles_fit_into_vector_memory() -> None:
    model = shapes.AttentionShape("wide", 32, 4, 256, 1, window=1024)
    case = shapes.Case(model, 2, 128, 8192)
    compiled("v5e", case, dtype=jnp.float32, softcap=50.0, own_trees=True)


@pytest.mark.parametrize(("head_dim", "page"), [(128, 16), (256, 64), (64, 128), (96, 256)])
def test_paged_caches_compile(head_dim: int, page: int) -> None:
    case = shapes.Case(shapes.AttentionShape("paged", 16, 4, head_dim, 1), 4, 16, 4096)
    compiled("v5e", case, page=page)


def test_what_a_tiling_plans_is_within_what_it_asks_for() -> None:
    for case in shapes.CASES:
        model = case.model
        query = jax.ShapeDtypeStruct(
            (case.batch, case.nodes, model.heads, model.head_dim), jnp.bfloat16
        )
        keys = jax.ShapeDtypeStruct(
            (case.batch, model.groups, case.slots, model.head_dim), jnp.bfloat16
        )
        problem = tree_attention.describe(query, keys, window=model.window)
        assert tpu.supports(problem) is None
        cut = tpu.tiling(problem)
        assert cut is not None
        assert cut.vmem <= tpu.PLANNED_VMEM < tpu.VMEM_LIMIT
        assert model.groups % cut.groups == 0
        # Two cores can share the heads.
        assert model.groups == 1 or model.groups // cut.groups >= 2
