"""Every op against its reference on fresh random inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_cases as cases
from experiments import kernel_ops as ops
from experiments.kernel_budget import (
    Compiler,
    Deadline,
    NotReached,
    quick_flags,
    result,
    said,
)
from experiments.kernel_cases import Attention, Cache, Case, Rejection, op_of

# Largest difference that attention may have from float32 arithmetic, of outputs of order 1.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
LOG_P_TOLERANCE = 1e-3
# A decision is borderline where changes of this size, relative, change the reference's own.
MARGIN = 1e-5

Row = dict[str, Any]
Checker = Callable[[Compiler, int], Callable[[Deadline], Row]]


def run(
    wanted: Sequence[Case],
    implementations: Sequence[str],
    compiler: Compiler,
    seed: int,
    deadline: Deadline,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Yield a row for every case and implementation: what was compared, and whether it agrees.

    Args:
        wanted: the most important first.
        implementations: of the kernels.
        compiler: of the programs.
        seed: of the inputs.
        deadline: past it rows say that they were not reached.
        progress: told what is going on.
    """
    jobs = []
    progress("making inputs")
    for index, case in enumerate(wanted):
        for implementation in implementations:
            row: Row = {"op": op_of(case), "case": case.name, "implementation": implementation}
            try:
                jobs.append(
                    (row, _CHECKS[type(case)](case, implementation, compiler, seed + index))
                )
            except Exception as error:  # a row of its own, not the run's end
                jobs.append((row, _raiser(error)))
    for row, finish in jobs:
        progress(f"{row['op']} {row['case']} as {row['implementation']}")
        try:
            if deadline.left() == 0:
                raise NotReached
            row |= finish(deadline)
        except Exception as error:
            row |= {"passed": None if isinstance(error, NotReached) else False, "said": said(error)}
        yield row


def _raiser(error: Exception) -> Callable[[Deadline], Row]:
    def finish(_: Deadline) -> Row:
        raise error

    return finish


def _attention(
    case: Attention, implementation: str, compiler: Compiler, seed: int
) -> Callable[[Deadline], Row]:
    poisoned = functools.partial(cases.attention_operands, case, seed, stale=float("nan"))
    clean = functools.partial(cases.attention_operands, case, seed)
    made = compiler.call(lambda: (poisoned(), clean()))
    shapes = jax.eval_shape(clean)
    kernel = compiler.submit(ops.attention(case, implementation), shapes)
    exact = compiler.submit(ops.exact_attention(case), shapes, flags=quick_flags())

    def finish(deadline: Deadline) -> Row:
        bad, good = result(made, deadline)
        found = np.asarray(result(kernel, deadline)(bad).astype(jnp.float32))
        truth = np.asarray(result(exact, deadline)(good))
        # NaN differs from everything.
        error = float(np.max(np.abs(found - truth)))
        tolerance = TOLERANCE[jnp.dtype(case.dtype).name]
        return {
            "passed": bool(error <= tolerance),
            "error": error,
            "tolerance": tolerance,
            "said": f"largest difference {error:.1e}, at most {tolerance:.0e}; stale slots NaN",
        }

    return finish


def _rejection(
    case: Rejection, implementation: str, compiler: Compiler, seed: int
) -> Callable[[Deadline], Row]:
    make = functools.partial(cases.rejection_operands, case, seed)
    made, shapes = compiler.call(make), jax.eval_shape(make)
    kernel = compiler.submit(ops.rejection(case, implementation), *shapes)
    plain = compiler.submit(ops.rejection(case, "xla"), *shapes)

    def finish(deadline: Deadline) -> Row:
        operands = result(made, deadline)
        found = jax.device_get(result(kernel, deadline)(*operands))
        reference = result(plain, deadline)
        truth, *others = (jax.device_get(reference(*near)) for near in _nearby(operands))

        def decisions(outcome: Any) -> np.ndarray:
            finite, final = outcome.finite[:, None], outcome.final[:, None]
            path = np.where(finite, outcome.path, -1)
            return np.concatenate([finite, np.where(finite, final, -1), path], axis=1)

        mine = decisions(truth)
        clear = np.all([np.all(decisions(o) == mine, axis=1) for o in others], axis=0)
        same = np.all(decisions(found) == mine, axis=1)
        close = np.where(same[:, None], np.abs(found.log_p - truth.log_p), 0.0)
        error = float(np.max(close[truth.finite], initial=0.0))
        wrong = int(np.sum(clear & ~same))
        return {
            "passed": wrong == 0 and error <= LOG_P_TOLERANCE,
            "rows": len(clear),
            "borderline": int(np.sum(~clear)),
            "wrong": wrong,
            "error": error,
            "tolerance": LOG_P_TOLERANCE,
            "said": f"{wrong} of {int(np.sum(clear))} decisions differ ({int(np.sum(~clear))} more "
            f"are borderline); log p within {error:.1e}",
        }

    return finish


def _nearby(operands: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the operands as they are, and with what decides moved by the margin both ways."""
    logits, transforms, drafts, coins, noise = operands
    yield operands
    for step in (1 - MARGIN, 1 + MARGIN):
        moved = dataclasses.replace(
            transforms,
            temperature=transforms.temperature * step,
            # 1 is no cut at all, which it must stay.
            top_p=jnp.where(transforms.top_p < 1, transforms.top_p * step, 1.0),
            min_p=transforms.min_p * step,
        )
        yield logits, moved, drafts, coins * step, noise


def _cache(
    case: Cache, implementation: str, compiler: Compiler, seed: int
) -> Callable[[Deadline], Row]:
    make = functools.partial(cases.cache_operands, case, seed)
    made, shapes = compiler.call(make), jax.eval_shape(make)
    kernel = compiler.submit(ops.cache(case, implementation), *shapes)
    plain = compiler.submit(ops.cache(case, "xla"), *shapes)

    def finish(deadline: Deadline) -> Row:
        operands = result(made, deadline)
        found = result(kernel, deadline)(*operands)
        truth = result(plain, deadline)(*operands)
        wrong = int(jnp.sum(found != truth))
        changed = int(jnp.sum(truth != operands[0]))
        return {
            "passed": wrong == 0 and changed > 0,
            "wrong": wrong,
            "said": f"{wrong} of {truth.size} entries differ ({changed} were to change)",
        }

    return finish


_CHECKS: dict[type, Callable[..., Callable[[Deadline], Row]]] = {
    Attention: _attention,
    Rejection: _rejection,
    Cache: _cache,
}
