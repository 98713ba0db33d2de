"""A decoder-only transformer whose families are configuration.

The residual stream is [D, rows] from end to end, rows = B * T: a product is then `W @ x` with W
stored (out, in), and verifying several rows costs little more than one (XLA:CPU would materialise
a transpose around every product otherwise; other backends choose the layout themselves).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.config import Activation, ModelConfig, RopeConfig
from jspec.models import linear, rope
from jspec.models.linear import matmul
from jspec.models.parameters import LayerParams, TransformerParams
from jspec.trees import Topology
from pallas_kernels import tree_attention
from pallas_kernels.dispatch import Kernels
from pallas_kernels.tree_attention import packing


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, unit_offset: bool = False) -> jax.Array:
    """Root-mean-square norm over axis -2, in float32.

    Args:
        x: [..., D, rows].
        weight: [D], or [M, D] for x of [..., M, D, rows].
        eps: added to the mean square.
        unit_offset: multiply by 1 + weight, not by weight.

    Returns:
        As x, in its dtype.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-2, keepdims=True)
    scale = jax.lax.rsqrt(mean_square + jnp.float32(eps))
    factor = weight.astype(jnp.float32)
    if unit_offset:
        factor = 1.0 + factor
    factor = jnp.expand_dims(factor, (*range(x.ndim - 1 - weight.ndim), -1))
    return (wide * scale * factor).astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Return the feed-forward block's hidden units: `up` times the activation of `gate`."""
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=True) * up


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate x [..., H, rows] by cosine and sine [H / 2, rows] (half-rotation layout)."""
    half = x.shape[-2] // 2
    low, high = x[..., :half, :], x[..., half:, :]
    lead = tuple(range(x.ndim - 2))
    cosine = jnp.expand_dims(cosine, lead).astype(x.dtype)
    sine = jnp.expand_dims(sine, lead).astype(x.dtype)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-2)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The pure functions of one model. Hashable: a static argument of jitted programs.

    Attributes:
        config: architecture.
        kernels: which implementations of cache and attention its programs ask for.
    """

    config: ModelConfig
    kernels: Kernels = kv.DEFAULT_KERNELS

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return self.config.vocab_size

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache; see `jspec.cache.init`."""
        return kv.init(self.config, batch, capacity, dtype, self._packed)

    @property
    def _packed(self) -> int:
        return self.kernels.heads_a_lane_row(self.config.head_dim)

    def forward(
        self,
        params: TransformerParams,
        tokens: jax.Array,
        cache: KVCache,
        topology: Topology,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
        """Run T nodes a row past the cached prefix.

        Args:
            params: of this configuration.
            tokens: [B, T] int32.
            cache: prefix of each row; the nodes' entries are written past its length, which stays.
            topology: of the T nodes, each row's own or shared; node t's position is length + depth.
            feature_layers: layers whose residual output a drafter wants; the number of layers
                stands for the normed output.

        Returns:
            The normed output [D, B * T] (rows ordered b-major) for `logits`, the cache with the
            scratch entries written, and the features, [D, B * T] each.
        """
        config = self.config
        batch, nodes = tokens.shape
        positions = (cache.length[:, None] + topology.by_row().depths).reshape(-1)
        rotations = self._rotations(positions)
        ancestors = jnp.asarray(topology.ancestors)
        plans = self._plans(cache, ancestors)

        with jax.named_scope("embed"):
            x = linear.embed(params.embedding, tokens.reshape(-1), params.final_norm.dtype)
            if config.embedding_scale is not None:
                x = x * jnp.asarray(config.embedding_scale, x.dtype)
        keys, values = list(cache.keys), list(cache.values)
        outputs: list[jax.Array] = []
        for index, layer in enumerate(params.layers):
            with jax.named_scope("attention"):
                normed = self._norm(x, layer.attention_norm)
                rotation = rotations[self._rope(index)]
                query, key, value = self._project(layer, normed, *rotation, batch, nodes)
                keys[index], values[index] = kv.write(cache, index, key, value, self.kernels)
                window = self._window(index, cache)
                mixed = self._attend(
                    query.astype(keys[index].dtype),
                    keys[index],
                    values[index],
                    prefix_length=cache.length,
                    ancestors=ancestors,
                    window=window,
                    planned=plans[window],
                )
                mixed = mixed.reshape(batch * nodes, -1).T.astype(x.dtype)
                mixed = matmul(layer.attention_out, mixed)
                if layer.post_attention_norm is not None:
                    mixed = self._norm(mixed, layer.post_attention_norm)
                x = x + mixed
            with jax.named_scope("mlp"):
                normed = self._norm(x, layer.mlp_norm)
                gate_up = matmul(layer.gate_up, normed)
                gate, up = jnp.split(gate_up, 2, axis=0)
                mixed = matmul(layer.down, gated(gate, up, config.activation))
                if layer.post_mlp_norm is not None:
                    mixed = self._norm(mixed, layer.post_mlp_norm)
                x = x + mixed
            outputs.append(x)
        normed = self._norm(x, params.final_norm)
        outputs.append(normed)
        cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        return normed, cache, tuple(outputs[layer] for layer in feature_layers)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.config.norm_eps, self.config.norm_unit_offset)

    def _rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of one layer."""
        local = self.config.local_rope
        return self.config.rope if local is None or self.config.window(layer) is None else local

    def _rotations(self, positions: jax.Array) -> dict[RopeConfig, tuple[jax.Array, jax.Array]]:
        """Return the rotation at `positions` [rows] by each rotary embedding in use."""
        return {
            # The barrier keeps XLA from recomputing it in every layer.
            embedding: jax.lax.optimization_barrier(
                rope.rotation(embedding, self.config.head_dim, positions)
            )
            for embedding in dict.fromkeys(map(self._rope, range(self.config.num_layers)))
        }

    def _window(self, layer: int, cache: KVCache) -> int | None:
        """The window of one layer, or None where no row can outgrow it."""
        window = self.config.window(layer)
        return None if window is None or window >= cache.capacity else window

    def _plans(self, cache: KVCache, ancestors: jax.Array) -> dict[int | None, tree_attention.Plan]:
        """Return the pass's attention plan for each window in use; kernels leave it unused."""
        windows = dict.fromkeys(
            self._window(layer, cache) for layer in range(self.config.num_layers)
        )
        return {
            window: tree_attention.plan(cache.length, ancestors, cache.capacity, window)
            for window in windows
        }

    def _attend(
        self, query: jax.Array, keys: jax.Array, values: jax.Array, **of_pass: Any
    ) -> jax.Array:
        """Attend over a layer's cache, whose heads may be packed; [B, T, N, H]."""
        config, packed = self.config, keys.shape[3] // query.shape[3]
        heads, groups = config.num_heads, config.num_kv_heads
        if packed > 1:
            query = packing.pack_query(query, groups, packed)
        scale = config.attention_scale
        mixed = tree_attention.tree_attention(
            query,
            keys,
            values,
            scale=config.head_dim**-0.5 if scale is None else scale,
            softcap=config.attention_softcap,
            implementation=self.kernels,
            **of_pass,
        )
        return packing.unpack_output(mixed, heads, groups, packed) if packed > 1 else mixed

    def _project(
        self,
        layer: LayerParams,
        x: jax.Array,
        cosine: jax.Array,
        sine: jax.Array,
        batch: int,
        nodes: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rotated query [B, T, N, H], rotated key and value [B, T, G, H]."""
        config = self.config
        rows = batch * nodes
        groups, per, head_dim = config.num_kv_heads, config.queries_per_kv, config.head_dim
        qkv = matmul(layer.qkv, x)
        qkv = qkv.reshape(groups, per + 2, head_dim, rows)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.astype(qkv.dtype)[..., None]
        query_key = qkv[:, : per + 1]
        if layer.q_norm is not None:
            weights = jnp.stack([*[layer.q_norm] * per, layer.k_norm])
            query_key = self._norm(query_key, weights)
        rotated = rotate(query_key, cosine, sine)
        query = rotated[:, :per].reshape(config.num_heads * head_dim, rows).T
        key = rotated[:, per].reshape(groups * head_dim, rows).T
        value = qkv[:, per + 1].reshape(groups * head_dim, rows).T
        return (
            query.reshape(batch, nodes, config.num_heads, head_dim),
            key.reshape(batch, nodes, groups, head_dim),
            value.reshape(batch, nodes, groups, head_dim),
        )

    def logits(self, params: TransformerParams, hidden: jax.Array) -> jax.Array:
        """Return the logits of some of `forward`'s output columns.

        Args:
            params: of this configuration.
            hidden: [D, rows].

        Returns:
            [rows, V] float32; -inf at the ids that only pad the embedding.
        """
        scores = linear.head(params.embedding if params.head is None else params.head, hidden)
        cap = self.config.logit_softcap
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        count = self.config.token_count
        if count is not None and count < self.config.vocab_size:
            real = jnp.arange(self.config.vocab_size, dtype=jnp.int32) < count
            scores = jnp.where(real[None, :], scores, -jnp.inf)
        return scores
