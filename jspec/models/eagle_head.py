"""The forward pass of an EAGLE head; `jspec.models.eagle` declares what it is made of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.models.decoder_layer import DecoderLayers, rms_norm
from jspec.models.eagle import EagleConfig, EagleParams
from jspec.models.linear import matmul
from jspec.trees import Topology
from pallas_kernels.dispatch import Kernels


@dataclasses.dataclass(frozen=True)
class EagleHead:
    """The pure functions of one head. Hashable: a static argument of jitted programs.

    A feature is what an entry goes on with, D numbers: of true ones `fuse` makes them, and every
    entry's own output is a guess at the next.

    Attributes:
        config: architecture.
        kernels: which implementations of cache and attention its programs ask for.
    """

    config: EagleConfig
    kernels: Kernels = kv.DEFAULT_KERNELS

    @property
    def layers(self) -> DecoderLayers:
        """The functions of its decoder layer."""
        return DecoderLayers(self.config.layer, self.kernels)

    @property
    def target_width(self) -> int:
        """Numbers of the target's features a token, all layers together."""
        return len(self.config.feature_layers) * self.config.layer.hidden_size

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache of one layer; see `jspec.cache.init`."""
        return self.layers.init_cache(batch, capacity, dtype)

    def fuse(self, params: EagleParams, features: jax.Array) -> jax.Array:
        """Return features to go on with.

        Args:
            params: of this configuration.
            features: [width, rows], the target's, layer upon layer.

        Returns:
            [D, rows]; "eagle" takes the target's normed output as it is, but for what lower
            layers add.
        """
        features = features.astype(params.layer.mlp_norm.dtype)
        if self.config.kind == "eagle3":
            return self._joined(params, features)
        if params.fuse is None:
            return features
        d = self.config.layer.hidden_size
        lower = features[:-d].reshape(-1, d, features.shape[-1])
        normed = rms_norm(lower, jnp.ones(d, jnp.float32), self.config.layer.norm_eps)
        return features[-d:] + matmul(params.fuse, normed.reshape(-1, features.shape[-1]))

    def _joined(self, params: EagleParams, x: jax.Array) -> jax.Array:
        x = matmul(params.fc, x)
        return x if params.fc_bias is None else x + params.fc_bias.astype(x.dtype)[:, None]

    def forward(
        self,
        params: EagleParams,
        tokens: jax.Array,
        features: jax.Array,
        cache: KVCache,
        topology: Topology,
        first: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Run W entries a row past the cached prefix.

        Args:
            params: of this configuration.
            tokens: [B, W] int32, for each entry the token after its feature's.
            features: [D, B * W], of `fuse` or guesses.
            cache: prefix of each row; what is run is written past its length, which stays.
            topology: of T nodes, W of them if `first` is None.
            first: int32 scalar, index among the T of the first entry that is run; nodes before it
                were, and lie in the scratch. The positions are length + depth.

        Returns:
            The output [D, B * W] (rows ordered b-major), which is also the guess at the target's
            features at the entries' tokens, and the cache with the scratch entries written.
        """
        layers, layer = self.layers, params.layer
        width = None if first is None else tokens.shape[1]
        planned = layers.plan(cache, topology, width, first)
        attended: jax.Array | None
        with jax.named_scope("embed"):
            embedded = layers.embed(params.embedding, tokens.reshape(-1), features.dtype)
            if self.config.kind == "eagle3":
                x = features
                normed = (
                    layers.norm(embedded, params.embedding_norm),
                    layers.norm(features, params.feature_norm),
                )
                attended = jnp.concatenate(normed)
            else:
                x = self._joined(params, jnp.concatenate([embedded, features]))
                attended = x if layer.attention_norm is None else None
        x, keys, values = layers.layer(0, layer, x, cache, planned, attended)
        return x, dataclasses.replace(cache, keys=(keys,), values=(values,))

    def draft_logits(self, params: EagleParams, output: jax.Array) -> jax.Array:
        """Return float32 logits [rows, Vd] of the tokens after some of `forward`'s output columns.

        Args:
            params: of this configuration.
            output: [D, rows].
        """
        if self.config.kind == "eagle3":
            output = self.layers.norm(output, params.norm)
        return self.layers.scores(params.head, output)
