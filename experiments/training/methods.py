"""From what is asked for to a drafter at the start of its training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training import linear, shards, starts
from experiments.training.batches import Corpus
from experiments.training.losses import Frozen, Kind, Method
from jspec.config import ModelConfig
from jspec.drafting import vocabulary as vocabularies
from jspec.errors import require
from jspec.model import Model
from jspec.models import eagle
from jspec.models.eagle import EagleConfig
from jspec.models.medusa import MedusaConfig
from jspec.models.parameters import TransformerParams

# What the forward passes of training do not compute.
_UNTRAINED = (
    "qk_norm",
    "post_norms",
    "norm_unit_offset",
    "embedding_scale",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "windows",
    "local_rope",
)


@dataclasses.dataclass(frozen=True)
class Wish:
    """What is to be trained.

    Attributes:
        kind: of drafter.
        drafts: in a row that are trained: steps of an EAGLE head, heads of Medusa.
        layers: of the target, that a draft model begins with.
        vocabulary: Vd, tokens that can be proposed; 0 for all.
        dtype: of products.
        lower: an "eagle" head reads low, middle and high layers too.
        feature_weight: of the features' error of an "eagle" head.
    """

    kind: Kind
    drafts: int
    layers: tuple[int, ...]
    vocabulary: int
    dtype: str
    lower: bool = False
    feature_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class Start:
    """A drafter before its first step.

    Attributes:
        method: what is trained.
        params: its own, float32; what the target lends is None.
        frozen: what the target lends.
        vocabulary: [Vd] int32, rising; None for all tokens.
        places: [Vd] ids of the rows of `frozen.head`.
    """

    method: Method
    params: Any
    frozen: Frozen
    vocabulary: np.ndarray[Any, Any] | None
    places: np.ndarray[Any, Any]


def check(wish: Wish, config: ModelConfig) -> None:
    """Raise `InputError` unless a target can be drafted for by what is wished."""
    for name in _UNTRAINED:
        value = getattr(config, name)
        require(
            value == ModelConfig.__dataclass_fields__[name].default,
            "model",
            config.name,
            f"has {name}={value!r}, which training does not compute",
            "train for a model of Llama's architecture",
        )
    for layer in wish.layers:
        require(
            0 <= layer < config.num_layers,
            "layers",
            layer,
            f"is outside the target's layers 0..{config.num_layers - 1}",
            "give layers of the target",
        )


def feature_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the target's layers that an EAGLE-3 head reads; a shallow target has fewer to choose.

    Of a target as deep as those of the authors they are `eagle.low_middle_high`.
    """
    last = config.num_layers - 1
    return tuple(min(max(layer, 0), last) for layer in eagle.low_middle_high(config.num_layers))


def default_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers that a draft model begins with: the target's first and last."""
    return tuple(sorted({0, config.num_layers - 1}))


def start(
    wish: Wish,
    target: Model,
    train: Corpus,
    seed: int,
) -> Start:
    """Return a drafter before its first step.

    Args:
        wish: what it is.
        target: what it drafts for.
        train: what it is trained on: the most frequent tokens are the draft vocabulary, and an
            "eagle" head begins with the linear maps that fit best.
        seed: of random weights.

    Raises:
        InputError: as `check`.
    """
    config = target.config
    check(wish, config)
    real = config.vocab_size if config.token_count is None else config.token_count
    size = real if wish.vocabulary == 0 else min(wish.vocabulary, real)
    whole = size == config.vocab_size
    ids = vocabularies.most_frequent(shards.counts(train, config.vocab_size)[:real], size)
    own = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), target.params)
    head = own.embedding if own.head is None else own.head
    rows = head if whole else jnp.take(head, jnp.asarray(ids), axis=0)
    key = jax.random.key(seed)
    drafter, params, scale = _begin(wish, config, own, size, key, train)
    frozen = Frozen(own.embedding, rows, jax.tree.map(jnp.asarray, scale))
    steps = 1 if wish.kind == "draft-model" else wish.drafts
    method = Method(wish.kind, drafter, steps, wish.dtype, wish.feature_weight)
    return Start(method, starts.copied(params), frozen, None if whole else ids, ids)


def _begin(
    wish: Wish,
    config: ModelConfig,
    own: TransformerParams,
    size: int,
    key: jax.Array,
    train: Corpus,
) -> tuple[EagleConfig | MedusaConfig | ModelConfig, Any, dict[str, Any]]:
    """Return a drafter's configuration and parameters, and `Frozen.scale`."""
    if wish.kind == "draft-model":
        return *_draft_model(wish, config, own, train), {}
    if wish.kind != "medusa":
        return _eagle(wish, config, own, size, key, train)
    heads = MedusaConfig(wish.drafts, 1, config.hidden_size, size, config.num_layers)
    sizes, _ = linear.sizes(train, config.norm_eps)
    return heads, starts.medusa_heads(heads), {"weights": (1 / sizes).astype(np.float32)}


def _draft_model(
    wish: Wish, config: ModelConfig, own: TransformerParams, train: Corpus
) -> tuple[ModelConfig, TransformerParams]:
    """Return a model of the target's layers, of which the last goes straight to the output."""
    small, params = starts.draft_model(config, own, wish.layers)
    down = linear.last_down(train, small, params, np.asarray(own.embedding))
    last = dataclasses.replace(params.layers[-1], down=jnp.asarray(down))
    return small, dataclasses.replace(params, layers=(*params.layers[:-1], last))


def _eagle(
    wish: Wish,
    config: ModelConfig,
    own: TransformerParams,
    size: int,
    key: jax.Array,
    train: Corpus,
) -> tuple[EagleConfig, Any, dict[str, Any]]:
    """Return an EAGLE head at its start, and `Frozen.scale`."""
    layer = dataclasses.replace(
        config, num_layers=1, vocab_size=size, token_count=None, tie_embeddings=False
    )
    lower = feature_layers(config)
    if wish.kind == "eagle3":
        drafter = EagleConfig("eagle3", layer, lower)
        params = starts.eagle_head(drafter, own, key)
        return drafter, params, {"fc": 1 / shards.sizes(train)}
    drafter = EagleConfig("eagle", layer, (*(lower if wish.lower else ()), config.num_layers))
    embedding, eps = np.asarray(own.embedding), layer.norm_eps
    of_feature, of_lower = linear.sizes(train, eps)
    of_embedding = np.sqrt(np.mean(embedding * embedding, axis=0) + 1e-12)
    sizes = {"fc": np.concatenate([of_embedding, of_feature])}
    if wish.lower:
        sizes["fuse"] = of_lower
    scale = {name: (1 / size).astype(np.float32) for name, size in sizes.items()}
    maps = linear.maps(train, embedding, scale, eps)
    params = starts.eagle_head(drafter, own, key, maps, of_feature)
    return drafter, params, scale


def count(params: Any) -> int:
    """Return how many numbers are trained."""
    leaves: Sequence[Any] = jax.tree.leaves(params)
    return sum(int(np.prod(leaf.shape)) for leaf in leaves)
