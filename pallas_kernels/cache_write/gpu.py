"""Ragged cache write for GPU (Pallas, Triton lowering), in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def supports(cache: jax.Array, entries: jax.Array) -> str | None:
    """Return why the kernel cannot write these entries to this cache, or None."""
    if cache.ndim != 4 or entries.ndim != 4:
        return f"the cache must be [B, G, S, H] and entries [B, T, G, H], not {cache.shape}"
    if entries.dtype != cache.dtype:
        return f"entries must be {cache.dtype} as the cache, not {entries.dtype}"
    return None


# Jitted, so that a program lowers it once for all of its layers.
@functools.partial(jax.jit, static_argnames="interpret")
def cache_write(
    cache: jax.Array, entries: jax.Array, start: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Write each row's T entries at its own start, as the reference's `cache_write`.

    Args:
        cache: [B, G, S, H]; written in place when donated.
        entries: [B, T, G, H], same dtype as the cache.
        start: [B] int32, at least 0; entries past the capacity are dropped.
        interpret: run without a GPU.

    Raises:
        ValueError: `supports` gives a reason.
    """
    reason = supports(cache, entries)
    if reason is not None:
        raise ValueError(f"cache_write on GPU: {reason}")
    batch, count, heads, head_dim = entries.shape
    slots = cache.shape[2]
    # Triton's arrays have powers of two as sizes.
    wide = pl.next_power_of_2(head_dim)

    def kernel(starts: Any, news: Any, _: Any, out: Any) -> None:
        row, step, head = (pl.program_id(axis) for axis in range(3))
        slot = starts[row] + step
        lane = jnp.arange(wide, dtype=jnp.int32)
        inside = lane < head_dim
        entry = pltriton.load(news.at[row, step, head, lane], mask=inside, other=0)
        place = out.at[row, head, jnp.minimum(slot, slots - 1), lane]
        pltriton.store(place, entry, mask=inside & (slot < slots))

    return pl.pallas_call(
        kernel,
        grid=(batch, count, heads),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="cache_write",
    )(start, entries, cache)
