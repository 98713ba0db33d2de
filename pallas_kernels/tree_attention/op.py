"""The tree-attention op: its contract, its checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Kernels
from pallas_kernels.tree_attention import gpu, reference, tpu, triton
from pallas_kernels.tree_attention.operands import Problem
from pallas_kernels.tree_attention.reference import Plan

NAME = "tree_attention"


def tree_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    prefix_length: jax.Array,
    ancestors: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    block_table: jax.Array | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    planned: Plan | None = None,
    implementation: Implementation | Kernels = "auto",
) -> jax.Array:
    """Attend from T nodes a row to its committed prefix and to their own ancestors.

    Row b's nodes lie at the slots prefix_length[b] .. prefix_length[b] + T - 1. What lies past them
    is stale: the kernels read none of it; the XLA path wants it finite. Nodes that are siblings of
    each other, and pages that the table names, must be finite everywhere.

    Args:
        query: [B, T, N, H], rotated.
        keys: [B, G, S, H], or with a block table pages [P, G, page, H].
        values: as keys.
        prefix_length: [B] int32, committed entries.
        ancestors: [T, W] or [B, T, W] uint32, bit j % 32 of word j // 32 set where node j is the
            node itself or one of its ancestors.
        scale: factor of the scores; None is H ** -0.5.
        softcap: c in scores -> c tanh(scores / c), before the mask; None caps nothing.
        window: a node at position p (prefix_length + depth) sees positions above p - window alone.
        block_table: [B, S / page] int32, each row's pages in order. Entries past its length, and
            wholly before every node's window, are not read by the kernels and may hold anything.
        key_scales: [B, G, S] float, or pages [P, G, page]; a stored key times its scale is the
            key. For int8 and float8 caches; XLA only so far.
        value_scales: as key_scales, of the values.
        planned: of this pass and window, which spares the XLA path planning anew in every layer.
        implementation: "xla"; a kernel, "tpu", "gpu" (Pallas) or "triton" (jax-triton);
            "tpu_interpret" or "gpu_interpret", which run the kernel's own code slowly on a CPU; or
            "auto", the platform's kernel where it can run and XLA elsewhere; or what a whole
            program asks for. `dispatch.choices` tells which ran.

    Returns:
        [B, T, N, H] in the query's dtype; products accumulate in float32.

    Raises:
        ValueError: shapes or dtypes do not go together, or there is no such implementation.
        UnsupportedError: the implementation asked for can't run this call; the message says why.
    """
    scales = (key_scales, value_scales)
    _check(query, keys, values, prefix_length, ancestors, block_table, scales, softcap, window)
    problem = describe(
        query, keys, block_table, window=window, softcap=softcap, scaled=scales != (None, None)
    )
    reference_run = functools.partial(_reference, scale=scale, softcap=softcap, window=window)
    runs: dict[str, Any] = {
        "xla": reference_run,
        "tpu": functools.partial(_tpu, problem=problem, scale=scale, interpret=False),
        "gpu": functools.partial(_gpu, problem=problem, scale=scale, interpret=False),
        "tpu_interpret": functools.partial(_tpu, problem=problem, scale=scale, interpret=True),
        "gpu_interpret": functools.partial(_gpu, problem=problem, scale=scale, interpret=True),
        "triton": functools.partial(_triton, problem=problem, scale=scale),
    }
    reasons = supports(problem)
    asked = implementation.of(NAME) if isinstance(implementation, Kernels) else implementation
    if asked == "triton":
        # Asked alone, since the answer takes an import.
        reasons["triton"] = triton.supports(problem)
    return dispatch.dispatch(
        NAME,
        implementation,
        reasons,
        runs,
        (query, keys, values, prefix_length, ancestors),
        (block_table, *scales, planned),
    )


def describe(
    query: Any,
    keys: Any,
    block_table: Any = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scaled: bool = False,
) -> Problem:
    """Return the static problem of arrays, or of their `jax.ShapeDtypeStruct`s."""
    batch, nodes, heads, head_dim = query.shape
    page = None if block_table is None else keys.shape[2]
    return Problem(
        batch=batch,
        nodes=nodes,
        heads=heads,
        groups=keys.shape[1],
        slots=keys.shape[2] * (1 if block_table is None else block_table.shape[1]),
        head_dim=head_dim,
        query_dtype=np.dtype(query.dtype),
        cache_dtype=np.dtype(keys.dtype),
        page=page,
        window=window,
        softcap=softcap,
        scaled=scaled,
    )


def supports(problem: Problem) -> dict[str, str | None]:
    """Return for each Pallas kernel why it can't run the problem, None where it can."""
    return {"tpu": tpu.supports(problem), "gpu": gpu.supports(problem)}


