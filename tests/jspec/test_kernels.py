"""The loop with every op by its kernel, interpreted, beside the same loop by XLA."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.ngram import ngram
from jspec.generation import Decoder
from jspec.model import Model
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Kernels
from tests import tiny

# Heads as narrow as kernels take them, an odd number of them to be packed in pairs.
CONFIG = dataclasses.replace(
    tiny.CONFIG, hidden_size=24, num_heads=6, num_kv_heads=3, head_dim=64, max_context=128
)
PARAMS = tiny.params(CONFIG)
TREE = (-1, 0, 0, 1, 2)
DRAFTERS: dict[str, BoundDrafter] = {
    "chain": ngram(),
    "tree": draft_tree(CONFIG, tiny.nearby(PARAMS, 0.3), TREE),
}


def decode(drafter: BoundDrafter, implementation: Implementation) -> list[tuple[int, ...]]:
    model = Model("tiny", CONFIG, PARAMS, None, (), Kernels(implementation))
    speculation = SpeculationConfig(4)
    decoder = Decoder(model, drafter, speculation, batch_size=2, prefill_width=16)
    sampling = [
        SamplingParams(max_new_tokens=5, temperature=0.0, seed=1),
        SamplingParams(max_new_tokens=4, temperature=1.0, top_p=0.9, repetition_penalty=1.2),
    ]
    seeded = [dataclasses.replace(params, seed=5) for params in sampling]
    prompts = [(3, 4, 3, 4, 3), tuple(range(1, 12))]
    done = decoder.generate([Request(p, s) for p, s in zip(prompts, seeded, strict=True)])
    assert all(completion.error is None for completion in done)
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("chain", "gpu_interpret"),
        ("tree", "gpu_interpret"),
        ("chain", "tpu_interpret"),
        ("tree", "tpu_interpret"),
    ],
)
def test_kernels_give_the_tokens_that_xla_gives(name: str, implementation: Implementation) -> None:
    expected = decode(DRAFTERS[name], "xla")
    dispatch.forget()
    assert decode(DRAFTERS[name], implementation) == expected
    ran = {choice.op for choice in dispatch.choices() if choice.ran == implementation}
    moved = {"cache_commit"} if name == "tree" else set()
    assert ran >= {"tree_attention", "cache_write", "rejection_sampling"} | moved
    if implementation == "tpu_interpret":
        races: Any = interpret_pallas_call.races
        assert not races.races_found
