"""The GPU kernels, interpreted on the CPU, against float64."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import tree_attention as ops
from pallas_kernels.tree_attention import gpu
from tests.oracles.attention import draw_inputs

STATIC = ("scale", "softcap", "window", "implementation")
# head_dim, heads, groups, nodes, slots, dtype, page, settings, and the shares that slots are split
# into.
CASES = [
    (64, 3, 1, 1, 200, np.float32, None, {}, 2),
    (128, 4, 2, 5, 384, jnp.bfloat16, None, {"window": 70, "softcap": 1.5}, 1),
    (64, 4, 2, 5, 520, jnp.bfloat16, None, {"softcap": 1.5}, 4),
    # Several tiles of rows, two words of ancestors.
    (64, 4, 2, 40, 96, np.float32, 4, {"scale": 0.3}, 1),
    (96, 4, 4, 3, 300, np.float32, 10, {"window": 150}, 2),
    (256, 2, 1, 6, 160, np.float32, 16, {"softcap": 2.0, "window": 4}, 1),
]


@pytest.mark.parametrize(
    ("head_dim", "heads", "groups", "nodes", "slots", "dtype", "page", "static", "splits"), CASES
)
def test_kernels_equal_the_definition(
    head_dim: int,
    heads: int,
    groups: int,
    nodes: int,
    slots: int,
    dtype: Any,
    page: int | None,
    static: dict[str, Any],
    splits: int,
) -> None:
    attention = jax.jit(ops.tree_attention, static_argnames=STATIC)
    full = slots - nodes
    blocks = (16, 32, 64, 128)
    edges = {0, 1, full, *(e for b in blocks for e in (b - nodes, b - 1, b, b + 1))}
    length = st.sampled_from(sorted(e for e in edges if 0 <= e <= full)) | st.integers(0, full)

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
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
        arguments = inputs.arguments(page)
        table = arguments.get("block_table")
        problem = ops.describe(arguments["query"], arguments["keys"], table, **_of(static))
        assert gpu.tiling(problem).splits == splits
        found = attention(**arguments, **static, implementation="gpu_interpret")
        assert found.dtype == dtype
        tolerance = 3e-2 if dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(
            np.asarray(found, np.float64),
            inputs.expected(**static),
            atol=tolerance,
            rtol=tolerance,
        )

    check()


def _of(static: dict[str, Any]) -> dict[str, Any]:
    return {name: static[name] for name in ("window", "softcap") if name in static}


@pytest.mark.parametrize("slots", [2048, 32768])
def test_one_row_fills_the_chip(slots: int) -> None:
    query = jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 8, slots, 128), jnp.bfloat16)
    cut = gpu.tiling(ops.describe(query, keys))
    assert cut.splits * 8 >= 128
    assert slots // cut.splits >= 2 * cut.block


def test_heads_are_cut_into_powers_of_two() -> None:
    assert gpu.parts(96) == ((0, 64), (64, 32))
    assert gpu.parts(256) == ((0, 256),)
