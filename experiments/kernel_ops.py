"""The ops by implementation, as functions of the operands that `kernel_cases` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.kernel_cases import Attention, Cache, Case, Rejection
from pallas_kernels import rejection_sampling, tree_attention
from pallas_kernels.cache_commit import cache_commit
from pallas_kernels.cache_write import cache_write
from pallas_kernels.rejection_sampling import Outcome

Function = Callable[..., Any]


def attention(case: Attention, implementation: Any) -> Function:
    """Return tree attention as a function of a dict of its operands."""

    def run(operands: dict[str, Any]) -> jax.Array:
        return tree_attention.tree_attention(
            **operands, **case.static, implementation=implementation
        )

    return run


def exact_attention(case: Attention) -> Function:
    """Return the reference in float32, whatever the operands' dtype."""

    def run(operands: dict[str, Any]) -> jax.Array:
        wide = {name: operands[name].astype(jnp.float32) for name in ("query", "keys", "values")}
        with jax.default_matmul_precision("highest"):
            return tree_attention.tree_attention(
                **(operands | wide), **case.static, implementation="xla"
            )

    return run


def masked_attention(operands: dict[str, Any]) -> jax.Array:
    """`jax.nn.dot_product_attention` with a mask.

    Args:
        operands: query [B, T, N, H]; keys and values [B, S, G, H], as it wants them; visible
            [B, T, S].
    """
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            operands["query"],
            operands["keys"],
            operands["values"],
            mask=operands["visible"][:, None],
        )


def rejection(case: Rejection, implementation: Any) -> Function:
    """Return rejection sampling as a function of logits, transforms, drafts, coins and noise."""

    def run(logits: Any, transforms: Any, drafts: Any, coins: Any, noise: Any) -> Outcome:
        return rejection_sampling.rejection_sampling(
            logits, transforms, drafts, coins, lambda node: noise, implementation=implementation
        )

    return run


def cache(case: Cache, implementation: Any) -> Function:
    """Return the write or the move as a function of the cache and its other operands."""

    def write(cache: Any, entries: Any, start: Any) -> jax.Array:
        return cache_write(cache, entries, start, implementation=implementation)

    def commit(cache: Any, start: Any, path: Any) -> jax.Array:
        return cache_commit(cache, start, path, case.case.nodes, implementation=implementation)

    return write if case.op == "cache_write" else commit


def of(case: Case, implementation: Any) -> Function:
    """Return a call, of whichever op, as a function of its operands."""
    if isinstance(case, Attention):
        return attention(case, implementation)
    if isinstance(case, Rejection):
        return rejection(case, implementation)
    return cache(case, implementation)
