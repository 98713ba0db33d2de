"""The accepted path's move for TPU (Pallas Mosaic), in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_write import windows


def supports(cache: jax.Array, path: jax.Array, nodes: int) -> str | None:
    """Return why the kernel cannot move such a path in this cache, or None."""
    if path.shape[1] > nodes:
        return f"a path of {path.shape[1]} entries in a tree of {nodes} nodes"
    return windows.fault(cache, nodes)


# Jitted, so that a program lowers it once for all of its layers.
@functools.partial(jax.jit, static_argnames=("nodes", "interpret"))
def cache_commit(
    cache: jax.Array,
    start: jax.Array,
    path: jax.Array,
    nodes: int,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Move the entries of each row's accepted path, as the reference's `cache_commit`.

    Args:
        cache: [B, G, S, H]; written in place when donated.
        start: [B] int32.
        path: [B, D] int32.
        nodes: T.
        interpret: run without a TPU.

    Raises:
        ValueError: `supports` gives a reason.
    """
    reason = supports(cache, path, nodes)
    if reason is not None:
        raise ValueError(f"cache_commit on TPU: {reason}")
    batch, length = path.shape
    slots = cache.shape[2]
    if not interpret:
        # XLA would bring a small cache to VMEM whole, and back again.
        cache = pltpu.with_memory_space_constraint(cache, pltpu.HBM)
    rows = windows.rows_at_once(cache, nodes)

    def kernel(starts: Any, paths: Any, _: Any, out: Any, *buffers: Any) -> None:
        first = pl.program_id(0) * rows

        def change(row: jax.Array, before: Any, after: Any, window: jax.Array) -> None:
            start = starts[first + row]

            @pl.loop(0, length)
            def _(step: jax.Array) -> None:
                node = paths[(first + row) * length + step]
                source = start + node

                @pl.when((node >= 0) & (node < nodes) & (source < slots))
                def _() -> None:
                    entry = before[:, pl.ds(source - window, 1), :]
                    after[:, pl.ds(start + step - window, 1), :] = entry

        windows.update(starts, out, buffers, change)

    written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch // rows,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=windows.scratch(cache, nodes),
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=64 * 2**20
        ),
        interpret=interpret,
        name="cache_commit",
    )(start, path.reshape(-1), cache)
    # XLA takes no result for the program's own while it is pinned to HBM.
    return jax.lax.optimization_barrier(written)
