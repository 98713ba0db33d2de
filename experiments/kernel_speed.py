"""Every op timed on the accelerator: against its floor, plain XLA and JAX's own attention.

An op runs many times inside one program, so that calls from the host do not count, and over
several sets of operands in turn, so that no cache of the chip holds them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_cases as cases
from experiments import kernel_ops as ops
from experiments.kernel_budget import Compiler, Deadline, NotReached, result, said
from experiments.kernel_cases import Attention, Cache, Case, Rejection, op_of
from pallas_kernels.tree_attention import Plan, plan

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        stream: bytes of the arrays that bandwidth is measured with.
        apart: bytes of operands that must lie between two uses of the same ones.
        seconds: wanted of one measurement, by a guess at the bandwidth.
        turns: interleaved measurements of each program.
    """

    stream: int = 2**31
    apart: int = 2**27
    seconds: float = 4e-3
    turns: int = 5


# Only to choose the number of repeats.
_GUESS = 2e12
_MOST_SETS, _MOST_REPEATS = 8, 60


def bandwidth(scale: Scale) -> dict[str, float]:
    """Measure bytes a second of a copy, a triad and a read of large arrays; the best of turns."""
    size = scale.stream // 4 // 4096 * 4096
    first = jnp.ones(size, jnp.float32)
    second = jnp.full(size, 2.0, jnp.float32)
    steps = 8
    one = jnp.float32(1e-3)

    def shift(array: jax.Array, by: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, x: x + by, array)

    def triad(array: jax.Array, other: jax.Array, by: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, x: other + by * x, array)

    def read(array: jax.Array, by: jax.Array) -> jax.Array:
        def step(_: Any, total: jax.Array) -> jax.Array:
            return total + jnp.sum(jnp.abs(array + total * by))

        return jax.lax.fori_loop(0, steps, step, jnp.float32(0))

    programs: dict[str, tuple[Any, tuple[Any, ...], int]] = {
        "copy": (jax.jit(shift), (first, one), 2),
        "triad": (jax.jit(triad), (first, second, one), 3),
        "read": (jax.jit(read), (first, jnp.float32(1e-30)), 1),
    }
    found = dict.fromkeys(programs, 0.0)
    for turn in range(scale.turns + 1):
        for name, (program, operands, passes) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            seconds = time.perf_counter() - start
            if turn > 0:  # the first one compiles
                found[name] = max(found[name], passes * steps * size * 4 / seconds)
    return found


