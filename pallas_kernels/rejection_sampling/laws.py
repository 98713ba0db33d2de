"""The law at one node a row, made again from its logits by the statistics of its pass."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.inputs import (
    Drafts,
    Statistics,
    Transforms,
    node_of,
    on_path,
    row_of,
)
from pallas_kernels.rejection_sampling.transforms import edit

# Relative; some eight units in the last place of a float32.
ROUNDING = 1e-6


def _transforms_of(transforms: Transforms, node: jax.Array) -> Transforms:
    """Return the transforms of one node a row."""

    def one(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else node_of(array, node)[:, None]

    return dataclasses.replace(
        transforms, forbidden=one(transforms.forbidden), allowed=one(transforms.allowed)
    )


def _path_to(drafts: Drafts, node: jax.Array) -> jax.Array:
    """Return [B, 1, T - 1] int32: drafts on the way to each row's node, -1 elsewhere."""
    paths = on_path(drafts)
    mask = node_of(paths, node) if drafts.own_trees else jnp.take(paths[0], node, axis=0)
    return jnp.where(mask, drafts.tokens, -1)[:, None]


def law_at(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    statistics: Statistics,
    node: jax.Array,
) -> jax.Array:
    """Return log p of each row's node ([B] int32), [B, V]; no meaning in a greedy row."""
    row = row_of(logits, node).astype(jnp.float32)[:, None]
    row = edit(row, _transforms_of(transforms, node), _path_to(drafts, node))[:, 0]
    temperature = jnp.where(transforms.temperature == 0, 1.0, transforms.temperature)
    highest, threshold = node_of(statistics.highest, node), node_of(statistics.threshold, node)
    scores = (row - highest[:, None]) / temperature[:, None]
    # Another program may round these scores otherwise than the one that found the threshold; the
    # last token kept, which may be the only one, must not be lost to that.
    slack = ROUNDING * (jnp.abs(highest) / temperature + jnp.abs(threshold))
    kept = scores >= (threshold - slack)[:, None]
    return jnp.where(kept, scores - node_of(statistics.log_total, node)[:, None], -jnp.inf)
