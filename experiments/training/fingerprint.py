"""Which model a text was written by: a short name of its architecture, weights and tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np

from jspec.model import Model

_SAMPLE = 1024  # values of each tensor that count


def of(target: Model) -> str:
    """Return 16 hexadecimal digits that tell one target from another.

    The same weights give the same digits in float32 and in bfloat16.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(target.config)).encode())
    for leaf in jax.tree.leaves(target.params):
        digest.update(str(leaf.shape).encode())
        sample = jnp.ravel(leaf[:1])[:_SAMPLE].astype(jnp.bfloat16)
        digest.update(np.asarray(sample).tobytes())
    if target.tokenizer is not None:
        digest.update(json.dumps(sorted(target.tokenizer.vocabulary().items())).encode())
    return digest.hexdigest()[:16]
