"""Which implementation runs, and that it is on record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch


@pytest.fixture(autouse=True)
def empty_record() -> Iterator[None]:
    dispatch.forget()
    yield
    dispatch.forget()


def times(factor: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x * factor


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": times(2),
    "tpu": times(3),
    "gpu": times(5),
    "tpu_interpret": times(7),
}


def run(requested: str, reasons: dict[str, str | None]) -> Any:
    return jax.jit(lambda x: dispatch.dispatch("double", requested, reasons, IMPLEMENTATIONS, x))


@pytest.mark.parametrize(("requested", "factor"), [("xla", 2), ("tpu", 3), ("tpu_interpret", 7)])
def test_the_one_asked_for_runs(requested: str, factor: int) -> None:
    assert run(requested, {"tpu": None})(jnp.int32(1)) == factor
    assert [str(choice) for choice in dispatch.choices()] == [
        f"double: {requested} runs {requested}"
    ]


@pytest.mark.parametrize(("platform", "factor"), [("cpu", 2), ("tpu", 3), ("cuda", 5), ("rocm", 2)])
def test_auto_goes_by_the_platform_lowered_for(platform: str, factor: int) -> None:
    lowered = (
        run("auto", {"tpu": None, "gpu": None})
        .trace(jnp.int32(1))
        .lower(lowering_platforms=(platform,))
        .as_text()
    )
    for other in (2, 3, 5, 7):
        assert (f"dense<{other}> : tensor<i32>" in lowered) == (other == factor)


def test_auto_says_why_it_is_not_the_kernel() -> None:
    lowered = run("auto", {"tpu": "too wide", "gpu": None}).trace(jnp.int32(1))
    assert "dense<2> : tensor<i32>" in lowered.lower(lowering_platforms=("tpu",)).as_text()
    assert [str(choice) for choice in dispatch.choices()] == [
        "double: auto on tpu runs xla (too wide)",
        "double: auto on cuda runs gpu",
        "double: auto on others runs xla",
    ]
    assert [choice.ran for choice in dispatch.choices("cpu")] == ["xla"]
    assert [choice.reason for choice in dispatch.choices("tpu")] == ["too wide"]


@pytest.mark.parametrize("requested", ["tpu", "tpu_interpret"])
def test_one_that_cannot_run_is_an_error_with_the_reason(requested: str) -> None:
    with pytest.raises(NotImplementedError, match=f"double can't run as '{requested}': too wide"):
        run(requested, {"tpu": "too wide"})(jnp.int32(1))
    assert dispatch.choices() == ()


def test_one_that_is_not_there_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="no such kernel"):
        run("triton", {})(jnp.int32(1))
    with pytest.raises(ValueError, match="no implementation 'fast'"):
        run("fast", {})(jnp.int32(1))
