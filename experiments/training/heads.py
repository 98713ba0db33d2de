"""Forward passes for training: whole sequences at once, no cache, activations rows first.

Each is the same function of the same parameters as the one that drafts, which tests hold them to.
Products may run in bfloat16 with float32 sums; norms and softmax are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.models import rope
from jspec.models.decoder_layer import gated
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.medusa import MedusaParams
from jspec.models.parameters import LayerParams, TransformerParams

Pair = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return x [.., in] times weight [.., in] transposed, its leading dimensions flattened.

    Args:
        x: float32.
        weight: (out, in), float32.
        dtype: of the products' operands, backward too; sums are float32.
    """
    return _contract(x.astype(dtype), _flat(weight, dtype), x.ndim - 1, 1)


def _flat(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return weight.reshape(-1, weight.shape[-1]).astype(dtype)


def _contract(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    """Return the product over one axis of each, or over all but the last of both for axis -1."""
    axes = ((of_x,), (of_y,)) if of_x >= 0 else (tuple(range(x.ndim - 1)),) * 2
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _forward(x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, Pair]:
    return product(x, weight, dtype), (x.astype(dtype), weight)


def _backward(dtype: jnp.dtype, kept: Pair, gradient: jax.Array) -> Pair:
    # JAX's own rule would multiply float32 gradients, at half the speed of bfloat16 ones.
    x, weight = kept
    gradient = gradient.astype(dtype)
    of_x = _contract(gradient, _flat(weight, dtype), gradient.ndim - 1, 0)
    return of_x, _contract(gradient, x, -1, -1).reshape(weight.shape)


product.defvjp(_forward, _backward)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
    return x * scale * _broad(weight, x)


def _broad(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Return a vector, or a small array of x's last axes, with as many axes as x."""
    return jnp.expand_dims(vector, tuple(range(x.ndim - vector.ndim)))


def _rotate(x: jax.Array, config: ModelConfig, first: int) -> jax.Array:
    """Rotate x [N, W, heads, H], whose first position is `first`."""
    positions = jnp.arange(first, first + x.shape[1], dtype=jnp.int32)
    cosine, sine = rope.rotation(config.rope, config.head_dim, positions)
    cosine, sine = cosine.T[None, :, None, :], sine.T[None, :, None, :]
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def _project(
    config: ModelConfig, layer: LayerParams, x: jax.Array, first: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated query [N, W, G, P, H], rotated key and value [N, W, G, H]."""
    rows, width = x.shape[:2]
    groups, per, head_dim = config.num_kv_heads, config.queries_per_kv, config.head_dim
    qkv = product(x, layer.qkv, dtype).reshape(rows, width, groups, per + 2, head_dim)
    if layer.qkv_bias is not None:
        qkv = qkv + _broad(layer.qkv_bias, qkv)
    turned = qkv[..., : per + 1, :].reshape(rows, width, groups * (per + 1), head_dim)
    turned = _rotate(turned, config, first).reshape(rows, width, groups, per + 1, head_dim)
    return turned[..., :per, :], turned[..., per, :], qkv[..., per + 1, :]


def _attend(config: ModelConfig, query: jax.Array, past: Pair, own: tuple[Pair, ...]) -> jax.Array:
    """Attend over the entries up to each place, and over the guessed ones that follow it there.

    Args:
        config: of the layer.
        query: [N, W, G, P, H].
        past: keys and values of the true entries [N, W, G, H], seen up to one's own place.
        own: keys and values of the guessed entries, each seen from its own place alone.

    Returns:
        [N, W, G * P * H].
    """
    rows, width = query.shape[:2]
    query = query * jnp.float32(config.head_dim**-0.5)
    scores = jnp.einsum("nwgph,nvgh->ngpwv", query, past[0])
    seen = jnp.tril(jnp.ones((width, width), bool))
    scores = jnp.where(_broad(seen, scores), scores, -jnp.inf)
    extra = [jnp.einsum("nwgph,nwgh->ngpw", query, key)[..., None] for key, _ in own]
    weights = jax.nn.softmax(jnp.concatenate([scores, *extra], axis=-1), axis=-1)
    mixed = jnp.einsum("ngpwv,nvgh->nwgph", weights[..., :width], past[1])
    for place, (_, value) in enumerate(own):
        weight = jnp.moveaxis(weights[..., width + place], 3, 1)
        mixed = mixed + weight[..., None] * value[:, :, :, None, :]
    return mixed.reshape(rows, width, -1)


def _feed_forward(
    config: ModelConfig, layer: LayerParams, x: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    return x + product(_units(config, layer, x, dtype), layer.down, dtype)


def _units(config: ModelConfig, layer: LayerParams, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the hidden units [N, W, F] of a layer's feed-forward block."""
    normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
    gate, up = jnp.split(product(normed, layer.gate_up, dtype), 2, axis=-1)
    return gated(gate, up, config.activation)


def fuse(
    config: EagleConfig, params: EagleParams, features: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return features [N, W, D] to go on with, of the target's [N, W, F * D]."""
    if config.kind == "eagle3":
        fused = product(features, params.fc, dtype)
        return fused if params.fc_bias is None else fused + _broad(params.fc_bias, fused)
    if params.fuse is None:
        return features
    d = config.layer.hidden_size
    lower = features[..., :-d]
    split = lower.reshape(*lower.shape[:-1], -1, d)
    normed = rms_norm(split, jnp.ones(d, jnp.float32), config.layer.norm_eps)
    return features[..., -d:] + product(normed.reshape(lower.shape), params.fuse, dtype)


def eagle_step(
    config: EagleConfig,
    params: EagleParams,
    embedded: jax.Array,
    features: jax.Array,
    past: Pair | None,
    own: tuple[Pair, ...],
    dtype: jnp.dtype,
) -> tuple[jax.Array, Pair]:
    """Run an EAGLE head over every place of a sequence.

    Args:
        config: of the head.
        params: of the head.
        embedded: [N, W, D], embeddings of the tokens that come next.
        features: [N, W, D], true ones (fused, of EAGLE-3) or the step before's output.
        past: keys and values of the true entries; None where this step runs them.
        own: those of the guessed entries of the steps between, one a step.
        dtype: of products.

    Returns:
        The output [N, W, D], and this step's keys and values.
    """
    c, layer = config.layer, params.layer
    step = len(own) + (past is not None)
    if config.kind == "eagle3":
        residual = features
        inputs = jnp.concatenate(
            [
                rms_norm(embedded, params.embedding_norm, c.norm_eps),
                rms_norm(features, params.feature_norm, c.norm_eps),
            ],
            axis=-1,
        )
    else:
        residual = product(jnp.concatenate([embedded, features], axis=-1), params.fc, dtype)
        if params.fc_bias is not None:
            residual = residual + _broad(params.fc_bias, residual)
        norm = layer.attention_norm
        inputs = residual if norm is None else rms_norm(residual, norm, c.norm_eps)
    query, key, value = _project(c, layer, inputs, step, dtype)
    mine = (key, value)
    mixed = _attend(c, query, mine, ()) if past is None else _attend(c, query, past, (*own, mine))
    x = residual + product(mixed, layer.attention_out, dtype)
    return _feed_forward(c, layer, x, dtype), mine


def eagle_logits(
    config: EagleConfig, params: EagleParams, output: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return [N, W, Vd] float32 logits of an EAGLE head's output."""
    if params.norm is not None:
        output = rms_norm(output, params.norm, config.layer.norm_eps)
    return product(output, params.head, dtype)


def medusa_hidden(
    params: MedusaParams, features: jax.Array, head: int, dtype: jnp.dtype
) -> jax.Array:
    """Return what Medusa head `head` (static) reads [N, W, D] of the target's normed output."""
    x = features
    for block in range(params.weights.shape[1]):
        inner = product(x, params.weights[head, block], dtype)
        x = x + jax.nn.silu(inner + _broad(params.biases[head, block], inner))
    return x


def transformer_hidden(
    config: ModelConfig, params: TransformerParams, embedded: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return a Llama-like model's normed output [N, W, D] of embedded tokens [N, W, D]."""
    x, units = before_last_down(config, params, embedded, dtype)
    x = x + product(units, params.layers[-1].down, dtype)
    return rms_norm(x, params.final_norm, config.norm_eps)


def before_last_down(
    config: ModelConfig, params: TransformerParams, embedded: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the residual [N, W, D] and the hidden units [N, W, F] before the last `down`."""
    x = embedded
    for index, layer in enumerate(params.layers):
        if index:
            x = _feed_forward(config, params.layers[index - 1], x, dtype)
        normed = rms_norm(x, layer.attention_norm, config.norm_eps)
        query, key, value = _project(config, layer, normed, 0, dtype)
        x = x + product(_attend(config, query, (key, value), ()), layer.attention_out, dtype)
    return x, _units(config, params.layers[-1], x, dtype)
