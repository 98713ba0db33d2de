"""What each kind of drafter is trained to do: guess the target's next distribution.

All are distilled: the loss is the cross-entropy of the drafter's distribution under the target's.
Of a reduced vocabulary the target's probabilities outside it are left out. A drafter's steps are
trained as it drafts: EAGLE heads go on with their own outputs (training-time test, EAGLE-3, arXiv
2503.01840), Medusa heads look further ahead.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from experiments.training import heads
from jspec import sampling
from jspec.config import ModelConfig
from jspec.models.eagle import EagleConfig
from jspec.models.medusa import MedusaConfig

# Numbers of all steps' distributions that may wait for their gradients.
_MOST_KEPT = 1 << 27
Kind = Literal["eagle", "eagle3", "medusa", "draft-model"]
# A later step counts so much less than the one before (EAGLE-3's and Medusa's authors).
_FALL = 0.8


@dataclasses.dataclass(frozen=True)
class Method:
    """What is trained. Hashable: a static argument of jitted programs.

    Attributes:
        kind: of drafter.
        config: of the drafter.
        steps: drafts in a row that are trained; Medusa has one a head, a draft model one.
        dtype: of products, "float32" or "bfloat16".
        feature_weight: of the features' error of an "eagle" head, beside the cross-entropy's 1.
    """

    kind: Kind
    config: EagleConfig | MedusaConfig | ModelConfig
    steps: int
    dtype: str = "float32"
    feature_weight: float = 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """What the target lends and training leaves alone.

    Attributes:
        embedding: [V, D].
        head: [Vd, D], the target's rows of the draft vocabulary.
        scale: by name of a tensor of linear maps of the drafter's that read features ("fc", "fuse",
            Medusa's "weights"), float32 [inputs], one over the typical size of each: the maps are
            trained for inputs of size 1, since theirs differ a hundredfold.
    """

    embedding: Any
    head: Any
    scale: Any = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences, and what the target makes of them.

    Attributes:
        tokens: [N, W] int32.
        weight: [N, W] float32, how much guessing this token counts; 0 for padding.
        layers: [N, W, F * D] bfloat16, outputs of the target's layers that the drafter reads.
        final: [N, W, D] bfloat16, the target's normed output.
        log_z: [N, W] float32, log of the sum of exponentials of its logits.
        best: [N, W] int32, place in the draft vocabulary of its most probable next token; -1 if it
            is outside.
    """

    tokens: Any
    weight: Any
    layers: Any
    final: Any
    log_z: Any
    best: Any


class Metrics(NamedTuple):
    """Sums over a batch; the first axis is the S steps.

    Attributes:
        weight: [S], of all that was guessed.
        loss: [S], weighted cross-entropy in nats.
        agree: [S], weighted count of guesses equal to the target's best token.
        overlap: [S], weighted sum of min(p, q).
    """

    weight: jax.Array
    loss: jax.Array
    agree: jax.Array
    overlap: jax.Array


