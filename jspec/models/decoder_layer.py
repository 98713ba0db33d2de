"""One decoder layer over a cache, and what all layers of a forward pass share.

The residual stream is [D, rows] from end to end, rows = B * T: a product is then `W @ x` with W
stored (out, in), and verifying several rows costs little more than one (XLA:CPU would materialise
a transpose around every product otherwise; other backends choose the layout themselves).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.config import Activation, ModelConfig, RopeConfig
from jspec.models import linear, rope
from jspec.models.linear import Weight, matmul
from jspec.models.parameters import LayerParams
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


class Pass(NamedTuple):
    """What the layers of one forward pass share.

    Attributes:
        batch: B.
        nodes: T, nodes of the topology, which attention is planned for.
        first: int32 scalar, where the nodes that are run lie among the T; None where all are run.
        ancestors: of the T nodes.
        rotations: of the nodes that are run, by each rotary embedding in use.
        plans: by each window in use; kernels leave them unused.
    """

    batch: int
    nodes: int
    first: jax.Array | None
    ancestors: jax.Array
    rotations: dict[RopeConfig, tuple[jax.Array, jax.Array]]
    plans: dict[int | None, tree_attention.Plan]


@dataclasses.dataclass(frozen=True)
class DecoderLayers:
    """The pure functions of one architecture's layers. Hashable.

    Attributes:
        config: architecture.
        kernels: which implementations of cache and attention its programs ask for.
    """

    config: ModelConfig
    kernels: Kernels = kv.DEFAULT_KERNELS

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache; see `jspec.cache.init`."""
        packed = self.kernels.heads_a_lane_row(self.config.head_dim)
        return kv.init(self.config, batch, capacity, dtype, packed)

    def embed(self, embedding: Weight, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the scaled embeddings [D, rows] of `dtype` of tokens [rows] int32."""
        x = linear.embed(embedding, tokens, dtype)
        if self.config.embedding_scale is not None:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        return x

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the RMS norm of x [..., D, rows]."""
        return rms_norm(x, weight, self.config.norm_eps, self.config.norm_unit_offset)

    def scores(self, head: Weight, hidden: jax.Array) -> jax.Array:
        """Return float32 logits [rows, V] of head [V, D] and hidden [D, rows].

        They are capped, and -inf at the ids that only pad the head.
        """
        scores = linear.head(head, hidden)
        cap = self.config.logit_softcap
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        count = self.config.token_count
        if count is not None and count < self.config.vocab_size:
            real = jnp.arange(self.config.vocab_size, dtype=jnp.int32) < count
            scores = jnp.where(real[None, :], scores, -jnp.inf)
        return scores

    def plan(
        self,
        cache: KVCache,
        topology: Topology,
        width: int | None = None,
        first: jax.Array | None = None,
    ) -> Pass:
        """Plan a pass over the nodes of a topology, or over some of them.

        Args:
            cache: prefix of each row; node t's position is length + depth.
            topology: of T nodes.
            width: how many nodes are run, None for all.
            first: int32 scalar, index of the first one of them; what lies before was run earlier.
        """
        by_row = topology.by_row()
        depths = jnp.asarray(by_row.depths)
        if width is not None and first is not None:
            depths = jax.lax.dynamic_slice_in_dim(depths, first, width, axis=1)
        positions = (cache.length[:, None] + depths).reshape(-1)
        ancestors = jnp.asarray(topology.ancestors)
        layers = range(self.config.num_layers)
        return Pass(
            batch=cache.length.shape[0],
            nodes=topology.size,
            first=first,
            ancestors=ancestors,
            rotations={
                # The barrier keeps XLA from recomputing it in every layer.
                embedding: jax.lax.optimization_barrier(
                    rope.rotation(embedding, self.config.head_dim, positions)
                )
                for embedding in dict.fromkeys(map(self._rope, layers))
            },
            plans={
                window: tree_attention.plan(cache.length, ancestors, cache.capacity, window)
                for window in dict.fromkeys(self._window(layer, cache) for layer in layers)
            },
        )

    def layer(
        self,
        index: int,
        params: LayerParams,
        x: jax.Array,
        cache: KVCache,
        planned: Pass,
        attended: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run one layer.

        Args:
            index: of the layer, in the cache and the configuration.
            params: of the layer.
            x: [D, rows], the residual stream.
            cache: whose prefix is attended to.
            planned: of this pass.
            attended: [inputs, rows] that query, key and value are made of; None for the normed x.

        Returns:
            The residual stream and the layer's keys and values with the nodes' entries written.
        """
        with jax.named_scope("attention"):
            if attended is None:
                attended = self.norm(x, params.attention_norm)
            rotation = planned.rotations[self._rope(index)]
            query, key, value = self._project(params, attended, *rotation, planned.batch)
            keys, values = self._write(cache, index, key, value, planned)
            mixed = self._attend(index, query.astype(keys.dtype), keys, values, cache, planned)
            mixed = mixed.reshape(x.shape[1], -1).T.astype(x.dtype)
            mixed = matmul(params.attention_out, mixed)
            if params.post_attention_norm is not None:
                mixed = self.norm(mixed, params.post_attention_norm)
            x = x + mixed
        with jax.named_scope("mlp"):
            normed = self.norm(x, params.mlp_norm)
            gate_up = matmul(params.gate_up, normed)
            gate, up = jnp.split(gate_up, 2, axis=0)
            mixed = matmul(params.down, gated(gate, up, self.config.activation))
            if params.post_mlp_norm is not None:
                mixed = self.norm(mixed, params.post_mlp_norm)
            x = x + mixed
        return x, keys, values

    def _rope(self, layer: int) -> RopeConfig:
        """The rotary embedding of one layer."""
        local = self.config.local_rope
        return self.config.rope if local is None or self.config.window(layer) is None else local

    def _window(self, layer: int, cache: KVCache) -> int | None:
        """The window of one layer, or None where no row can outgrow it."""
        window = self.config.window(layer)
        return None if window is None or window >= cache.capacity else window

    def _write(
        self, cache: KVCache, index: int, key: jax.Array, value: jax.Array, planned: Pass
    ) -> tuple[jax.Array, jax.Array]:
        if planned.first is not None:
            cache = dataclasses.replace(cache, length=cache.length + planned.first)
        return kv.write(cache, index, key, value, self.kernels)

    def _attend(
        self,
        index: int,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        cache: KVCache,
        planned: Pass,
    ) -> jax.Array:
        """Attend over a layer's cache, whose heads may be packed; as query [B, rows / B, N, H]."""
        config, packed = self.config, keys.shape[3] // query.shape[3]
        heads, groups = config.num_heads, config.num_kv_heads
        width = query.shape[1]
        if planned.first is not None:
            # Kernels know no offset of the queries. Those of the other nodes cost little: no
            # weights are read for them.
            wide = jnp.zeros((planned.batch, planned.nodes, *query.shape[2:]), query.dtype)
            query = jax.lax.dynamic_update_slice_in_dim(wide, query, planned.first, axis=1)
        if packed > 1:
            query = packing.pack_query(query, groups, packed)
        scale, window = config.attention_scale, self._window(index, cache)
        mixed = tree_attention.tree_attention(
            query,
            keys,
            values,
            prefix_length=cache.length,
            ancestors=planned.ancestors,
            scale=config.head_dim**-0.5 if scale is None else scale,
            softcap=config.attention_softcap,
            window=window,
            planned=planned.plans[window],
            implementation=self.kernels,
        )
        if packed > 1:
            mixed = packing.unpack_output(mixed, heads, groups, packed)
        if planned.first is not None:
            mixed = jax.lax.dynamic_slice_in_dim(mixed, planned.first, width, axis=1)
        return mixed

    def _project(
        self, layer: LayerParams, x: jax.Array, cosine: jax.Array, sine: jax.Array, batch: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rotated query [B, T, N, H], rotated key and value [B, T, G, H]."""
        config = self.config
        rows = x.shape[1]
        nodes = rows // batch
        groups, per, head_dim = config.num_kv_heads, config.queries_per_kv, config.head_dim
        qkv = matmul(layer.qkv, x)
        qkv = qkv.reshape(groups, per + 2, head_dim, rows)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.astype(qkv.dtype)[..., None]
        query_key = qkv[:, : per + 1]
        if layer.q_norm is not None:
            weights = jnp.stack([*[layer.q_norm] * per, layer.k_norm])
            query_key = self.norm(query_key, weights)
        rotated = rotate(query_key, cosine, sine)
        query = rotated[:, :per].reshape(config.num_heads * head_dim, rows).T
        key = rotated[:, per].reshape(groups * head_dim, rows).T
        value = qkv[:, per + 1].reshape(groups * head_dim, rows).T
        return (
            query.reshape(batch, nodes, config.num_heads, head_dim),
            key.reshape(batch, nodes, groups, head_dim),
            value.reshape(batch, nodes, groups, head_dim),
        )
