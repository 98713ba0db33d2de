"""The TPU and GPU kernels, interpreted, against the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rejection_sampling import Drafts, Statistics, Transforms, decide, gpu, tpu
from pallas_kernels.rejection_sampling import reference as plain
from tests.oracles import rejection_cases as cases
from tests.oracles import rejection_sampling as oracle
from tests.oracles.rejection_cases import Asked, Case

STRICT = pltpu.InterpretParams(
    detect_races=True,
    dma_execution_mode="on_wait",
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)
Kernel = Callable[[jax.Array, Transforms, Drafts], Statistics]
KERNELS: dict[str, Kernel] = {
    "tpu": jax.jit(functools.partial(tpu.statistics, interpret=STRICT)),
    "gpu": jax.jit(functools.partial(gpu.statistics, interpret=True)),
}
reference = jax.jit(plain.statistics)
finish = jax.jit(
    lambda case, statistics: decide(
        case.logits, case.transforms, case.drafts, statistics, case.coins, case.noise()
    )
)


def check(kernel: str, case: Case) -> None:
    truth = reference(case.logits, case.transforms, case.drafts)
    found = KERNELS[kernel](case.logits, case.transforms, case.drafts)
    if kernel == "tpu":
        races: Any = interpret_pallas_call.races
        assert not races.races_found
    want, have = finish(case, truth), finish(case, found)
    seen = oracle.as_numpy(case)
    batch, nodes, _ = seen.logits.shape
    near = np.array(
        [[oracle.law(seen, row, node).near for node in range(nodes)] for row in range(batch)]
    )
    np.testing.assert_array_equal(found.usable, truth.usable)
    row_index = np.arange(batch)[:, None]
    parents = np.array([oracle.parents_in(seen, row) for row in range(batch)])[:, 1:]
    ok = np.asarray(truth.usable) & ~near
    sound = np.all(seen.logits.astype(np.float32) < np.inf, axis=-1)
    for field in dataclasses.fields(Statistics):
        if field.name in ("usable", "threshold"):  # another one may keep the same
            continue
        a, b = (np.asarray(getattr(s, field.name)) for s in (truth, found))
        known = ok & sound if field.name.startswith("raw") else ok
        here = known if a.shape[1] == nodes else known[row_index, parents]
        tolerance = 0.0 if field.name == "best" else 2e-5
        np.testing.assert_allclose(
            np.where(here, b, 0), np.where(here, a, 0), rtol=tolerance, atol=tolerance
        )
    for row in range(batch):
        laws = [oracle.law(seen, row, node) for node in range(nodes)]
        if oracle.decision(seen, row, laws).near:
            continue
        assert have.accepted[row] == want.accepted[row]
        np.testing.assert_array_equal(have.path[row], want.path[row])
        assert have.finite[row] == want.finite[row]
        if have.finite[row]:
            assert have.final[row] == want.final[row]
            np.testing.assert_allclose(have.log_p[row], want.log_p[row], atol=5e-5, rtol=5e-5)


ALL = dataclasses.replace(cases.everything, dtype=jnp.bfloat16)
TREE = dataclasses.replace(cases.everything, law=False, tree=True, own=True)
LAW = Asked(law=True)
# Each is compiled once: part of a block of 8 nodes; a block and a bit, whose drafts fill one; a
# tree a row over two blocks; no drafts, blocks of rows.
SHAPES = {
    "chain": (2, 5, 300, cases.everything),
    "blocks": (3, 17, 200, LAW),
    "trees": (2, 10, 130, TREE),
    "rows": (9, 1, 300, ALL),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@hypothesis.settings(max_examples=3)
@hypothesis.given(seed=st.integers(0, 10**6), truncation=st.booleans(), bad=st.booleans())
def test_against_the_reference(
    kernel: str, shape: str, seed: int, truncation: bool, bad: bool
) -> None:
    batch, nodes, vocab, wish = SHAPES[shape]
    wish = dataclasses.replace(wish, truncation=truncation, bad=bad)
    check(kernel, cases.make(batch, nodes, vocab, wish, seed))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_vocabulary_of_several_chunks(kernel: str) -> None:
    check(kernel, cases.make(1, 2, 9000, Asked(penalties=True, allowed=True), seed=3))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_is_not_finite_says_so_and_stops_there(kernel: str) -> None:
    batch, nodes, vocab, wish = SHAPES["blocks"]
    case = cases.make(batch, nodes, vocab, dataclasses.replace(wish, truncation=False), seed=1)
    poisoned = case.logits.at[0, 0, 7].set(jnp.nan).at[1, 2, 9].set(jnp.inf)
    best = jnp.argmax(case.logits[:, :-1], axis=-1).astype(jnp.int32)
    greedy = dataclasses.replace(case.transforms, temperature=jnp.zeros(3, jnp.float32))
    valid = jnp.ones_like(best, dtype=bool)
    drafts = dataclasses.replace(case.drafts, tokens=best, valid=valid)
    found = KERNELS[kernel](poisoned, greedy, drafts)
    out = decide(poisoned, greedy, drafts, found, case.coins, case.noise())
    assert out.finite.tolist() == [False, False, True]
    assert out.accepted.tolist() == [0, 2, nodes - 1]
    assert out.path[2].tolist() == list(range(1, nodes))
    assert int(out.final[2]) == int(jnp.argmax(case.logits[2, -1]))


@pytest.mark.parametrize("module", [tpu, gpu])
def test_reasons_for_refusal(module: Any) -> None:
    case = cases.make(1, 2, 130, Asked(), seed=0)
    many = cases.make(1, 2, 130, dataclasses.replace(Asked(), law=True), seed=0)
    assert module.supports(case.logits, case.transforms, case.drafts) is None
    assert module.supports(many.logits, many.transforms, many.drafts) is None
    half = case.logits.astype(jnp.float16)
    assert "float16" in module.supports(half, case.transforms, case.drafts)
    with pytest.raises(ValueError, match="float16"):
        module.statistics(half, case.transforms, case.drafts)


def test_a_vocabulary_beyond_vmem_is_refused() -> None:
    vocab = 2**20
    logits: Any = jax.ShapeDtypeStruct((1, 2, vocab), jnp.float32)
    case = cases.make(1, 2, 130, Asked(), seed=0)
    assert "VMEM" in str(tpu.supports(logits, case.transforms, case.drafts))


def test_more_forbidden_tokens_than_scalar_memory_holds_are_refused() -> None:
    case = cases.make(1, 2, 130, Asked(), seed=0)
    many: Any = jax.ShapeDtypeStruct((1, 2, 2**17), jnp.int32)
    transforms = dataclasses.replace(case.transforms, forbidden=many)
    assert "SMEM" in str(tpu.supports(case.logits, transforms, case.drafts))
    assert gpu.supports(case.logits, transforms, case.drafts) is None
