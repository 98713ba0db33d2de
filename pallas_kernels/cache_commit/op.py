"""The cache-commit op: the choice of an implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.cache_commit import gpu, reference, tpu
from pallas_kernels.dispatch import Implementation, Kernels

NAME = "cache_commit"


def cache_commit(
    cache: jax.Array,
    start: jax.Array,
    path: jax.Array,
    nodes: int,
    *,
    implementation: Implementation | Kernels = "auto",
) -> jax.Array:
    """Move the entries of each row's accepted path next to its prefix, in place when donated.

    The entry at slot start + path[i] goes to slot start + i; every other slot stays as it is.

    Args:
        cache: [B, G, S, H].
        start: [B] int32, at least 0: committed entries of each row, behind which its nodes lie.
        path: [B, D] int32 node indices below `nodes`, ascending, with path[i] at least i; -1
            (behind the others) moves nothing. A slot past the capacity neither gives nor takes.
        nodes: T, at least D: how many entries behind `start` a path may come from.
        implementation: as for `pallas_kernels.tree_attention.tree_attention`.

    Returns:
        [B, G, S, H].

    Raises:
        ValueError: there is no such implementation.
        UnsupportedError: the one asked for can't run this call; the message says why.
    """

    def run(function: Any, **settings: Any) -> Any:
        return functools.partial(function, nodes=nodes, **settings)

    runs: dict[str, Any] = {
        "xla": run(reference.cache_commit),
        "tpu": run(tpu.cache_commit),
        "gpu": run(gpu.cache_commit),
        "tpu_interpret": run(tpu.cache_commit, interpret=dispatch.STRICTEST),
        "gpu_interpret": run(gpu.cache_commit, interpret=True),
    }
    reasons = {
        "tpu": tpu.supports(cache, path, nodes),
        "gpu": gpu.supports(cache, path, nodes),
    }
    return dispatch.dispatch(NAME, implementation, reasons, runs, cache, start, path)
