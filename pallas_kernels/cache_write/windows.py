"""Writing single slots of a cache on TPU, where HBM is copied by whole tiles.

A tile holds several slots of a head. So for each row an aligned window around its slots comes to
VMEM, is changed there and goes back, with all of a block's rows under way at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Of VMEM for the windows of one step; the rest is the entries'.
MOST_BYTES = 6 * 2**20


def tile(dtype: Any) -> int:
    """Return the slots that lie in one tile of HBM."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def width(cache: jax.Array, span: int) -> int:
    """Return the slots of a window that holds any `span` slots in a row."""
    per = tile(cache.dtype)
    return min(cache.shape[2], pl.cdiv(span, per) * per + per)


def fault(cache: jax.Array, span: int) -> str | None:
    """Return why rows of `span` slots of a cache cannot be written so, or None."""
    if cache.ndim != 4:
        return f"the cache must be [B, G, S, H], not {cache.shape}"
    if cache.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the cache must be float32 or bfloat16, not {cache.dtype}"
    _, heads, slots, head_dim = cache.shape
    if slots % tile(cache.dtype):
        return f"{slots} slots are not a multiple of the tile of {tile(cache.dtype)}"
    if head_dim % 64:
        return f"a head dimension of {head_dim} is not a multiple of 64"
    if _window_bytes(heads, width(cache, span), head_dim) > MOST_BYTES:
        return f"a window of {width(cache, span)} slots of {heads} heads does not fit VMEM"
    return None


def _window_bytes(heads: int, slots: int, head_dim: int) -> int:
    return heads * slots * max(head_dim, 128) * 8


def rows_at_once(cache: jax.Array, span: int) -> int:
    """Return how many rows' windows are in VMEM at once; a divisor of B."""
    batch, heads, _, head_dim = cache.shape
    most = MOST_BYTES // _window_bytes(heads, width(cache, span), head_dim)
    return max(rows for rows in range(1, batch + 1) if batch % rows == 0 and rows <= max(most, 1))


# The row of the block, the window as it was [G, W, H], the window to be, and its first slot.
Change = Callable[[jax.Array, Any, Any, jax.Array], None]


def scratch(cache: jax.Array, span: int) -> list[Any]:
    """Return the scratch that `update` asks for."""
    rows = rows_at_once(cache, span)
    _, heads, _, head_dim = cache.shape
    shape = (rows, heads, width(cache, span), head_dim)
    return [
        pltpu.VMEM(shape, cache.dtype),
        pltpu.VMEM(shape[1:], jnp.float32),
        pltpu.VMEM(shape[1:], jnp.float32),
        pltpu.SemaphoreType.DMA((2, rows)),
    ]


def update(starts: Any, cache: Any, buffers: tuple[Any, Any, Any, Any], change: Change) -> None:
    """Change the windows of one grid step's rows.

    Args:
        starts: [B] int32 in SMEM, first slot of each row.
        cache: [B, G, S, H] in HBM, read and written.
        buffers: refs of `scratch`.
        change: writes the new window; both are float32, which holds bfloat16 exactly and lets
            single slots be addressed.
    """
    windows, before, after, semaphores = buffers
    rows, slots = windows.shape[0], windows.shape[2]
    per = tile(windows.dtype)
    first = pl.program_id(0) * rows

    def window_start(row: jax.Array) -> jax.Array:
        tile = jax.lax.div(starts[first + row], jnp.int32(per))  # "//" asks for the chip at hand
        start = jnp.minimum(tile * per, cache.shape[2] - slots)
        return pl.multiple_of(start, per)

    def copy(row: jax.Array, out: bool) -> Any:
        there = cache.at[first + row, :, pl.ds(window_start(row), slots), :]
        here = windows.at[row]
        ends = (here, there) if out else (there, here)
        return pltpu.make_async_copy(*ends, semaphores.at[int(out), row])

    @pl.loop(0, rows)
    def _(row: jax.Array) -> None:
        copy(row, False).start()

    @pl.loop(0, rows)
    def _(row: jax.Array) -> None:
        copy(row, False).wait()
        before[...] = windows[row].astype(jnp.float32)
        after[...] = before[...]
        change(row, before, after, window_start(row))
        windows[row] = after[...].astype(windows.dtype)
        copy(row, True).start()

    @pl.loop(0, rows)
    def _(row: jax.Array) -> None:
        copy(row, True).wait()
