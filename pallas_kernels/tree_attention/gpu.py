"""Tree attention on CUDA GPUs: Pallas, lowered to Triton, split over the slots.

One program attends from a tile of one KV head's folded rows to its share of the blocks that the
row's own length calls for, so that even one row of the batch fills the chip; a second kernel
merges the shares (flash-decoding; Dao et al. 2023, on the online softmax of arXiv 1805.02867).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tree_attention import operands
from pallas_kernels.tree_attention.operands import Problem
from pallas_kernels.tree_attention.reference import MASKED_SCORE

# Programs that fill the chip: two on each of the 132 processors of an H100 or H200.
FULL = 264
MOST_SPLITS = 64
# The tensor cores' least rows; the most are what accumulates in registers without spilling.
LEAST_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one problem is cut up.

    Attributes:
        rows: folded query rows a program.
        tiles: programs that share a KV head's rows.
        block: slots an iteration.
        splits: programs that share a row's slots, a power of two.
        warps: of a program.
        stages: of its software pipeline.
    """

    rows: int
    tiles: int
    block: int
    splits: int
    warps: int
    stages: int


def tiling(problem: Problem) -> Tiling:
    """Return how the kernel cuts the problem up."""
    narrow = problem.cache_dtype.itemsize == 2
    share = 2 if problem.head_dim > 128 else 1
    most = (128 if narrow else 32) // share
    rows = min(most, max(LEAST_ROWS, pl.next_power_of_2(problem.rows)))
    block = (64 if narrow else 32) // share
    tiles = -(-problem.rows // rows)
    reach = problem.slots
    if problem.window is not None:
        reach = min(reach, problem.window + problem.nodes)
    programs = problem.batch * problem.groups * tiles
    wanted = round(FULL / programs)
    # Fewer than two blocks a share are not worth the merging.
    splits = max(1, min(MOST_SPLITS, wanted, reach // (2 * block)))
    splits = 1 << (splits.bit_length() - 1)
    wide = rows * problem.head_dim > 32 * 128
    return Tiling(rows, tiles, block, splits, warps=8 if wide else 4, stages=3 if narrow else 2)


def parts(head_dim: int) -> tuple[tuple[int, int], ...]:
    """Cut a head into (start, size) of powers of two, the only sizes that Triton has."""
    cut, start = [], 0
    while start < head_dim:
        size = 1 << ((head_dim - start).bit_length() - 1)
        cut.append((start, size))
        start += size
    return tuple(cut)


def supports(problem: Problem) -> str | None:
    """Return why this kernel can't run the problem, or None where it can."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "this JAX has no Triton lowering of Pallas"
    return operands.unsupported(problem)


def _share(*refs: Any, problem: Problem, cut: Tiling) -> None:
    """Attend to one share of one row's slots."""
    from jax.experimental.pallas import triton as plgpu

    prefix_ref, *refs_left = refs
    page_size = problem.page or 0
    table_ref = refs_left.pop(0) if page_size else None
    query_ref, words_ref, keys_ref, values_ref, *out_refs = refs_left
    block, window = cut.block, problem.window
    split, group, row = pl.program_id(0), jax.lax.div(pl.program_id(1), cut.tiles), pl.program_id(2)
    pieces = parts(problem.head_dim)
    queries = [query_ref[:, pl.ds(start, size)] for start, size in pieces]
    precision = jax.lax.Precision.HIGHEST if problem.cache_dtype == jnp.float32 else None

    prefix = prefix_ref[row]
    stop = jnp.minimum(prefix + problem.nodes, problem.slots)
    start = jnp.int32(0)
    if window is not None:
        start = jnp.maximum(prefix - (window - 1), 0)
    first = jax.lax.div(start, block)
    last = jax.lax.div(stop + (block - 1), block)
    each = jax.lax.div(last - first + (cut.splits - 1), cut.splits)
    first = first + split * each
    last = jnp.minimum(first + each, last)

    def fetch(ref: Any, index: Any, page: Any, piece: tuple[int, int], used: Any) -> jax.Array:
        """Load [block, piece] of keys or values, zeros where a slot is not used."""
        begin, size = piece
        shape = (block, size)
        if page is None:
            where = ref.at[row, group, pl.ds(index * block, block), pl.ds(begin, size)]
        else:
            number, slot = (jnp.broadcast_to(each[:, None], shape) for each in page)
            lane = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            where = ref.at[number, jnp.broadcast_to(group, shape), slot, lane]
        if used is None:
            return plgpu.load(where)
        used = jnp.broadcast_to(used[:, None], shape)
        return plgpu.load(where, mask=used, other=jnp.zeros((), ref.dtype))

    def pages(slot: jax.Array, used: Any) -> tuple[jax.Array, jax.Array] | None:
        """Look up each slot's page, and its place there."""
        if table_ref is None:
            return None
        slot = jnp.clip(slot, 0, problem.slots - 1)
        place = jax.lax.div(slot, jnp.full_like(slot, page_size))
        where = table_ref.at[jnp.broadcast_to(row, slot.shape), place]
        if used is None:
            number = plgpu.load(where)
        else:
            number = plgpu.load(where, mask=used, other=jnp.int32(0))
        return number, slot - place * page_size

    def step(index: Any, carry: Any, masked: bool) -> Any:
        highest, total, mixed = carry
        slot = index * block + jnp.arange(block, dtype=jnp.int32)
        used = (slot >= start) & (slot < stop) if masked else None
        page = pages(slot, used)
        scores = jnp.zeros((cut.rows, block), jnp.float32)
        for query, piece in zip(queries, pieces, strict=True):
            keys = fetch(keys_ref, index, page, piece, used)
            scores += plgpu.dot(query, keys, trans_b=True, precision=precision)
        if problem.softcap is not None:
            # tanh by its exponential, which needs no library of the driver's.
            scores = 2 / (1 + jnp.exp(scores * (-2 / problem.softcap))) - 1
            scores = problem.softcap * scores
        if masked:
            scores = jnp.where(_visible(words_ref, slot - prefix, problem), scores, MASKED_SCORE)
        higher = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - higher[:, None])
        keep = jnp.exp(highest - higher)
        total = total * keep + jnp.sum(weights, axis=1)
        weights = weights.astype(values_ref.dtype)
        mixed = tuple(
            old * keep[:, None]
            + plgpu.dot(weights, fetch(values_ref, index, page, piece, used), precision=precision)
            for old, piece in zip(mixed, pieces, strict=True)
        )
        return higher, total, mixed

    carry: Any = (
        jnp.full((cut.rows,), MASKED_SCORE, jnp.float32),
        jnp.zeros((cut.rows,), jnp.float32),
        tuple(jnp.zeros((cut.rows, size), jnp.float32) for _, size in pieces),
    )
    if window is None:
        # Blocks of the prefix alone, which every node sees whole, need no mask.
        whole = jnp.clip(jax.lax.div(prefix, block), first, jnp.maximum(first, last))
        carry = jax.lax.fori_loop(first, whole, functools.partial(step, masked=False), carry)
        first = whole
    carry = jax.lax.fori_loop(first, last, functools.partial(step, masked=True), carry)
    highest, total, mixed = carry
    out_ref = out_refs[0]
    if cut.splits == 1:
        mixed = tuple(piece / total[:, None] for piece in mixed)
    else:
        out_refs[1][...] = highest
        out_refs[2][...] = total
    for value, (begin, size) in zip(mixed, pieces, strict=True):
        out_ref[:, pl.ds(begin, size)] = value.astype(out_ref.dtype)


def _visible(words_ref: Any, offset: jax.Array, problem: Problem) -> jax.Array:
    """Return [rows, block] bool: whether a row sees the slot `offset` past the prefix."""
    offset = offset[None, :]
    seen = offset < 0
    if problem.window is not None:
        depth = words_ref[:, problem.words]
        seen &= offset > depth[:, None] - problem.window
    for which in range(problem.words):
        word = words_ref[:, which][:, None]
        shape = (word.shape[0], offset.shape[1])
        shift = jnp.broadcast_to(offset & 31, shape)
        bit = jax.lax.shift_right_logical(jnp.broadcast_to(word, shape), shift) & 1
        seen = seen | (((offset >> 5) == which) & (bit == 1))
    return seen


def _merge(
    mixed_ref: Any, highest_ref: Any, total_ref: Any, out_ref: Any, *, head_dim: int
) -> None:
    """Merge the shares of one folded row."""
    highest = highest_ref[...]
    weights = jnp.exp(highest - jnp.max(highest, axis=0, keepdims=True))
    total = jnp.sum(weights * total_ref[...], axis=0, keepdims=True)
    for start, size in parts(head_dim):
        mixed = jnp.sum(mixed_ref[:, pl.ds(start, size)] * weights[:, None], axis=0)
        out_ref[pl.ds(start, size)] = (mixed / total).astype(out_ref.dtype)


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
    interpret: bool = False,
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
        interpret: run them on a CPU.

    Returns:
        [B, T, N, H].
    """
    from jax.experimental.pallas import triton as plgpu

    cut = tiling(problem)
    batch, groups, head_dim, tiles = problem.batch, problem.groups, problem.head_dim, cut.tiles
    rows = cut.rows * tiles
    padding = ((0, 0), (0, 0), (0, rows - problem.rows), (0, 0))
    folded = jnp.pad(operands.fold(query, groups, scale), padding)
    words = operands.row_words(ancestors, problem.queries_per_kv, problem.window)
    words = jnp.pad(words, padding[1:])
    own_tree = words.shape[0] > 1

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)

    def group(place: Any) -> Any:
        return jax.lax.div(place, jnp.int32(tiles))

    def tile(place: Any) -> Any:
        return jax.lax.rem(place, jnp.int32(tiles))

    rows_spec = pl.BlockSpec(
        (None, None, cut.rows, head_dim),
        lambda split, place, row: (row, group(place), tile(place), 0),
    )
    words_spec = pl.BlockSpec(
        (None, cut.rows, words.shape[2]),
        lambda split, place, row: (row if own_tree else 0, tile(place), 0),
    )
    column_spec = pl.BlockSpec(
        (None, None, None, cut.rows),
        lambda split, place, row: (row, group(place), split, tile(place)),
    )
    partial_spec = pl.BlockSpec(
        (None, None, None, cut.rows, head_dim),
        lambda split, place, row: (row, group(place), split, tile(place), 0),
    )
    lead = [prefix_length.astype(jnp.int32)]
    if block_table is not None:
        lead.append(block_table.astype(jnp.int32))
    column = jax.ShapeDtypeStruct((batch, groups, cut.splits, rows), jnp.float32)
    partial = jax.ShapeDtypeStruct((*column.shape, head_dim), jnp.float32)
    once = cut.splits == 1
    scores = batch * problem.heads * problem.nodes * problem.slots
    cache = 2 * batch * groups * problem.slots * head_dim * keys.dtype.itemsize
    out = pl.pallas_call(
        functools.partial(_share, problem=problem, cut=cut),
        grid=(cut.splits, groups * tiles, batch),
        in_specs=[*map(whole, lead), rows_spec, words_spec, whole(keys), whole(values)],
        out_specs=[rows_spec] if once else [partial_spec, column_spec, column_spec],
        out_shape=(
            [jax.ShapeDtypeStruct(folded.shape, query.dtype)] if once else [partial, column, column]
        ),
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * head_dim, transcendentals=scores, bytes_accessed=cache
        ),
        interpret=interpret,
        name="tree_attention",
    )(*lead, folded, words, keys, values)
    if once:
        return operands.unfold(out[0][:, :, : problem.rows], problem.nodes)
    merged = pl.pallas_call(
        functools.partial(_merge, head_dim=head_dim),
        grid=(problem.rows, groups, batch),
        in_specs=[
            pl.BlockSpec(
                (None, None, cut.splits, None, head_dim),
                lambda place, group, row: (row, group, 0, place, 0),
            ),
            *[
                pl.BlockSpec(
                    (None, None, cut.splits, None),
                    lambda place, group, row: (row, group, 0, place),
                )
            ]
            * 2,
        ],
        out_specs=pl.BlockSpec(
            (None, None, None, head_dim), lambda place, group, row: (row, group, place, 0)
        ),
        out_shape=jax.ShapeDtypeStruct((batch, groups, problem.rows, head_dim), query.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(*out)
    return operands.unfold(merged, problem.nodes)
