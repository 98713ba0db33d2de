"""Parameters of Medusa heads (Cai et al. 2024, arXiv 2401.10774).

Head k reads what the target's own head reads at a token, through residual blocks
x + SiLU(W x + b), and predicts the token k + 2 places on (k from 0): the target's own head predicts
the next one. Heads know nothing of each other, so one pass of them drafts a whole tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models import linear
from jspec.models.linear import matmul
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


def forward(params: MedusaParams, feature: jax.Array) -> jax.Array:
    """Return every head's logits.

    Args:
        params: of K heads.
        feature: [D, rows], the target's normed output at the token before the pending one, in the
            parameters' dtype.

    Returns:
        [K, rows, Vd] float32; head k's are of the token k + 2 places after the feature's.
    """
    heads, blocks, width = params.biases.shape
    rows = feature.shape[1]
    x = jnp.broadcast_to(feature, (heads, width, rows))
    for block in range(blocks):
        bias = params.biases[:, block, :, None]
        if block == 0:
            # All heads read the same: one product.
            mixed = matmul(params.weights[:, 0], feature).reshape(x.shape)
        else:
            mixed = jnp.stack(
                [matmul(params.weights[head, block], x[head]) for head in range(heads)]
            )
        x = x + jax.nn.silu(mixed + bias)
    if jax.tree.leaves(params.heads)[0].ndim == 3:
        own = [
            jax.tree.map(lambda leaf, head=head: leaf[head], params.heads) for head in range(heads)
        ]
        return jnp.stack([linear.head(weight, x[head]) for head, weight in enumerate(own)])
    columns = jnp.swapaxes(x, 0, 1).reshape(width, heads * rows)
    return linear.head(params.heads, columns).reshape(heads, rows, -1)