def run(
    wanted: Sequence[Case],
    implementation: str,
    compiler: Compiler,
    scale: Scale,
    seed: int,
    deadline: Deadline,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Yield a row for every case: seconds an op by way of running it, and bytes that must move.

    Args:
        wanted: the most important first.
        implementation: of the kernels.
        compiler: of the programs.
        scale: how much is measured.
        seed: of the inputs.
        deadline: past it rows say that they were not reached.
        progress: told what is going on.
    """
    compiling = deadline.earlier(0.6 * deadline.left())
    progress("making inputs")
    jobs: list[_Job] = []
    for index, case in enumerate(wanted):
        row: Row = {"op": op_of(case), "case": case.name, "bytes": bytes_of(case, seed + index)}
        jobs.append(_Job(case, seed + index, row | {"errors": {}}, ways(case, implementation)))
    # The kernels of all cases first: XLA tries out many ways of a product, which takes its time.
    for way in ("kernel", "xla", "dot_product_attention"):
        for job in jobs:
            job.submit(way, compiler, scale)
    # What makes the inputs is compiled meanwhile.
    one_set = dataclasses.replace(scale, apart=1)
    for job in jobs:
        compiler.call(functools.partial(_sets, job.case, one_set, job.seed, "kernel"))
    for job in jobs:
        progress(f"compiling {job.row['op']} {job.row['case']}")
        for way, future in job.futures.items():
            try:
                job.programs[way] = result(future, compiling)
            except Exception as error:
                job.row["errors"][way] = said(error)
    compiler.settle()
    for job in jobs:
        row = job.row
        progress(f"timing {row['op']} {row['case']}")
        if job.programs and deadline.left() == 0:
            row["errors"] |= dict.fromkeys(job.programs, said(NotReached()))
        elif job.programs:
            samples = _measure(job.case, job.programs, scale, job.seed, row["errors"])
            row["samples"] = samples
            row["seconds"] = {way: float(np.median(times)) for way, times in samples.items()}
        yield row


@dataclasses.dataclass
class _Job:
    """One case on its way."""

    case: Case
    seed: int
    row: Row
    functions: dict[str, Callable[..., Any]]
    futures: dict[str, Any] = dataclasses.field(default_factory=dict)
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def submit(self, way: str, compiler: Compiler, scale: Scale) -> None:
        """Start to compile one way, if the case has it."""
        if way not in self.functions:
            return
        try:
            shapes = jax.eval_shape(lambda: _sets(self.case, scale, self.seed, way))
            repeats, options = program(self.case, self.functions[way], scale, self.seed)
            self.futures[way] = compiler.submit(repeats, *shapes, **options)
        except Exception as error:
            self.row["errors"][way] = said(error)


def bytes_of(case: Case, seed: int) -> int:
    """Return the bytes that a case must move."""
    if isinstance(case, Attention):
        return case.read_bytes(case.prefixes(seed))
    return case.read_bytes


def repeats(case: Case, scale: Scale, seed: int) -> tuple[int, int]:
    """Return how many sets of operands, and how many rounds over them."""
    size = bytes_of(case, seed)
    if isinstance(case, Cache):  # the cache is carried along, and never read whole
        return 1, _MOST_REPEATS
    sets = int(np.clip(-(-scale.apart // size), 1, _MOST_SETS))
    rounds = int(np.clip(round(scale.seconds * _GUESS / (size * sets)), 1, _MOST_REPEATS))
    return sets, rounds


def repeated(function: Callable[..., Any], rounds: int) -> Callable[..., jax.Array]:
    """Return a program that calls a function `rounds` times on each of several operand sets.

    Args:
        function: of the members of a set.
        rounds: how often.
    """

    def program(*sets: Any) -> jax.Array:
        def body(_: Any, total: jax.Array) -> jax.Array:
            for operands in sets:
                # As if they were new in every round, or XLA would compute some of it once.
                held, total = jax.lax.optimization_barrier((operands, total))
                out = jax.lax.optimization_barrier(function(*held))
                for leaf in jax.tree.leaves(out):
                    total = total + jnp.sum(leaf.astype(jnp.float32))
            return total

        return jax.lax.fori_loop(0, rounds, body, jnp.float32(0))

    return program


def carried(function: Callable[..., jax.Array], rounds: int) -> Callable[..., jax.Array]:
    """Return a program that lets a cache go through a function `rounds` times."""

    def program(cache: jax.Array, *operands: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, cache: function(cache, *operands), cache)

    return program


def ways(case: Case, implementation: str) -> dict[str, Callable[..., Any]]:
    """Return the ways of running a case, by name."""
    found: dict[str, Callable[..., Any]] = {
        "kernel": ops.of(case, implementation),
        "xla": ops.of(case, "xla"),
    }
    if isinstance(case, Attention) and case.page is None and case.softcap is None:
        found["dot_product_attention"] = ops.masked_attention
    return found


def _sets(case: Case, scale: Scale, seed: int, way: str) -> tuple[Any, ...]:
    """Return the operand sets of one way."""
    count, _ = repeats(case, scale, seed)
    if isinstance(case, Cache):
        return cases.cache_operands(case, seed)
    if isinstance(case, Rejection):
        return tuple(cases.rejection_operands(case, seed + 1000 * i) for i in range(count))
    made = []
    for index in range(count):
        clean = cases.attention_operands(case, seed + 1000 * index)
        # The loop plans a pass once for all layers, so planning does not count.
        planned = plan(
            clean["prefix_length"], clean["ancestors"], case.case.slots, case.case.model.window
        )
        if way == "xla":
            clean["planned"] = planned
        if way == "dot_product_attention":
            clean = _for_masked(clean, planned)
        made.append((clean,))
    return tuple(made)


def _for_masked(clean: dict[str, Any], planned: Plan) -> dict[str, Any]:
    keys, values = (jnp.swapaxes(clean[name], 1, 2) for name in ("keys", "values"))
    return {"query": clean["query"], "keys": keys, "values": values, "visible": planned.visible}


def program(
    case: Case, way: Callable[..., Any], scale: Scale, seed: int
) -> tuple[Any, dict[str, Any]]:
    """Return what is compiled for one way of a case, and the options of `jax.jit`."""
    _, rounds = repeats(case, scale, seed)
    if isinstance(case, Cache):
        return carried(way, rounds), {"donate_argnums": 0}
    return repeated(way, rounds), {}


def _measure(
    case: Case, programs: dict[str, Any], scale: Scale, seed: int, errors: dict[str, str]
) -> dict[str, list[float]]:
    """Return seconds a call, by way and turn; a way that fails is left out, with its error."""
    samples: dict[str, list[float]] = {}
    operands: dict[str, tuple[Any, ...]] = {}
    count, rounds = repeats(case, scale, seed)
    for turn in range(scale.turns + 1):
        for way, compiled in programs.items():
            if way in errors:
                continue
            try:
                if way not in operands:
                    operands[way] = jax.block_until_ready(_sets(case, scale, seed, way))
                start = time.perf_counter()
                out = jax.block_until_ready(compiled(*operands[way]))
                seconds = time.perf_counter() - start
                if isinstance(case, Cache):  # it was donated
                    operands[way] = (out, *operands[way][1:])
                if turn > 0:  # the first one loads the program
                    samples.setdefault(way, []).append(seconds / (count * rounds))
            except Exception as error:
                errors[way] = said(error)
                samples.pop(way, None)
    return samples
