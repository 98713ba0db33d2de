"""The GPU kernels compiled for an H100 at real models' shapes; no GPU is needed.

Lowering needs JAX alone. Machine code needs the triton package, and is skipped without it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import shapes, tree_attention
from pallas_kernels.tree_attention import triton
from pallas_kernels.tree_attention.operands import Problem
from tests import compilers

# Deprecated from JAX 0.11 on; `triton` is what stays.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

REGISTERS = 255
WIDE = shapes.AttentionShape("wide", 16, 4, 256, 1, window=1024)
ODD = shapes.AttentionShape("odd", 16, 4, 96, 1)
LLAMA = shapes.AttentionShape("llama", 32, 8, 128, 1)


def operands(case: shapes.Case, dtype: Any, page: int | None) -> tuple[Any, ...]:
    """The op's abstract operands, the block table (or None) last."""
    model, array = case.model, jax.ShapeDtypeStruct
    cache: tuple[int, ...] = (case.batch, model.groups, case.slots, model.head_dim)
    table = None
    if page is not None:
        count = case.slots // page
        cache = (case.batch * count + 1, model.groups, page, model.head_dim)
        table = array((case.batch, count), jnp.int32)  # type: ignore[no-untyped-call]
    shapes_and_dtypes = (
        ((case.batch, case.nodes, model.heads, model.head_dim), dtype),
        (cache, dtype),
        (cache, dtype),
        ((case.batch,), jnp.int32),
        ((case.nodes, -(-case.nodes // 32)), jnp.uint32),
    )
    return (*(array(*each) for each in shapes_and_dtypes), table)  # type: ignore[no-untyped-call]


def described(case: shapes.Case, page: int | None, softcap: float | None) -> Problem:
    query, keys, *_, table = operands(case, jnp.bfloat16, page)
    return tree_attention.describe(query, keys, table, window=case.model.window, softcap=softcap)


def lowered(
    case: shapes.Case, dtype: Any = jnp.bfloat16, page: int | None = None, **static: Any
) -> Any:
    """Lower the op as "auto" has it for cuda."""

    def attention(*arrays: Any) -> jax.Array:
        return tree_attention.tree_attention(
            *arrays[:-1], block_table=arrays[-1], window=case.model.window, **static
        )

    with jax.default_matmul_precision("default"), compilers.as_on_an_h100():
        traced = jax.jit(attention).trace(*operands(case, dtype, page))
        return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("case", "page", "softcap"),
    [
        (shapes.Case(LLAMA, 1, 5, 2048), None, None),
        (shapes.Case(WIDE, 64, 64, 2048), None, 30.0),
        (shapes.Case(ODD, 2, 40, 2048), 16, None),
    ],
)
def test_jax_triton_compiles(case: shapes.Case, page: int | None, softcap: float | None) -> None:
    problem = described(case, page, softcap)
    reason = triton.supports(problem)
    if reason is not None:
        pytest.skip(reason)
    program = jax.jit(
        functools.partial(triton.tree_attention, problem=problem, compute_capability=90)
    ).trace(*operands(case, jnp.bfloat16, page))
    # Its kernels are compiled while they are lowered.
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text


@pytest.mark.parametrize("case", shapes.spread(3), ids=lambda case: case.name)
def test_real_models_lower_with_their_own_parameters(case: shapes.Case) -> None:
    kernels = list(compilers.triton_kernels(lowered(case)))
    assert [kernel.name for kernel in kernels] in (
        ["tree_attention"],
        ["tree_attention", "tree_attention_merge"],
    )
    assert all(kernel.warps in (4, 8) and kernel.stages in (1, 2, 3) for kernel in kernels)


@pytest.mark.parametrize(
    ("case", "dtype", "page", "static"),
    [
        *((case, jnp.bfloat16, None, {}) for case in shapes.spread(7)),
        (shapes.Case(WIDE, 1, 128, 4096), jnp.bfloat16, None, {"softcap": 50.0}),
        (shapes.Case(WIDE, 1, 16, 4096), jnp.float32, None, {}),
        (shapes.Case(ODD, 2, 64, 4096), jnp.bfloat16, None, {}),
        (shapes.Case(LLAMA, 8, 16, 4096), jnp.float32, None, {"softcap": 50.0}),
        (shapes.Case(LLAMA, 4, 64, 4096), jnp.bfloat16, 16, {}),
    ],
    ids=lambda value: value.name if isinstance(value, shapes.Case) else "",
)
def test_kernels_fit_an_h100(
    case: shapes.Case, dtype: Any, page: int | None, static: dict[str, Any], tmp_path: Path
) -> None:
    for kernel in compilers.triton_kernels(lowered(case, dtype, page, **static)):
        taken = compilers.compile_for_h100(kernel, tmp_path)
        print(f"H100, compiled only: {case.name} {kernel.name} {taken}")
        assert taken.spilled == 0
        assert taken.registers <= REGISTERS
        assert taken.shared_memory <= compilers.H100_SHARED_MEMORY
