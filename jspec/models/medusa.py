"""Parameters of Medusa heads (Cai et al. 2024, arXiv 2401.10774).

Head k reads what the target's own head reads at a token, through residual blocks
x + SiLU(W x + b), and predicts the token k + 2 places on (k from 0): the target's own head predicts
the next one. Heads know nothing of each other, so one pass of them drafts a whole tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jspec.models.parameters import TensorSpec


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Architecture of Medusa heads.

    Attributes:
        heads: K, and so the most levels of drafts.
        blocks: residual blocks of each head.
        hidden_size: D, the target's.
        vocab_size: Vd, the tokens that it can propose.
        target_layers: the target's number of layers.
    """

    heads: int
    blocks: int
    hidden_size: int
    vocab_size: int
    target_layers: int

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's normed output."""
        return (self.target_layers,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MedusaParams:
    """All parameters of K heads with J blocks each.

    Attributes:
        weights: [K, J, D, D], (out, in).
        biases: [K, J, D].
        heads: [K, Vd, D] where every head has its own, [Vd, D] where they share the target's rows.
        vocabulary: [Vd] int32, the target's id of each token that they can propose, rising; None
            where these are all.
    """

    weights: Any
    biases: Any
    heads: Any
    vocabulary: Any


def declare(config: MedusaConfig) -> MedusaParams:
    """Return the tree of `TensorSpec` of the blocks, None for what the target lends."""
    k, j, d = config.heads, config.blocks, config.hidden_size
    return MedusaParams(
        weights=TensorSpec((k, j, d, d), (None, None, "embed", None), "zeros"),
        biases=TensorSpec((k, j, d), (None, None, None), "zeros"),
        heads=None,
        vocabulary=None,
    )