def loss(method: Method, params: Any, frozen: Frozen, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Return the mean loss a token, and sums for reports.

    Args:
        method: static.
        params: the drafter's own, what the target lends None.
        frozen: what the target lends.
        batch: of sequences.
    """
    if method.kind == "medusa":
        return _medusa(method, params, frozen, batch)
    if method.kind == "draft-model":
        return _draft_model(method, params, frozen, batch)
    return _eagle(method, params, frozen, batch)


def folded(params: Any, frozen: Frozen) -> Any:
    """Return a drafter's own parameters as it drafts with them: `Frozen.scale` goes into the maps.

    Args:
        params: as trained.
        frozen: that they were trained with, on the same devices.
    """
    scaled = {}
    for name, scale in frozen.scale.items():
        maps = getattr(params, name)
        scaled[name] = maps * jnp.expand_dims(scale, tuple(range(maps.ndim - 1)))
    return dataclasses.replace(params, **scaled) if scaled else params


def _ahead(array: jax.Array, places: int) -> jax.Array:
    """Return array [N, W, ..] with what was at i + `places` at i, and 0 at the end."""
    width = array.shape[1]
    moved = array[:, places:]
    widths = [(0, 0)] * array.ndim
    widths[1] = (0, min(places, width))
    return jnp.pad(moved, widths)


def _targets(frozen: Frozen, batch: Batch, dtype: Any) -> jax.Array:
    """Return [N, W, Vd] float32: what the target gives each draftable token after every place."""
    final = batch.final.astype(jnp.float32)
    log_p = heads.product(final, frozen.head, dtype) - batch.log_z[..., None]
    return jax.lax.stop_gradient(jnp.exp(log_p))


def _compare(logits: jax.Array, p: jax.Array, batch: Batch, ahead: int) -> Metrics:
    """Compare logits [N, W, Vd] at place i with the target's p [N, W, Vd] at i + `ahead`.

    That is the distribution of token i + ahead + 1.
    """
    weight = _ahead(batch.weight, ahead + 1)
    best = _ahead(batch.best, ahead)
    p = _ahead(p, ahead)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    cross_entropy = -jnp.sum(p * log_q, axis=-1)
    overlap = jnp.sum(jnp.minimum(p, jnp.exp(jax.lax.stop_gradient(log_q))), axis=-1)
    agree = (sampling.best(jax.lax.stop_gradient(logits)) == best).astype(jnp.float32)
    return Metrics(*(jnp.sum(weight * x) for x in (1.0, cross_entropy, agree, overlap)))


def _recomputed(function: Any, p: jax.Array, steps: int) -> Any:
    """Have a step's activations computed again for its gradient, where they are large."""
    return jax.checkpoint(function) if steps * p.size > _MOST_KEPT else function


def _total(parts: list[Metrics]) -> tuple[jax.Array, Metrics]:
    """Return the loss of some steps and their sums."""
    metrics = Metrics(*(jnp.stack(column) for column in zip(*parts, strict=True)))
    fall = jnp.float32(_FALL) ** jnp.arange(len(parts), dtype=jnp.float32)
    means = metrics.loss / jnp.maximum(metrics.weight, 1.0)
    return jnp.sum(fall * means) / jnp.sum(fall), metrics


def _eagle(method: Method, params: Any, frozen: Frozen, batch: Batch) -> tuple[jax.Array, Metrics]:
    config, dtype = method.config, jnp.dtype(method.dtype)
    assert isinstance(config, EagleConfig)
    lent = {"embedding": frozen.embedding, "head": frozen.head}
    params = dataclasses.replace(folded(params, frozen), **lent)
    final = batch.final.astype(jnp.float32)
    given = final
    if len(config.feature_layers) > 1:
        lower = batch.layers.astype(jnp.float32)
        given = lower if config.kind == "eagle3" else jnp.concatenate([lower, final], axis=-1)
    features = heads.fuse(config, params, given, dtype)
    p = _targets(frozen, batch, dtype)
    regression = jnp.float32(0)
    past: heads.Pair | None = None
    own: tuple[heads.Pair, ...] = ()
    parts = []
    for step in range(method.steps):
        # Entry i joins feature i with token i + 1; a later step is one token further on.
        embedded = jnp.take(frozen.embedding, _ahead(batch.tokens, step + 1), axis=0)
        embedded = embedded.astype(jnp.float32)

        def one(
            params: Any,
            embedded: jax.Array,
            features: jax.Array,
            past: Any,
            own: Any,
            ahead: int = step + 1,
        ) -> tuple[jax.Array, heads.Pair, Metrics]:
            output, mine = heads.eagle_step(config, params, embedded, features, past, own, dtype)
            logits = heads.eagle_logits(config, params, output, dtype)
            return output, mine, _compare(logits, p, batch, ahead)

        features, mine, part = _recomputed(one, p, method.steps)(
            params, embedded, features, past, own
        )
        if past is None:
            past = mine
        else:
            own = (*own, mine)
        parts.append(part)
        if config.kind == "eagle":
            weight = _ahead(batch.weight, step + 2)
            error = _smooth_l1(features - _ahead(final, step + 1))
            mean = jnp.sum(weight * error) / jnp.maximum(jnp.sum(weight), 1.0)
            regression = regression + mean * jnp.float32(_FALL**step)
    total, metrics = _total(parts)
    if config.kind == "eagle":
        total = total + jnp.float32(method.feature_weight) * regression
    return total, metrics


def _smooth_l1(error: jax.Array) -> jax.Array:
    size = jnp.abs(error)
    return jnp.mean(jnp.where(size < 1, 0.5 * size * size, size - 0.5), axis=-1)


def _medusa(method: Method, params: Any, frozen: Frozen, batch: Batch) -> tuple[jax.Array, Metrics]:
    dtype = jnp.dtype(method.dtype)
    params = folded(params, frozen)
    final = batch.final.astype(jnp.float32)
    p = _targets(frozen, batch, dtype)
    parts = []
    for head in range(method.steps):

        def one(params: Any, head: int = head) -> Metrics:
            hidden = heads.medusa_hidden(params, final, head, dtype)
            logits = heads.product(hidden, frozen.head, dtype)
            return _compare(logits, p, batch, head + 1)

        parts.append(_recomputed(one, p, method.steps)(params))
    return _total(parts)


def _draft_model(
    method: Method, params: Any, frozen: Frozen, batch: Batch
) -> tuple[jax.Array, Metrics]:
    config, dtype = method.config, jnp.dtype(method.dtype)
    assert isinstance(config, ModelConfig)
    p = _targets(frozen, batch, dtype)

    def one(params: Any) -> Metrics:
        embedded = jnp.take(frozen.embedding, batch.tokens, axis=0).astype(jnp.float32)
        hidden = heads.transformer_hidden(config, params, embedded, dtype)
        logits = heads.product(hidden, frozen.head, dtype)
        return _compare(logits, p, batch, 0)

    return _total([_recomputed(one, p, 1)(params)])
