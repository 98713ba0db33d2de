"""A decoder-only transformer whose families are configuration."""

from __future__ import annotations

import dataclasses

import jax

from jspec.cache import KVCache
from jspec.models.decoder_layer import DecoderLayers
from jspec.models.parameters import TransformerParams
from jspec.trees import Topology


@dataclasses.dataclass(frozen=True)
class Transformer(DecoderLayers):
    """The pure functions of one model. Hashable: a static argument of jitted programs."""

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return self.config.vocab_size

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
        planned = self.plan(cache, topology)
        with jax.named_scope("embed"):
            x = self.embed(params.embedding, tokens.reshape(-1), params.final_norm.dtype)
        keys, values = list(cache.keys), list(cache.values)
        outputs: list[jax.Array] = []
        for index, layer in enumerate(params.layers):
            x, keys[index], values[index] = self.layer(index, layer, x, cache, planned)
            outputs.append(x)
        normed = self.norm(x, params.final_norm)
        outputs.append(normed)
        cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        return normed, cache, tuple(outputs[layer] for layer in feature_layers)

    def logits(self, params: TransformerParams, hidden: jax.Array) -> jax.Array:
        """Return the logits of some of `forward`'s output columns.

        Args:
            params: of this configuration.
            hidden: [D, rows].

        Returns:
            [rows, V] float32; -inf at the ids that only pad the embedding.
        """
        head = params.embedding if params.head is None else params.head
        return self.scores(head, hidden)
