"""Ragged cache write for TPU (Pallas Mosaic), in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_write import windows


def supports(cache: jax.Array, entries: jax.Array) -> str | None:
    """Return why the kernel cannot write these entries to this cache, or None."""
    if entries.ndim != 4 or entries.dtype != cache.dtype:
        return f"entries must be [B, T, G, H] {cache.dtype}, not {entries.shape} {entries.dtype}"
    return windows.fault(cache, entries.shape[1])


# Jitted, so that a program lowers it once for all of its layers.
@functools.partial(jax.jit, static_argnames="interpret")
def cache_write(
    cache: jax.Array,
    entries: jax.Array,
    start: jax.Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Write each row's T entries at its own start, as the reference's `cache_write`.

    Args:
        cache: [B, G, S, H]; written in place when donated.
        entries: [B, T, G, H], same dtype as the cache.
        start: [B] int32, at least 0; entries past the capacity are dropped.
        interpret: run without a TPU.

    Raises:
        ValueError: `supports` gives a reason.
    """
    reason = supports(cache, entries)
    if reason is not None:
        raise ValueError(f"cache_write on TPU: {reason}")
    batch, count, heads, head_dim = entries.shape
    slots = cache.shape[2]
    if not interpret:
        # XLA would bring a small cache to VMEM whole, and back again.
        cache = pltpu.with_memory_space_constraint(cache, pltpu.HBM)
    rows = windows.rows_at_once(cache, count)
    # A slot's heads lie in different tiles of the cache, so entries come a head at a time.
    by_head = jnp.swapaxes(entries, 1, 2).astype(jnp.float32)

    def kernel(starts: Any, news: Any, _: Any, out: Any, *buffers: Any) -> None:
        first = pl.program_id(0) * rows

        def change(row: jax.Array, before: Any, after: Any, window: jax.Array) -> None:
            @pl.loop(0, count)
            def _(step: jax.Array) -> None:
                slot = starts[first + row] + step

                @pl.when(slot < slots)
                def _() -> None:
                    after[:, pl.ds(slot - window, 1), :] = news[row, :, pl.ds(step, 1), :]

        windows.update(starts, out, buffers, change)

    written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch // rows,),
            in_specs=[
                pl.BlockSpec((rows, heads, count, head_dim), lambda b, _: (b, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=windows.scratch(cache, count),
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=64 * 2**20
        ),
        interpret=interpret,
        name="cache_write",
    )(start, by_head, cache)
    # XLA takes no result for the program's own while it is pinned to HBM.
    return jax.lax.optimization_barrier(written)
