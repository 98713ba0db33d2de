"""The TPU kernel, run on the CPU by the strictest interpreter there is, against float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tree_attention as ops
from pallas_kernels.tree_attention import tpu
from tests.oracles.attention import Inputs, draw_inputs

STATIC = ("scale", "softcap", "window", "implementation")


def run(inputs: Inputs, page: int | None, attention: Any, **static: Any) -> np.ndarray:
    try:
        found = attention(**inputs.arguments(page), **static, implementation="tpu_interpret")
        found.block_until_ready()
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    # A race is only printed.
    races = interpret_pallas_call.races
    assert races is not None
    assert not races.races_found
    assert found.dtype == inputs.query.dtype
    return np.asarray(found, np.float64)


# head_dim, heads, groups, nodes, slots, dtype, page, settings; the kernel's blocks are of 16 slots
# (of 128, a lane tile, where heads are narrow).
CASES = [
    # One node, three queries a head, a last block that is moved to fit.
    (128, 3, 1, 1, 40, np.float32, None, {}),
    (128, 4, 2, 5, 56, np.float32, None, {"window": 3, "softcap": 1.5}),
    # Two words of ancestors, and pages smaller than a block.
    (128, 2, 1, 40, 64, np.float32, 8, {"scale": 0.3}),
    # Pages behind the window are not there.
    (128, 4, 4, 3, 96, np.float32, 8, {"window": 20}),
    (256, 4, 2, 6, 48, jnp.bfloat16, 16, {"softcap": 2.0}),
    # Slots on the lanes.
    (64, 6, 2, 5, 384, jnp.bfloat16, None, {"window": 130}),
    (96, 2, 1, 7, 256, np.float32, 128, {}),
]


@pytest.mark.parametrize(
    ("head_dim", "heads", "groups", "nodes", "slots", "dtype", "page", "static"), CASES
)
def test_kernel_equals_the_definition(
    head_dim: int,
    heads: int,
    groups: int,
    nodes: int,
    slots: int,
    dtype: Any,
    page: int | None,
    static: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = 128 if head_dim < 128 else 16
    monkeypatch.setattr(tpu, "BLOCK", block)
    attention = jax.jit(functools.partial(ops.tree_attention), static_argnames=STATIC)
    full = slots - nodes
    edges = {0, 1, full, *(e for b in (block, 2 * block) for e in (b - nodes, b - 1, b, b + 1))}
    length = st.sampled_from(sorted(e for e in edges if 0 <= e <= full)) | st.integers(0, full)

    @settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
    @given(prefix=st.lists(length, min_size=2, max_size=2), seed=st.integers(0, 2**16))
    def check(prefix: list[int], seed: int) -> None:
        inputs = draw_inputs(
            seed,
            prefix,
            nodes=nodes,
            heads=heads,
            groups=groups,
            slots=slots,
            head_dim=head_dim,
            dtype=dtype,
            stale=math.nan,
        )
        found = run(inputs, page, attention, **static)
        tolerance = 3e-2 if dtype == jnp.bfloat16 else 2e-5
        expected = inputs.expected(**static)
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)

    check()


def test_one_tree_for_all_rows() -> None:
    inputs = draw_inputs(
        3,
        [7, 0, 19],
        nodes=4,
        heads=2,
        groups=2,
        slots=24,
        head_dim=128,
        dtype=np.float32,
        stale=math.nan,
    )
    arguments = inputs.arguments()
    arguments["ancestors"] = arguments["ancestors"][1]
    inputs.trees[:] = [inputs.trees[1]] * 3
    found = ops.tree_attention(**arguments, implementation="tpu_interpret")
    np.testing.assert_allclose(found, inputs.expected(), atol=2e-5)


def test_a_key_that_is_not_finite_reaches_those_alone_who_attend_to_it() -> None:
    inputs = draw_inputs(
        5,
        [9],
        nodes=3,
        heads=1,
        groups=1,
        slots=24,
        head_dim=128,
        dtype=np.float32,
        stale=math.nan,
    )
    inputs.keys[0, 0, 10] = math.nan  # node 1
    arguments = inputs.arguments()
    arguments["ancestors"] = jnp.asarray([[1], [3], [5]], jnp.uint32)
    found = ops.tree_attention(**arguments, implementation="tpu_interpret")[0, :, 0]
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[2]).all()
