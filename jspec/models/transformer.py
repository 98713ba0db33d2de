"""A decoder-only transformer whose families are configuration.

The residual stream is [D, rows] from end to end, rows = B * T: a product is then `W @ x` with W
stored (out, in), and verifying several rows costs little more than one (XLA:CPU would materialise
a transpose around every product otherwise; other backends choose the layout themselves).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.models import rope
from jspec.models.parameters import LayerParams, TransformerParams
from jspec.trees import Topology
from pallas_kernels import tree_attention


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over axis 0 of x [D, rows], in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=0, keepdims=True)
    scale = jax.lax.rsqrt(mean_square + jnp.float32(eps))
    return (wide * scale * weight.astype(jnp.float32)[:, None]).astype(x.dtype)


def matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return weight [out, in] @ x [in, rows], accumulated in float32, in x's dtype."""
    return jnp.matmul(weight, x, preferred_element_type=jnp.float32).astype(x.dtype)


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
    """The pure functions of one model. Hashable: a static argument of jitted programs."""

    config: ModelConfig

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return self.config.vocab_size

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache; see `jspec.cache.init`."""
        return kv.init(self.config, batch, capacity, dtype)

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
            topology: of the T nodes; node t's position is length + depth.
            feature_layers: layers whose residual output a drafter wants.

        Returns:
            The normed output [D, B * T] (rows ordered b-major) for `logits`, the cache with the
            scratch entries written, and the features, [D, B * T] each.
        """
        config = self.config
        batch, nodes = tokens.shape
        depths = jnp.asarray(topology.depths)
        positions = (cache.length[:, None] + depths[None, :]).reshape(-1)
        cosine, sine = rope.rotation(config.rope, config.head_dim, positions)
        cosine, sine = jax.lax.optimization_barrier((cosine, sine))  # not once a layer
        planned = tree_attention.plan(cache.length, jnp.asarray(topology.ancestors), cache.capacity)

        with jax.named_scope("embed"):
            x = jnp.take(params.embedding, tokens.reshape(-1), axis=0).T
        keys, values = list(cache.keys), list(cache.values)
        outputs: list[jax.Array] = []
        for index, layer in enumerate(params.layers):
            with jax.named_scope("attention"):
                normed = rms_norm(x, layer.attention_norm, config.norm_eps)
                query, key, value = self._project(layer, normed, cosine, sine, batch, nodes)
                keys[index], values[index] = kv.write(cache, index, key, value)
                mixed = tree_attention.attend(query, keys[index], values[index], planned)
                mixed = mixed.reshape(batch * nodes, -1).T
                x = x + matmul(layer.attention_out, mixed)
            with jax.named_scope("mlp"):
                normed = rms_norm(x, layer.mlp_norm, config.norm_eps)
                gate_up = matmul(layer.gate_up.reshape(-1, config.hidden_size), normed)
                gate, up = jnp.split(gate_up, 2, axis=0)
                x = x + matmul(layer.down, jax.nn.silu(gate) * up)
            outputs.append(x)
        normed = rms_norm(x, params.final_norm, config.norm_eps)
        cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        return normed, cache, tuple(outputs[layer] for layer in feature_layers)

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
        qkv = matmul(layer.qkv.reshape(-1, config.hidden_size), x)
        qkv = qkv.reshape(groups, per + 2, head_dim, rows)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.astype(qkv.dtype)[..., None]
        rotated = rotate(qkv[:, : per + 1], cosine, sine)
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
        head = params.embedding if params.head is None else params.head
        scores = jnp.matmul(head, hidden, preferred_element_type=jnp.float32)
        # Transposed after the product, not in it: XLA:CPU's [rows, D] x [D, V] is several times
        # slower at 2 to 8 rows.
        scores = jax.lax.optimization_barrier(scores).T
        count = self.config.token_count
        if count is not None and count < self.config.vocab_size:
            real = jnp.arange(self.config.vocab_size, dtype=jnp.int32) < count
            scores = jnp.where(real[None, :], scores, -jnp.inf)
        return scores
