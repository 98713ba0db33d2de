"""The cache-write op: the choice of an implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.cache_write import gpu, reference, tpu
from pallas_kernels.dispatch import Implementation, Kernels

NAME = "cache_write"


def cache_write(
    cache: jax.Array,
    entries: jax.Array,
    start: jax.Array,
    *,
    implementation: Implementation | Kernels = "auto",
) -> jax.Array:
    """Write each row's T entries at its own start, in place when the cache is donated.

    Args:
        cache: [B, G, S, H].
        entries: [B, T, G, H], same dtype as the cache.
        start: [B] int32, first slot of each row, at least 0; entries past the capacity are dropped.
        implementation: as for `pallas_kernels.tree_attention.tree_attention`.

    Returns:
        [B, G, S, H].

    Raises:
        ValueError: there is no such implementation.
        UnsupportedError: the one asked for can't run this call; the message says why.
    """
    runs: dict[str, Any] = {
        "xla": reference.cache_write,
        "tpu": tpu.cache_write,
        "gpu": gpu.cache_write,
        "tpu_interpret": functools.partial(tpu.cache_write, interpret=dispatch.STRICTEST),
        "gpu_interpret": functools.partial(gpu.cache_write, interpret=True),
    }
    reasons = {"tpu": tpu.supports(cache, entries), "gpu": gpu.supports(cache, entries)}
    return dispatch.dispatch(NAME, implementation, reasons, runs, cache, entries, start)
