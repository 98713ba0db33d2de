"""What the op refuses, with the reason, and what each kernel says it can't run."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, tree_attention
from tests.oracles.attention import draw_inputs


def arguments(**changes: Any) -> dict[str, Any]:
    shape: dict[str, int] = {"nodes": 3, "heads": 4, "groups": 2, "slots": 16, "head_dim": 128}
    inputs = draw_inputs(1, [0, 8], **shape, dtype=np.float32, stale=1.0)
    return {**inputs.arguments(), **changes}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"query": jnp.zeros((2, 3, 4))}, "query must be"),
        ({"query": jnp.zeros((2, 3, 3, 128))}, "do not go with"),
        ({"query": jnp.zeros((3, 3, 4, 128))}, "2 rows of keys for 3"),
        ({"query": jnp.zeros((2, 3, 4, 128), jnp.bfloat16)}, "without scales must agree"),
        ({"values": jnp.zeros((2, 2, 15, 128))}, "must be alike"),
        ({"values": jnp.zeros((2, 2, 16, 128), jnp.bfloat16)}, "must be alike"),
        ({"prefix_length": jnp.zeros(1, jnp.int32)}, "prefix_length must be"),
        ({"prefix_length": jnp.zeros(2)}, "prefix_length must be"),
        ({"ancestors": jnp.zeros((3, 1), jnp.int32)}, "ancestors must be uint32"),
        ({"ancestors": jnp.zeros((3, 2), jnp.uint32)}, "ancestors must be uint32"),
        ({"block_table": jnp.zeros((1, 4), jnp.int32)}, "block_table must be"),
        ({"block_table": jnp.zeros((2, 4))}, "block_table must be of integers"),
        ({"key_scales": jnp.ones((2, 16))}, "scales must be"),
        ({"window": 0}, "window must be positive"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
    ],
)
def test_bad_calls_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        tree_attention.tree_attention(**arguments(**changes))


@pytest.mark.parametrize("kernel", ["tpu", "gpu", "tpu_interpret", "gpu_interpret"])
def test_a_kernel_asked_for_in_vain_says_why(kernel: Any) -> None:
    scales = jnp.ones((2, 2, 16))
    with pytest.raises(NotImplementedError, match=f"'{kernel}': the kernels read .* with scales"):
        tree_attention.tree_attention(**arguments(key_scales=scales), implementation=kernel)


def test_jax_triton_that_is_not_there_says_so() -> None:
    if importlib.util.find_spec("jax_triton") is not None:
        pytest.skip("jax-triton is installed")
    with pytest.raises(NotImplementedError, match="jax-triton can't be imported"):
        tree_attention.tree_attention(**arguments(), implementation="triton")


def test_a_kernel_for_another_platform_does_not_run_here() -> None:
    with pytest.raises(ValueError, match="interpret mode"):
        jax.jit(tree_attention.tree_attention, static_argnames="implementation")(
            **arguments(), implementation="tpu"
        )


def reasons(
    batch: int = 2,
    nodes: int = 5,
    slots: int = 256,
    head_dim: int = 128,
    dtype: Any = jnp.bfloat16,
    page: int | None = None,
    groups: int = 2,
    query_dtype: Any = None,
) -> dict[str, str | None]:
    array: Any = jax.ShapeDtypeStruct
    query = array((batch, nodes, 4, head_dim), query_dtype or dtype)
    if page is None:
        return tree_attention.supports(
            tree_attention.describe(query, array((batch, groups, slots, head_dim), dtype))
        )
    keys = array((7, groups, page, head_dim), dtype)
    table = array((batch, slots // page), jnp.int32)
    return tree_attention.supports(tree_attention.describe(query, keys, table))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("nodes", [1, 128])
def test_both_kernels_take(head_dim: int, dtype: Any, nodes: int) -> None:
    assert reasons(head_dim=head_dim, dtype=dtype, nodes=nodes) == {"tpu": None, "gpu": None}


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ({"nodes": 129}, "129 nodes"),
        ({"head_dim": 80}, "head dimension of 80"),
        ({"dtype": jnp.int8}, "not int8"),
        ({"dtype": jnp.float16}, "not float16"),
        ({"query_dtype": jnp.float32}, "want one dtype"),
    ],
)
def test_neither_kernel_takes(call: dict[str, Any], what: str) -> None:
    for reason in reasons(**call).values():
        assert reason is not None
        assert what in reason


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ({"slots": 250}, "250 slots a row are no multiple of 16"),
        ({"slots": 250, "dtype": jnp.float32}, "no multiple of 8"),
        ({"slots": 160, "head_dim": 64}, "no multiple of 128"),
        ({"page": 8}, "8 slots a page are no multiple of 16"),
        ({"page": 64, "head_dim": 64}, "no multiple of 128"),
        ({"page": 16, "batch": 1024, "slots": 2**20}, "too many for scalar memory"),
        ({"page": 2**15, "slots": 2**16}, "fits into VMEM"),
    ],
)
def test_the_tpu_kernel_alone_refuses(call: dict[str, Any], what: str) -> None:
    found = reasons(**call)
    assert found["gpu"] is None
    assert what in str(found["tpu"])


def test_auto_on_a_cpu_is_the_reference_and_notes_what_others_would_run() -> None:
    dispatch.forget()
    call = arguments(
        query=jnp.zeros((2, 3, 4, 64)),
        **dict.fromkeys(("keys", "values"), jnp.zeros((2, 2, 16, 64))),
    )
    text = str(jax.jit(tree_attention.tree_attention).lower(**call).compile().as_text())
    assert "custom-call" not in text
    assert " conditional(" not in text
    (here,) = dispatch.choices("cpu")
    assert (here.ran, here.requested) == ("xla", "auto")
    (there,) = dispatch.choices("tpu")
    assert there.ran == "xla"
    assert "no multiple of 128" in str(there)
    (there,) = dispatch.choices("cuda")
    assert there.ran == "gpu"
