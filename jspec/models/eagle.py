"""Parameters of EAGLE heads: one decoder layer that goes on with the target's features.

Entry i of a head's sequence joins the target's features of token i with the embedding of token
i + 1 and predicts token i + 2: inputs are shifted by one. Where no true features exist yet, the
head's own output of the entry before stands for them.

EAGLE (Li et al. 2024, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, drafts other trees with the same
head): the feature is what the target's head reads; a linear map joins it with the embedding, the
layer has no norm before its attention, and its output is read by the target's head. Ours may read
lower layers too, as EAGLE-3 heads do: a linear map of their outputs, each normed without weights,
is added to the feature, and the attention reads its input normed.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): the features of a low, a middle and a high layer are
fused by a linear map; the attention reads embedding and feature, each normed, side by side; a norm
and a head of its own, over a reduced vocabulary, read the output.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from jspec.config import ModelConfig
from jspec.models import parameters
from jspec.models.parameters import LayerParams, TensorSpec

EagleKind = Literal["eagle", "eagle3"]


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Architecture of an EAGLE head.

    Attributes:
        kind: "eagle" (also EAGLE-2's) or "eagle3".
        layer: of its decoder layer, as a model of one layer; `vocab_size` is Vd, the tokens that it
            can propose, and `hidden_size` D, which is the target's.
        feature_layers: target layers whose outputs it reads; the target's number of layers stands
            for the normed output, which its head reads, and is the last or only one of "eagle".
        fc_bias: the linear map has a bias.
    """

    kind: EagleKind
    layer: ModelConfig
    feature_layers: tuple[int, ...]
    fc_bias: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleParams:
    """All parameters of an EAGLE head. What a kind does not have is None.

    Attributes:
        fc: "eagle": [D, 2 * D], of embedding, then feature; "eagle3": [D, 3 * D], of the low,
            middle and high features.
        fc_bias: [D] or None.
        embedding_norm: [D], "eagle3".
        feature_norm: [D], "eagle3".
        layer: the decoder layer; `attention_norm` is None but with `fuse`. The query, key and
            value of "eagle3" are of 2 * D inputs: the normed embedding, then the normed feature.
        norm: [D], "eagle3", before the head.
        embedding: [V, D], the target's unless it has its own.
        head: [Vd, D], the target's rows unless it has its own.
        vocabulary: [Vd] int32, the target's id of each token that it can propose, rising; None
            where these are all.
        fuse: [D, (F - 1) * D], of an "eagle" head that reads F > 1 layers: what the lower ones add
            to the feature; else None.
    """

    fc: Any
    fc_bias: Any
    embedding_norm: Any
    feature_norm: Any
    layer: LayerParams
    norm: Any
    embedding: Any
    head: Any
    vocabulary: Any
    fuse: Any = None


def low_middle_high(num_layers: int) -> tuple[int, int, int]:
    """Return the target's layers that EAGLE-3 heads read, as its authors chose them."""
    return 1, num_layers // 2 - 1, num_layers - 4


def declare(config: EagleConfig) -> EagleParams:
    """Return the tree of `TensorSpec` of a head's own tensors, None for what the target lends.

    What the target lends are embedding and head; the vocabulary is no trained tensor.
    """
    c = config.layer
    d = c.hidden_size
    fused = config.kind == "eagle3"
    norm = TensorSpec((d,), (None,), "ones")
    inputs = 2 * d if fused else d
    count = len(config.feature_layers)
    lower = 0 if fused else count - 1
    # A decoder layer like any other, but for what its attention reads.
    (layer,) = parameters.declare(c).layers
    qkv = dataclasses.replace(layer.qkv, shape=(*layer.qkv.shape[:-1], inputs))
    layer = dataclasses.replace(layer, attention_norm=norm if lower else None, qkv=qkv)
    return EagleParams(
        fc=TensorSpec((d, (count if fused else 2) * d), ("embed", None)),
        fc_bias=TensorSpec((d,), (None,), "zeros") if config.fc_bias else None,
        embedding_norm=norm if fused else None,
        feature_norm=norm if fused else None,
        layer=layer,
        norm=norm if fused else None,
        embedding=None,
        head=None,
        vocabulary=None,
        fuse=TensorSpec((d, lower * d), ("embed", None)) if lower else None,
    )