def _reference(arrays: Any, more: Any, **settings: Any) -> jax.Array:
    table, key_scales, value_scales, planned = more
    return reference.tree_attention(
        *arrays,
        block_table=table,
        key_scales=key_scales,
        value_scales=value_scales,
        planned=planned,
        **settings,
    )


def _tpu(
    arrays: Any, more: Any, *, problem: Problem, scale: float | None, interpret: bool
) -> jax.Array:
    query, keys, values, prefix, ancestors = arrays
    return tpu.tree_attention(
        query,
        keys,
        values,
        prefix,
        ancestors,
        more[0],
        problem,
        scale=scale,
        interpret=dispatch.STRICTEST if interpret else False,
    )


def _gpu(
    arrays: Any, more: Any, *, problem: Problem, scale: float | None, interpret: bool
) -> jax.Array:
    query, keys, values, prefix, ancestors = arrays
    return gpu.tree_attention(
        query,
        keys,
        values,
        prefix,
        ancestors,
        more[0],
        problem,
        scale=scale,
        interpret=interpret,
    )


def _triton(arrays: Any, more: Any, *, problem: Problem, scale: float | None) -> jax.Array:
    query, keys, values, prefix, ancestors = arrays
    return triton.tree_attention(
        query, keys, values, prefix, ancestors, more[0], problem, scale=scale
    )


def _check(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    prefix_length: jax.Array,
    ancestors: jax.Array,
    block_table: jax.Array | None,
    scales: tuple[jax.Array | None, jax.Array | None],
    softcap: float | None,
    window: int | None,
) -> None:
    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{NAME}: {what}")

    need(query.ndim == 4 and query.shape[1] > 0, f"query must be [B, T, N, H], not {query.shape}")
    batch, nodes, heads, head_dim = query.shape
    need(
        keys.ndim == 4 and keys.shape == values.shape and keys.dtype == values.dtype,
        f"keys {keys.dtype} {keys.shape} and values {values.dtype} {values.shape} must be alike",
    )
    need(
        keys.shape[3] == head_dim and heads % keys.shape[1] == 0,
        f"keys of {keys.shape} do not go with a query of {query.shape}",
    )
    if block_table is None:
        need(keys.shape[0] == batch, f"{keys.shape[0]} rows of keys for {batch} of queries")
        slots = keys.shape[2]
    else:
        need(
            block_table.ndim == 2 and block_table.shape[0] == batch,
            f"block_table must be [{batch}, S / page], not {block_table.shape}",
        )
        need(
            jnp.issubdtype(block_table.dtype, jnp.integer),
            f"block_table must be of integers, not {block_table.dtype}",
        )
        slots = block_table.shape[1] * keys.shape[2]
    need(slots >= nodes, f"{slots} slots can't hold {nodes} nodes")
    need(
        prefix_length.shape == (batch,) and jnp.issubdtype(prefix_length.dtype, jnp.integer),
        f"prefix_length must be [{batch}] integers, not {prefix_length.dtype} "
        f"{prefix_length.shape}",
    )
    words = -(-nodes // 32)
    need(
        ancestors.shape in ((nodes, words), (batch, nodes, words))
        and ancestors.dtype == jnp.uint32,
        f"ancestors must be uint32 [{nodes}, {words}] or [{batch}, {nodes}, {words}], not "
        f"{ancestors.dtype} {ancestors.shape}",
    )
    for scale in scales:
        need(
            scale is None or scale.shape == keys.shape[:3],
            f"scales must be {keys.shape[:3]}, one an entry and head",
        )
    need(
        any(scale is not None for scale in scales) or query.dtype == keys.dtype,
        f"the query is {query.dtype} and the cache {keys.dtype}, which without scales must agree",
    )
    need(softcap is None or softcap > 0, f"softcap must be positive, not {softcap}")
    need(window is None or window > 0, f"window must be positive, not {window}")
