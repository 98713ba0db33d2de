"""Verification of drafts from the target's logits, without their probabilities in memory.

`statistics` (one a backend) goes over the vocabulary and leaves a few numbers a node;
`decide.decide` makes the decision of them, in plain jax.numpy for every backend.
"""

from pallas_kernels.rejection_sampling.decide import Outcome, decide
from pallas_kernels.rejection_sampling.inputs import (
    Bias,
    Drafts,
    Drawn,
    Penalties,
    Statistics,
    Transforms,
)
from pallas_kernels.rejection_sampling.op import NAME, rejection_sampling, supports

__all__ = [
    "NAME",
    "Bias",
    "Drafts",
    "Drawn",
    "Outcome",
    "Penalties",
    "Statistics",
    "Transforms",
    "decide",
    "rejection_sampling",
    "supports",
]
