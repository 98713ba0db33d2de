"""Tree attention on TPU: a Pallas Mosaic kernel that reads each row's own blocks and no others.

The grid goes over the rows of the batch, for one block of KV heads at a time. Keys and values stay
in HBM; blocks of slots are copied to VMEM in two alternating buffers, the next one (of the same
row, or the first of the next row) while the present one is attended to. How many there are depends
on the row's length alone. The softmax is online (Milakov and Gimelshein, arXiv 1805.02867).

Heads narrower than 128 lanes would be half padding. XLA stores such a cache with the slots along
the lanes instead, unpadded, and the kernel reads it so: it is called with [B, G, H, S], to XLA
another name of the same bytes. Slots must then come in multiples of 128.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import operands
from pallas_kernels.tree_attention.operands import Problem
from pallas_kernels.tree_attention.reference import MASKED_SCORE

LANES = 128
# Slots a block for narrow passes, and scores [rows, slots] a KV head that wide ones keep to.
BLOCK = 512
MOST_SCORES = 128 * 1024
# What the kernel plans with, out of what it asks the compiler for: XLA's own limit for a kernel.
PLANNED_VMEM = 12 * 2**20
VMEM_LIMIT = 16 * 2**20
# Scalar memory for the block table.
MOST_PAGES = 128 * 1024


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one problem is cut up.

    Attributes:
        rows: folded query rows with padding to whole tiles.
        groups: KV heads a grid step.
        block: slots a copy.
        vmem: bytes of VMEM planned.
    """

    rows: int
    groups: int
    block: int
    vmem: int


def _slots_on_lanes(problem: Problem) -> bool:
    return problem.head_dim < LANES


def _sublanes(problem: Problem) -> int:
    return 32 // problem.cache_dtype.itemsize


def _slot_tile(problem: Problem) -> int:
    """Slots that a copy may start at, and take, multiples of."""
    return LANES if _slots_on_lanes(problem) else _sublanes(problem)


