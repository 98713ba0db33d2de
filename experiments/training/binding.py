"""From trained parameters to a drafter that drafts, and to the files that it is loaded from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.training import losses
from experiments.training.methods import Start
from jspec import trained
from jspec.checkpoints import heads
from jspec.checkpoints.heads import TrainedDrafter
from jspec.drafting import BoundDrafter
from jspec.model import Model

# Drafters are stored in it: its rounding moves no acceptance rate, and files are half as large.
_STORED = jnp.bfloat16


def bind(target: Model, begun: Start, params: Any) -> BoundDrafter:
    """Return a drafter of chains, with its weights rounded as they are stored.

    Args:
        target: what it drafts for.
        begun: what was trained.
        params: its own, as trained so far.
    """
    method = begun.method
    kept = None if begun.vocabulary is None else jnp.asarray(begun.vocabulary)
    params = losses.folded(params, begun.frozen)
    own: Any = jax.tree.map(lambda leaf: leaf.astype(_STORED).astype(target.dtype), params)
    embedding, head = target.params.embedding, target.params.head
    head = embedding if head is None else head
    rows = head if kept is None else jnp.take(head, kept, axis=0)
    if method.kind == "draft-model":  # takes the rows that it can propose by itself
        whole = dataclasses.replace(own, embedding=embedding, head=head)
    elif method.kind == "medusa":
        whole = dataclasses.replace(own, heads=rows, vocabulary=kept)
    else:
        whole = dataclasses.replace(own, embedding=embedding, head=rows, vocabulary=kept)
    drafter = TrainedDrafter(method.kind, method.kind, method.config, whole, kept)
    return trained.chain(drafter, target.config, target.functions.kernels)


def save(directory: Path, target: Model, name: str, begun: Start, params: Any) -> None:
    """Write a drafter in its published layout; what the target lends is left out.

    Args:
        directory: where to.
        target: what it drafts for.
        name: of the target, for messages.
        begun: what was trained.
        params: its own, trained.
    """
    kept = None if begun.vocabulary is None else jnp.asarray(begun.vocabulary)
    method = begun.method
    params = losses.folded(params, begun.frozen)
    drafter = TrainedDrafter(directory.name, method.kind, method.config, params, kept)
    heads.save(directory, drafter, target.config, target_name=name, dtype=_STORED)
