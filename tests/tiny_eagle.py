"""Tiny random EAGLE heads for a tiny target of few tokens, and their weights as NumPy sees them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec.model import Model
from jspec.models.eagle import EagleConfig, EagleParams, declare
from jspec.models.parameters import is_spec
from tests import tiny
from tests.oracles import numpy_eagle, numpy_llama
from tests.oracles.numpy_llama import Array

VOCAB = 8
# "lower" is an "eagle" head that reads lower layers too.
Variant = Literal["eagle", "eagle3", "lower"]
KINDS: tuple[Variant, ...] = ("eagle", "eagle3", "lower")
# So few tokens that a random head's drafts are often accepted.
CONFIG = dataclasses.replace(tiny.CONFIG, vocab_size=VOCAB, max_context=128)
TARGET = Model("tiny", CONFIG, tiny.params(CONFIG, seed=3), None, ())
CONTEXT = 64  # of the heads
KNOWN = (0, 2, 3, 5, 6, 7)


def config(kind: Variant) -> EagleConfig:
    """Return a head's configuration; "eagle3" has a vocabulary of its own.

    Its context is shorter than the target's.
    """
    fused = kind == "eagle3"
    layer = dataclasses.replace(
        CONFIG,
        num_layers=1,
        num_kv_heads=1,
        max_context=CONTEXT,
        vocab_size=len(KNOWN) if fused else VOCAB,
    )
    layers = (2,) if kind == "eagle" else (0, 1, 2)  # two layers, and the normed output
    return EagleConfig("eagle3" if fused else "eagle", layer, layers, fc_bias=not fused)


@functools.cache
def params(kind: Variant) -> EagleParams:
    """Return random float32 parameters, with the target's embedding and head.

    Of some seeds this one's drafts are accepted well.
    """
    specs, treedef = jax.tree.flatten(declare(config(kind)), is_leaf=is_spec)
    rng = np.random.default_rng(4)
    leaves = []
    for spec in specs:
        noise = rng.normal(size=spec.shape)
        values = noise * spec.shape[-1] ** -0.5 if spec.initializer == "normal" else noise * 0.2
        leaves.append(jnp.asarray(values + (spec.initializer == "ones"), jnp.float32))
    own: EagleParams = jax.tree.unflatten(treedef, leaves)
    known = jnp.asarray(KNOWN, jnp.int32) if kind == "eagle3" else None
    head = TARGET.params.head
    return dataclasses.replace(
        own,
        embedding=TARGET.params.embedding,
        head=head if known is None else head[known],
        vocabulary=known,
    )


@functools.cache
def to_numpy(kind: Variant) -> numpy_eagle.Head:
    """Return the float64 reference with the same weights."""
    layer = config(kind).layer
    given = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params(kind))
    per, own = layer.queries_per_kv, given.layer

    def rows(part: Array) -> Array:
        return part.reshape(-1, part.shape[-1])

    return numpy_eagle.Head(
        kind=config(kind).kind,
        fc=given.fc,
        fc_bias=given.fc_bias,
        embedding_norm=given.embedding_norm,
        feature_norm=given.feature_norm,
        layer=numpy_llama.Layer(
            input_norm=np.ones(0) if own.attention_norm is None else own.attention_norm,
            q=rows(own.qkv[:, :per]),
            k=rows(own.qkv[:, per]),
            v=rows(own.qkv[:, per + 1]),
            o=own.attention_out,
            post_norm=own.mlp_norm,
            gate=own.gate_up[0],
            up=own.gate_up[1],
            down=own.down,
        ),
        norm=given.norm,
        embedding=given.embedding,
        head=given.head,
        vocabulary=KNOWN if kind == "eagle3" else range(VOCAB),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        eps=layer.norm_eps,
        theta=layer.rope.theta,
        fuse=given.fuse,
    )


def features(kind: Variant, tokens: list[int]) -> Array:
    """Return the target's features [T, width] at some tokens, by the float64 reference."""
    target = tiny.to_numpy(CONFIG, TARGET.params)
    _, residuals = target.run(tokens)
    normed = numpy_llama.rms_norm(residuals[-1], target.norm, target.eps)
    outputs = [*residuals, normed]
    return np.concatenate([outputs[layer] for layer in config(kind).feature_layers], axis=-1)


@functools.cache
def greedy(count: int) -> list[tuple[int, ...]]:
    """Return the target's greedy tokens after each of `prompts`, by the float64 reference."""
    target, found = tiny.to_numpy(CONFIG, TARGET.params), []
    for prompt in prompts():
        tokens, gaps = target.greedy(prompt, count)
        assert min(gaps) > 1e-3  # no ties
        found.append(tuple(tokens))
    return found


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of 1, 9 and 20 tokens."""
    return [tuple(token % VOCAB for token in prompt) for prompt in tiny.prompts(3)]
