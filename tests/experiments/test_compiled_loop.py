"""Whole chunks of real models compiled for TPUs and an H100, where their compilers are installed.

No such chip is needed, and nothing is run.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments import compiled_loop, compilers
from experiments.compiled_loop import WHOLE, Compiled, Whole
from jspec.config import ModelConfig, RopeConfig
from jspec.drafting.ngram_tree import ngram_tree
from jspec.models import parameters
from pallas_kernels import dispatch
from tests.oracles import hlo

# SmolLM2-135M's shapes, four layers of it: narrow heads, of an odd number.
SMALL = ModelConfig(
    name="smollm2-135m",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
    rope=RopeConfig(theta=1e5),
    tie_embeddings=True,
)
TREE = ngram_tree(nodes=15)
CASES = (
    # The experiment compiles for v6e too, whose program of this model is v5p's in all looked at.
    *(whole for whole in WHOLE if whole.chip != "v6e"),
    Whole("v5e", SMALL, rows=1, gamma=7),
    *(Whole(chip, SMALL, gamma=15, drafter=TREE) for chip in ("v5e", "h100")),
)


def chunk(whole: Whole) -> Compiled:
    dispatch.forget()
    try:
        return compiled_loop.compile_chunk(whole)
    except compilers.UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("whole", CASES, ids=lambda whole: f"{whole.chip}-{whole.name}")
def test_the_loop_compiles_in_place(whole: Whole) -> None:
    found = chunk(whole)
    ran = {choice.op: choice.ran for choice in dispatch.choices()}
    kernel = "gpu" if whole.chip == "h100" else "tpu"
    moved = set() if whole.drafter is not TREE else {"cache_commit"}
    ops = {"tree_attention", "cache_write", "rejection_sampling"} | moved
    assert ran == dict.fromkeys(ops, kernel)

    # The caches are the arguments' own, to the byte; small arrays are padded to whole tiles.
    leaves = jax.tree.leaves(found.state)
    rest = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) - found.caches
    assert found.caches <= found.aliased <= found.caches + rest + 64 * 4096
    # A small model's weights on their way through VMEM are the rest.
    few = 0.05 * found.caches if whole in WHOLE else whole.logits_bytes + 2**24
    assert found.scratch - whole.logits_bytes < few

    writes = list(hlo.loop_writes(found.text))
    copied = ("copy", "copy-done", "transpose")
    assert [w for w in writes if w.op in copied and w.size in found.cache_sizes] == []
    weights = jax.tree.leaves(parameters.abstract(whole.config, jnp.bfloat16))
    sizes = {leaf.size for leaf in weights if leaf.ndim > 1}
    laid_out_anew = ("copy", "transpose", "convert")
    assert [w for w in writes if w.op in laid_out_anew and w.size in sizes] == []


def test_names_tell_programs_apart() -> None:
    assert len({(whole.chip, whole.name) for whole in CASES}) == len(CASES)
    assert dataclasses.replace(CASES[0], rows=1).name != CASES[0].name
