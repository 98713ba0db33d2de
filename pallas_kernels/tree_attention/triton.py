"""Tree attention by jax-triton, for a JAX without the Triton lowering of Pallas.

The same plan as `gpu`: shares of a row's slots, then a merge. Heads that are no power of two are
padded in registers; nothing more is read for it. Compiled only so far, never run.

jax-triton and triton are optional and imported in functions alone: jax-triton 0.3 raises on import
where jaxlib has no CUDA.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tree_attention import operands
from pallas_kernels.tree_attention.gpu import tiling
from pallas_kernels.tree_attention.operands import Problem
from pallas_kernels.tree_attention.reference import MASKED_SCORE


@functools.cache
def _missing() -> str | None:
    try:
        importlib.import_module("jax_triton")
        importlib.import_module("triton")
    except Exception as error:
        # Whatever it is that an optional package raises on import: it is why it can't run.
        return f"jax-triton can't be imported ({type(error).__name__}: {error})"
    return None


def supports(problem: Problem) -> str | None:
    """Return why this kernel can't run the problem, or None where it can."""
    return operands.unsupported(problem) or _missing()


@functools.cache
def _kernels() -> SimpleNamespace:
    """Return the Triton kernels `share` and `merge`."""
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")

    # Parameters in capitals are compile-time constants. Triton would read annotations: none here.
    @triton.jit
    def share(  # type: ignore[no-untyped-def]
        prefix_ptr,
        table_ptr,
        query_ptr,
        words_ptr,
        keys_ptr,
        values_ptr,
        mixed_ptr,
        highest_ptr,
        total_ptr,
        GROUPS,
        ALL_ROWS,
        ROWS,
        NODES,
        SLOTS,
        HEAD_DIM,
        LANES,
        BLOCK,
        SPLITS,
        PAGE,
        WINDOW,
        SOFTCAP,
        WORDS,
        OWN_TREE,
        EXACT,
        MASKED,
    ):
        split = tl.program_id(0)
        group = (tl.program_id(1) // (ALL_ROWS // ROWS)).to(tl.int64)
        place = tl.program_id(1) % (ALL_ROWS // ROWS)
        row = tl.program_id(2).to(tl.int64)
        fold = place * ROWS + tl.arange(0, ROWS)
        lane = tl.arange(0, LANES)
        inside = lane < HEAD_DIM
        here = ((row * GROUPS + group) * ALL_ROWS + fold) * HEAD_DIM
        query = tl.load(query_ptr + here[:, None] + lane[None, :], mask=inside[None, :], other=0.0)
        tree = words_ptr + (row * OWN_TREE * ALL_ROWS + fold) * (WORDS + 1)
        depth = tl.load(tree + WORDS)

        prefix = tl.load(prefix_ptr + row)
        stop = tl.minimum(prefix + NODES, SLOTS)
        start = tl.maximum(prefix - (WINDOW - 1), 0) if WINDOW else 0
        first = start // BLOCK
        last = tl.cdiv(stop, BLOCK)
        each = tl.cdiv(last - first, SPLITS)
        first = first + split * each
        last = tl.minimum(first + each, last)

        highest = tl.full((ROWS,), MASKED, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, LANES), tl.float32)
        for index in range(first, last):
            slot = index * BLOCK + tl.arange(0, BLOCK)
            used = (slot >= start) & (slot < stop)
            if PAGE:
                page = tl.load(
                    table_ptr + row * (SLOTS // PAGE) + slot // PAGE, mask=used, other=0
                ).to(tl.int64)
                entry = (page * GROUPS + group) * PAGE + slot % PAGE
            else:
                entry = (row * GROUPS + group) * SLOTS + slot
            at = entry[:, None] * HEAD_DIM + lane[None, :]
            fetch = used[:, None] & inside[None, :]
            keys = tl.load(keys_ptr + at, mask=fetch, other=0.0)
            if EXACT:
                scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
            else:
                scores = tl.dot(query, tl.trans(keys))
            if SOFTCAP > 0:
                scores = SOFTCAP * (2 / (1 + tl.exp(scores * (-2 / SOFTCAP))) - 1)
            offset = slot - prefix
            seen = (offset < 0)[None, :] & (fold >= 0)[:, None]
            if WINDOW:
                seen = seen & (offset[None, :] > depth[:, None] - WINDOW)
            for which in range(WORDS):
                word = tl.load(tree + which)
                bit = (word[:, None] >> (offset & 31)[None, :]) & 1
                seen = seen | (((offset >> 5) == which)[None, :] & (bit == 1))
            scores = tl.where(seen, scores, MASKED)
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            keep = tl.exp(highest - higher)
            total = total * keep + tl.sum(weights, 1)
            values = tl.load(values_ptr + at, mask=fetch, other=0.0)
            mixed = mixed * keep[:, None]
            if EXACT:
                mixed = tl.dot(weights, values, mixed, input_precision="ieee")
            else:
                mixed = tl.dot(weights.to(values.dtype), values, mixed)
            highest = higher

        part = ((row * GROUPS + group) * SPLITS + split) * ALL_ROWS + fold
        if SPLITS == 1:
            mixed = mixed / total[:, None]
        else:
            tl.store(highest_ptr + part, highest)
            tl.store(total_ptr + part, total)
        out = mixed_ptr + part[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out, mixed.to(mixed_ptr.dtype.element_ty), mask=inside[None, :])

    @triton.jit
    def merge(  # type: ignore[no-untyped-def]
        mixed_ptr,
        highest_ptr,
        total_ptr,
        out_ptr,
        ALL_ROWS,
        HEAD_DIM,
        LANES,
        SPLITS,
    ):
        fold = tl.program_id(0)
        head = tl.program_id(1).to(tl.int64)
        lane = tl.arange(0, LANES)
        inside = lane < HEAD_DIM
        part = (head * SPLITS + tl.arange(0, SPLITS)) * ALL_ROWS + fold
        highest = tl.load(highest_ptr + part)
        weights = tl.exp(highest - tl.max(highest, 0))
        total = tl.sum(weights * tl.load(total_ptr + part), 0)
        at = mixed_ptr + part[:, None] * HEAD_DIM + lane[None, :]
        mixed = tl.load(at, mask=inside[None, :], other=0.0)
        mixed = tl.sum(mixed * weights[:, None], 0) / total
        out = out_ptr + (head * ALL_ROWS + fold) * HEAD_DIM + lane
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside)

    return SimpleNamespace(share=share, merge=merge)


def tree_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    prefix_length: jax.Array,
    ancestors: jax.Array,
    block_table: jax.Array | None,
    problem: Problem,
    *,
    scale: float | None = None,
    compute_capability: int | None = None,
) -> jax.Array:
    """Run the kernels on a problem that they `supports`.

    Args:
        query: [B, T, N, H].
        keys: [B, G, S, H], or pages [P, G, page, H].
        values: as keys.
        prefix_length: [B] int32.
        ancestors: [T, W] or [B, T, W] uint32.
        block_table: [B, S / page] int32, or None.
        problem: of these operands.
        scale: factor of the scores; None is H ** -0.5.
        compute_capability: to compile for, as 90; None is the GPU's that is there.

    Returns:
        [B, T, N, H].
    """
    jax_triton: Any = importlib.import_module("jax_triton")
    kernels = _kernels()
    cut = tiling(problem)
    batch, groups, head_dim = problem.batch, problem.groups, problem.head_dim
    rows = cut.rows * cut.tiles
    padding = ((0, 0), (0, 0), (0, rows - problem.rows), (0, 0))
    folded = jnp.pad(operands.fold(query, groups, scale), padding)
    words = operands.row_words(ancestors, problem.queries_per_kv, problem.window)
    words = jnp.pad(words, padding[1:])
    prefix = prefix_length.astype(jnp.int32)
    table = prefix if block_table is None else block_table.astype(jnp.int32)
    once = cut.splits == 1
    column = jax.ShapeDtypeStruct((batch, groups, cut.splits, rows), jnp.float32)
    partial = jax.ShapeDtypeStruct((*column.shape, head_dim), query.dtype if once else jnp.float32)
    shared = {
        "HEAD_DIM": head_dim,
        "LANES": pl.next_power_of_2(head_dim),
        "SPLITS": cut.splits,
        "ALL_ROWS": rows,
    }
    # 0.4 renames the parameter.
    version = tuple(int(part) for part in jax_triton.__version__.split(".")[:2])
    shapes = "out_type" if version >= (0, 4) else "out_shape"
    call = functools.partial(jax_triton.triton_call, compute_capability=compute_capability)
    mixed, highest, total = call(
        prefix,
        table,
        folded,
        words,
        keys,
        values,
        kernel=kernels.share,
        **{shapes: (partial, column, column)},
        grid=(cut.splits, groups * cut.tiles, batch),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **shared,
        GROUPS=groups,
        ROWS=cut.rows,
        NODES=problem.nodes,
        SLOTS=problem.slots,
        BLOCK=cut.block,
        PAGE=problem.page or 0,
        WINDOW=problem.window or 0,
        SOFTCAP=problem.softcap or 0.0,
        WORDS=problem.words,
        OWN_TREE=int(words.shape[0] > 1),
        EXACT=int(problem.cache_dtype == jnp.float32),
        MASKED=MASKED_SCORE,
    )
    if once:
        merged = mixed[:, :, 0]
    else:
        merged = call(
            mixed,
            highest,
            total,
            kernel=kernels.merge,
            **{shapes: jax.ShapeDtypeStruct(folded.shape, query.dtype)},
            grid=(problem.rows, batch * groups, 1),
            num_warps=4,
            num_stages=1,
            **shared,
        )
    return operands.unfold(merged[:, :, : problem.rows], problem.nodes)
