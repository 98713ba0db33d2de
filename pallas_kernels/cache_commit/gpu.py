"""The accepted path's move for GPU (Pallas, Triton lowering), in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


def supports(cache: jax.Array, path: jax.Array, nodes: int) -> str | None:
    """Return why the kernel cannot move such a path in this cache, or None."""
    if cache.ndim != 4:
        return f"the cache must be [B, G, S, H], not {cache.shape}"
    if path.shape[1] > nodes:
        return f"a path of {path.shape[1]} entries in a tree of {nodes} nodes"
    return None


# Jitted, so that a program lowers it once for all of its layers.
@functools.partial(jax.jit, static_argnames=("nodes", "interpret"))
def cache_commit(
    cache: jax.Array, start: jax.Array, path: jax.Array, nodes: int, *, interpret: bool = False
) -> jax.Array:
    """Move the entries of each row's accepted path, as the reference's `cache_commit`.

    Args:
        cache: [B, G, S, H]; written in place when donated.
        start: [B] int32.
        path: [B, D] int32.
        nodes: T.
        interpret: run without a GPU.

    Raises:
        ValueError: `supports` gives a reason.
    """
    reason = supports(cache, path, nodes)
    if reason is not None:
        raise ValueError(f"cache_commit on GPU: {reason}")
    batch, length = path.shape
    _, heads, slots, head_dim = cache.shape
    wide = pl.next_power_of_2(head_dim)

    def kernel(starts: Any, paths: Any, _: Any, out: Any) -> None:
        row, head = pl.program_id(0), pl.program_id(1)
        start = starts[row]
        lane = jnp.arange(wide, dtype=jnp.int32)
        inside = lane < head_dim

        # An entry comes from its own slot or a later one, and paths ascend, so moved one by one
        # none is overwritten before it is read. A lane's thread is the same in every step.
        @pl.loop(0, length)
        def move(step: jax.Array) -> None:
            node = paths[row, step]
            source = start + node
            real = (node >= 0) & (node < nodes) & (source < slots)
            at = jnp.where(real, source, 0)
            entry = pltriton.load(out.at[row, head, at, lane], mask=inside & real, other=0)
            to = jnp.where(real, start + step, 0)
            pltriton.store(out.at[row, head, to, lane], entry, mask=inside & real)

    return pl.pallas_call(
        kernel,
        grid=(batch, heads),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="cache_commit",
    )(start, path, cache)