def tiling(problem: Problem) -> Tiling | None:
    """Return how the kernel cuts the problem up, or None where nothing fits into VMEM."""
    tile = _sublanes(problem)
    size = problem.cache_dtype.itemsize
    lanes = -(-problem.head_dim // LANES) * LANES
    rows = -(-problem.rows // tile) * tile
    unit = problem.page or _slot_tile(problem)
    target = max(unit, min(BLOCK, MOST_SCORES // rows, problem.slots) // unit * unit)
    # At least two blocks of heads, where there are two, so that a chip of two cores can share them.
    most = max(1, problem.groups // 2)
    for block in dict.fromkeys((target, max(unit, target // 2 // unit * unit), unit)):
        for groups in range(most, 0, -1):
            if problem.groups % groups:
                continue
            stored = problem.head_dim if _slots_on_lanes(problem) else lanes
            buffers = 2 * 2 * groups * block * stored * size
            pipelined = 2 * rows * (2 * groups * lanes * size + LANES * 4)
            state = groups * rows * (lanes + 2 * LANES) * 4
            scores = 4 * rows * block * 4
            vmem = buffers + pipelined + state + scores
            if vmem <= PLANNED_VMEM:
                return Tiling(rows, groups, block, vmem)
    return None


def supports(problem: Problem) -> str | None:
    """Return why this kernel can't run the problem, or None where it can."""
    reason = operands.unsupported(problem)
    if reason is not None:
        return reason
    tile = _slot_tile(problem)
    unit = problem.page or problem.slots
    if unit % tile:
        what = "slots a row" if problem.page is None else "slots a page"
        return (
            f"{unit} {what} are no multiple of {tile}, the tile of {problem.cache_dtype.name} "
            f"at a head dimension of {problem.head_dim}"
        )
    if problem.page is not None and problem.batch * problem.slots // problem.page > MOST_PAGES:
        return f"the block table has over {MOST_PAGES} entries, too many for scalar memory"
    if tiling(problem) is None:
        return "no tiling of it fits into VMEM"
    return None


def _kernel(*refs: Any, problem: Problem, cut: Tiling) -> None:
    page = problem.page or 0
    prefix_ref, *refs_left = refs
    table_ref: Any = refs_left.pop(0) if page else None
    query_ref, words_ref, keys_ref, values_ref, out_ref, *scratch = refs_left
    key_buffer, value_buffer, highest_ref, total_ref, mixed_ref, side_ref, semaphores = scratch
    block, nodes, window = cut.block, problem.nodes, problem.window
    on_lanes = _slots_on_lanes(problem)
    head = pl.program_id(0) * cut.groups
    row = pl.program_id(1)

    # `//` would ask which TPU it is to run on, which nobody knows when compiling for another.
    def below(count: Any, unit: int) -> Any:
        return jax.lax.div(jnp.int32(count), jnp.int32(unit))

    def above(count: Any, unit: int) -> Any:
        return below(count + (unit - 1), unit)

    def bounds(row: Any) -> tuple[Any, Any]:
        """Slots that some node of the row can see, from the first to the one past the last."""
        prefix = prefix_ref[row]
        stop = jnp.minimum(prefix + nodes, problem.slots)
        start = 0 if window is None else jnp.clip(prefix - (window - 1), 0, stop - 1)
        return start, stop

    def blocks(row: Any) -> tuple[Any, Any]:
        start, stop = bounds(row)
        return below(start, block), above(stop, block)

    def first_slot(index: Any) -> Any:
        """Slot at the buffer's start: the last block of a contiguous cache is moved to fit."""
        start = index * block
        if not page and problem.slots % block:
            start = jnp.minimum(start, problem.slots - block)
        return pl.multiple_of(start, _slot_tile(problem))

    def part(slots: Any) -> tuple[Any, ...]:
        """Index of some slots of one row's or buffer's heads."""
        return (slice(None), slots) if on_lanes else (slots,)

    def copies(row: Any, index: Any, side: Any, act: Callable[[Any], None]) -> None:
        heads = pl.ds(head, cut.groups)
        both = ((keys_ref, key_buffer, 0), (values_ref, value_buffer, 1))
        if not page:
            slots = pl.ds(first_slot(index), block)
            for source, buffer, which in both:
                act(
                    pltpu.make_async_copy(
                        source.at[row, heads, *part(slots)],
                        buffer.at[side],
                        semaphores.at[which, side],
                    )
                )
            return
        count = problem.slots // page
        start, stop = bounds(row)

        def one(place: Any, _: Any) -> None:
            at = table_ref[row * count + place]
            slots = pl.ds(pl.multiple_of((place - index * (block // page)) * page, page), page)
            for source, buffer, which in both:
                act(
                    pltpu.make_async_copy(
                        source.at[at, heads],
                        buffer.at[side, :, *part(slots)],
                        semaphores.at[which, side],
                    )
                )

        first = jnp.maximum(below(start, page), index * (block // page))
        last = jnp.minimum(above(stop, page), (index + 1) * (block // page))
        jax.lax.fori_loop(first, last, one, None)

    def begin(row: Any, index: Any, side: Any) -> None:
        copies(row, index, side, lambda copy: copy.start())

    first, last = blocks(row)

    @pl.when(row == 0)
    def _() -> None:
        side_ref[0] = 0
        begin(row, first, 0)

    highest_ref[...] = jnp.full(highest_ref.shape, MASKED_SCORE, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)
    prefix = prefix_ref[row]

    def visible(index: Any) -> jax.Array:
        shape = (cut.rows, block)
        slot = first_slot(index) + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        offset = slot - prefix
        words = words_ref[0]
        seen = offset < 0
        if window is not None:
            depth = words[:, problem.words : problem.words + 1]
            seen &= offset > jnp.broadcast_to(depth, shape) - window
        for which in range(problem.words):
            word = jnp.broadcast_to(words[:, which : which + 1], shape)
            bit = jax.lax.shift_right_logical(word, offset & 31) & 1
            seen |= ((offset >> 5) == which) & (bit == 1)
        # What a moved block repeats of the one before it.
        return seen & (slot >= index * block)

    def silence(index: Any, side: Any) -> None:
        """Zero the values that no node sees: stale ones may be NaN, and 0 times NaN is NaN."""
        start, stop = bounds(row)
        shape = value_buffer.shape[2:]
        slot = first_slot(index) + jax.lax.broadcasted_iota(jnp.int32, shape, 1 if on_lanes else 0)
        used = (slot >= start) & (slot < stop)
        for group in range(cut.groups):
            values = value_buffer[side, group].astype(jnp.float32)
            values = jnp.where(used, values, 0.0)
            value_buffer[side, group] = values.astype(value_buffer.dtype)

    precision = (
        jax.lax.Precision.HIGHEST
        if problem.cache_dtype == jnp.float32
        else jax.lax.Precision.DEFAULT
    )

    def attend(side: Any, seen: jax.Array | None) -> None:
        for group in range(cut.groups):
            scores = jax.lax.dot_general(
                query_ref[0, group],
                key_buffer[side, group],
                (((1,), (0 if on_lanes else 1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            if problem.softcap is not None:
                scores = problem.softcap * jnp.tanh(scores / problem.softcap)
            if seen is not None:
                scores = jnp.where(seen, scores, MASKED_SCORE)
            before = highest_ref[group][:, :1]
            highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - highest)
            keep = jnp.exp(before - highest)
            total = total_ref[group][:, :1] * keep + jnp.sum(weights, axis=1, keepdims=True)
            mixed = jax.lax.dot_general(
                weights.astype(value_buffer.dtype),
                value_buffer[side, group],
                (((1,), (1 if on_lanes else 0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            highest_ref[group] = jnp.broadcast_to(highest, highest_ref.shape[1:])
            total_ref[group] = jnp.broadcast_to(total, total_ref.shape[1:])
            mixed_ref[group] = mixed_ref[group] * keep + mixed

    def step(index: Any, side: Any) -> Any:
        more = index + 1 < last

        @pl.when(more)
        def _() -> None:
            begin(row, index + 1, 1 - side)

        @pl.when(jnp.logical_not(more) & (row + 1 < problem.batch))
        def _() -> None:
            begin(row + 1, blocks(row + 1)[0], 1 - side)

        copies(row, index, side, lambda copy: copy.wait())
        # A block that every node sees whole needs no mask.
        edge = (index + 1) * block > prefix
        if window is not None:
            edge |= index * block < prefix + nodes - window

        @pl.when(edge)
        def _() -> None:
            silence(index, side)
            attend(side, visible(index))

        @pl.when(jnp.logical_not(edge))
        def _() -> None:
            attend(side, None)

        return 1 - side

    side_ref[0] = jax.lax.fori_loop(first, last, step, side_ref[0])
    for group in range(cut.groups):
        mixed = mixed_ref[group] / total_ref[group][:, :1]
        out_ref[0, group] = mixed.astype(out_ref.dtype)


# Jitted, so that a program lowers it once for all of its layers.
@functools.partial(jax.jit, static_argnames=("problem", "scale", "interpret"))
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
    interpret: Any = False,
) -> jax.Array:
    """Run the kernel on a problem that it `supports`.

    Args:
        query: [B, T, N, H].
        keys: [B, G, S, H], or pages [P, G, page, H].
        values: as keys.
        prefix_length: [B] int32.
        ancestors: [T, W] or [B, T, W] uint32.
        block_table: [B, S / page] int32, or None.
        problem: of these operands.
        scale: factor of the scores; None is H ** -0.5.
        interpret: False, or `pltpu.InterpretParams` to run it on a CPU.

    Returns:
        [B, T, N, H].
    """
    cut = tiling(problem)
    assert cut is not None, "supports() was not asked"
    padding = ((0, 0), (0, 0), (0, cut.rows - problem.rows), (0, 0))
    folded = jnp.pad(operands.fold(query, problem.groups, scale), padding)
    words = operands.row_words(ancestors, problem.queries_per_kv, problem.window)
    words = jnp.pad(words, padding[1:])
    own_tree = words.shape[0] > 1
    scalars = [prefix_length.astype(jnp.int32)]
    if block_table is not None:
        scalars.append(block_table.astype(jnp.int32).reshape(-1))

    rows_spec = pl.BlockSpec(
        (1, cut.groups, cut.rows, problem.head_dim), lambda head, row, *_: (row, head, 0, 0)
    )
    words_spec = pl.BlockSpec(
        (1, *words.shape[1:]), lambda head, row, *_: (row if own_tree else 0, 0, 0)
    )
    if _slots_on_lanes(problem):
        keys, values = jnp.swapaxes(keys, 2, 3), jnp.swapaxes(values, 2, 3)
        stored = (problem.head_dim, cut.block)
    else:
        stored = (cut.block, problem.head_dim)
    if not interpret:
        # XLA would bring a small enough cache to VMEM whole, stale slots and all.
        keys = pltpu.with_memory_space_constraint(keys, pltpu.HBM)
        values = pltpu.with_memory_space_constraint(values, pltpu.HBM)
    buffer = pltpu.VMEM((2, cut.groups, *stored), keys.dtype)
    column = pltpu.VMEM((cut.groups, cut.rows, LANES), jnp.float32)
    cache_spec = pl.BlockSpec(memory_space=pltpu.HBM)
    scores = problem.batch * problem.heads * problem.nodes * problem.slots
    cache = 2 * problem.batch * problem.groups * problem.slots * problem.head_dim
    call = pl.pallas_call(
        functools.partial(_kernel, problem=problem, cut=cut),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(problem.groups // cut.groups, problem.batch),
            in_specs=[
                rows_spec,
                words_spec,
                cache_spec,
                cache_spec,
            ],
            out_specs=rows_spec,
            scratch_shapes=[
                buffer,
                buffer,
                column,
                column,
                pltpu.VMEM((cut.groups, cut.rows, problem.head_dim), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(folded.shape, query.dtype),
        # Rows hand their first block to each other, so they go in order.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        # Of full caches: an upper bound.
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * problem.head_dim,
            transcendentals=scores,
            bytes_accessed=cache * keys.dtype.itemsize + 2 * folded.size * query.dtype.itemsize,
        ),
        interpret=interpret,
        name="tree_attention",
    )
    out = call(*scalars, folded, words, keys, values)
    return operands.unfold(out[:, :, : problem.rows], problem.nodes)
