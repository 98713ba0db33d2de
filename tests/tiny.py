"""Tiny random transformers that decode in milliseconds, and their weights as NumPy sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler

from jspec.config import ModelConfig, RopeConfig
from jspec.model import Model
from jspec.models import parameters
from jspec.models.parameters import TransformerParams
from tests.oracles import numpy_llama

CONFIG = ModelConfig(
    name="tiny",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
)


def params(config: ModelConfig = CONFIG, seed: int = 8, spread: float = 0.0) -> TransformerParams:
    """Return random float32 parameters; `spread` also moves the norms and biases off 1 and 0.

    With the default seed the greedy choices after `prompts` are far from ties (0.008 at least).
    """
    tree = parameters.initialize(config, jax.random.key(seed), jnp.float32)
    if not spread:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    moved = [
        leaf + jnp.asarray(rng.normal(size=leaf.shape) * spread, jnp.float32) for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, moved)


@functools.cache
def model(max_context: int = CONFIG.max_context, eos: tuple[int, ...] = ()) -> Model:
    """Return the target that most tests decode with."""
    config = dataclasses.replace(CONFIG, max_context=max_context)
    return Model("tiny", config, params(), None, eos)


def nearby(tree: TransformerParams, scale: float, seed: int = 1) -> TransformerParams:
    """Return parameters moved by noise of `scale` times each tensor's spread: a fair drafter."""
    leaves, treedef = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    moved = [
        leaf + jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) * jnp.std(leaf) * scale
        for leaf in leaves
    ]
    return jax.tree.unflatten(treedef, moved)


def prompts(count: int) -> list[tuple[int, ...]]:
    """Return prompts of 1 to 20 tokens, the first of one; asking for more keeps the first ones."""
    rng = np.random.default_rng(0)
    sizes = [1, 9, 20, 2, 5, 13, 16, 3]
    rows = rng.integers(0, CONFIG.vocab_size, size=(len(sizes), 20))
    return [tuple(int(t) for t in rows[i, : sizes[i]]) for i in range(count)]


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """Compile with few optimizations: a third of the time, for tests that compile many programs.

    Loops are compiled in XLA's older way too, which alone takes six tenths of the time, but updates
    some arrays by other operations: not for tests that read compiled programs.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    options = compiler.get_compile_options

    def older(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("env_options_overrides") or {}
        kwargs["env_options_overrides"] = {"xla_cpu_use_fusion_emitters": False} | given
        return options(*args, **kwargs)

    # XLA_FLAGS are read once, so they would hold for every module of a process.
    with mock.patch.object(compiler, "get_compile_options", older):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Return the scaling as a Hugging Face config writes it."""
    if rope.scaling == "none":
        return None
    return {
        "rope_type": rope.scaling,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_context,
    }


def to_numpy(config: ModelConfig, tree: TransformerParams) -> numpy_llama.Llama:
    """Return the float64 reference with the same weights, as a checkpoint would hold them."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
    width, per = config.hidden_size, config.queries_per_kv

    def layer(p: parameters.LayerParams) -> numpy_llama.Layer:
        bias = p.qkv_bias
        return numpy_llama.Layer(
            input_norm=p.attention_norm,
            q=p.qkv[:, :per].reshape(-1, width),
            k=p.qkv[:, per].reshape(-1, width),
            v=p.qkv[:, per + 1].reshape(-1, width),
            o=p.attention_out,
            post_norm=p.mlp_norm,
            gate=p.gate_up[0],
            up=p.gate_up[1],
            down=p.down,
            q_bias=None if bias is None else bias[:, :per].reshape(-1),
            k_bias=None if bias is None else bias[:, per].reshape(-1),
            v_bias=None if bias is None else bias[:, per + 1].reshape(-1),
        )

    return numpy_llama.Llama(
        embedding=tree.embedding,
        layers=[layer(p) for p in tree.layers],
        norm=tree.final_norm,
        head=tree.head,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.norm_eps,
        theta=config.rope.theta,
        rope_scaling=rope_scaling(config.rope),
    )
