"""A table of what the kernels take on chips that are not here, written into a page of the docs.

`python -m experiments.compile_facts --output=docs/kernels.md` compiles every op over a spread of
real models' shapes, for TPUs by libtpu and for an H100 by Triton, and replaces what stands between
the page's two marks. Nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import compiled_loop, compilers, kernel_cases, kernel_ops
from experiments.compiled_loop import WHOLE, Whole
from experiments.kernel_cases import Attention, Cache, Case, Rejection, case, op_of
from pallas_kernels import shapes, tree_attention

BEGIN, END = "<!-- compile facts: begin -->", "<!-- compile facts: end -->"
TPUS = ("v5e", "v6e", "v5p")


def cases() -> tuple[Case, ...]:
    """Return the ops' calls that are compiled."""
    wide = shapes.AttentionShape("wide", 16, 4, 256, 1, window=1024)
    odd = shapes.AttentionShape("odd", 16, 4, 96, 1)
    attention = [Attention(each) for each in shapes.spread(10)]
    attention += [
        Attention(shapes.Case(wide, 1, 128, 4096), softcap=50.0),
        Attention(shapes.Case(wide, 2, 16, 4096), jnp.float32),
        Attention(shapes.Case(odd, 2, 64, 4096)),
        Attention(case("llama-3.1-8b", 8, 16, 8192), page=64),
    ]
    rejection = [
        Rejection(vocab, batch, nodes, edits, law=edits != "top-p")
        for vocab, batch, nodes in ((49152, 1, 5), (128256, 8, 5), (262208, 8, 5))
        for edits in ("none", "top-p", "all")
    ]
    rejection.append(Rejection(151936, 32, 16, "top-p", law=False))
    cache = [
        Cache(each, op)
        for each in (
            case("smollm2-135m", 1, 5, 2048),
            case("llama-3.2-1b", 8, 16, 8192),
            case("llama-3.1-8b", 32, 5, 8192),
            case("gemma-3-27b-tp8", 8, 64, 8192),
        )
        for op in ("cache_write", "cache_commit")
    ]
    return (*attention, *rejection, *cache)


def operands(of: Case) -> tuple[Any, ...]:
    """Return a call's abstract operands."""
    if isinstance(of, Attention):
        return (jax.eval_shape(lambda: kernel_cases.attention_operands(of, 1)),)
    if isinstance(of, Rejection):
        # The noise is random numbers of the whole size, which only its shape is wanted of.
        one = dataclasses.replace(of, batch=min(of.batch, 2))
        made = jax.eval_shape(lambda: kernel_cases.rejection_operands(one, 1))
        return tuple(_widened(made, one.batch, of.batch, of.nodes))
    return jax.eval_shape(lambda: kernel_cases.cache_operands(of, 1))


def _widened(made: tuple[Any, ...], batch: int, wanted: int, nodes: int) -> Iterator[Any]:
    """Yield rejection sampling's operands for a larger batch; topologies have none."""
    logits, transforms, drafts, coins, noise = made

    def rows(leaf: Any) -> Any:
        assert leaf.shape[0] == batch
        return jax.ShapeDtypeStruct((wanted, *leaf.shape[1:]), leaf.dtype)

    yield rows(logits)
    yield jax.tree.map(rows, transforms)
    yield dataclasses.replace(
        jax.tree.map(rows, dataclasses.replace(drafts, parents=None, ancestors=None)),
        parents=drafts.parents,
        ancestors=drafts.ancestors,
    )
    yield rows(coins)
    yield rows(noise)


def planned_vmem(of: Case, arguments: tuple[Any, ...]) -> int:
    """Return the bytes of VMEM that a TPU kernel plans with."""
    if isinstance(of, Attention):
        from pallas_kernels.tree_attention import tpu as attention

        (named,) = arguments
        problem = tree_attention.describe(
            named["query"], named["keys"], named["block_table"], **of.static
        )
        cut = attention.tiling(problem)
        assert cut is not None
        return cut.vmem
    if isinstance(of, Rejection):
        from pallas_kernels.rejection_sampling import tpu as rejection

        return rejection.vmem_bytes(*arguments[:3])
    from pallas_kernels.cache_write import windows

    span = of.case.nodes
    return sum(
        int(jnp.prod(jnp.asarray(each.shape))) * jnp.dtype(each.dtype).itemsize
        for each in windows.scratch(arguments[0], span)[:3]
    )


def tpu_row(of: Case, chip: str) -> list[str]:
    """Compile a call for a TPU and return its row.

    Raises:
        compilers.UnavailableError: libtpu is not here.
    """
    device = compilers.tpu(chip)
    arguments = operands(of)
    placed = _placed(arguments, device)
    donate = (0,) if isinstance(of, Cache) else ()
    with jax.default_matmul_precision("default"), compilers.as_on(device):
        traced = jax.jit(kernel_ops.of(of, "tpu"), donate_argnums=donate).trace(*placed)
        memory = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    return [
        _mib(planned_vmem(of, arguments)),
        _mib(memory.temp_size_in_bytes),
        _mib(memory.alias_size_in_bytes) if donate else "",
    ]


def h100_rows(of: Case) -> Iterator[list[str]]:
    """Compile a call's kernels for an H100 and yield a row each.

    Raises:
        compilers.UnavailableError: Triton is not here.
    """
    with jax.default_matmul_precision("default"), compilers.as_on_an_h100():
        traced = jax.jit(kernel_ops.of(of, "gpu")).trace(*operands(of))
        lowered = traced.lower(lowering_platforms=("cuda",))
    for kernel in compilers.triton_kernels(lowered):
        with tempfile.TemporaryDirectory() as folder:
            taken = compilers.compile_for_h100(kernel, Path(folder))
        yield [
            kernel.name,
            str(kernel.warps),
            str(taken.registers),
            str(taken.spilled),
            str(taken.shared_memory),
        ]


def _placed(arguments: Any, device: jax.Device) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def whole_row(whole: Whole) -> list[str]:
    """Compile a whole chunk of rounds and return its row.

    Raises:
        compilers.UnavailableError: the chip's compiler is not here.
    """
    found = compiled_loop.compile_chunk(whole)
    sizes = (found.arguments, found.caches, found.aliased, whole.logits_bytes, found.scratch)
    return [_mib(size) for size in sizes]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first two columns to the left."""
    rule = ["---" if place < 2 else "---:" for place in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def facts(
    wanted: Sequence[Case],
    wholes: Sequence[Whole],
    chips: Sequence[str],
    say: Callable[[str], None],
) -> str:
    """Return the generated part of the page.

    Args:
        wanted: calls of ops.
        wholes: chunks of whole models, of whatever chip.
        chips: TPUs, and "h100".
        say: told what is going on.
    """
    versions = {name: _version(name) for name in ("jax", "libtpu", "triton")}
    parts = [
        "Everything in these tables was compiled and **never run**: no TPU and no GPU was there. "
        f"({', '.join(f'{n} {v}' for n, v in versions.items() if v)}; "
        f"{datetime.date.today().isoformat()}.)"
    ]
    for chip in chips:
        rows: list[list[str]] = []
        try:
            for of in wanted:
                say(f"{chip}: {op_of(of)} {of.name}")
                found = h100_rows(of) if chip == "h100" else [tpu_row(of, chip)]
                rows += _rows(of, found)
        except compilers.UnavailableError as error:
            parts.append(f"### {_TITLES[chip]}\n\nNot compiled: {error}.")
            continue
        parts.append(f"### {_TITLES[chip]}\n\n{markdown(_HEADERS[chip == 'h100'], rows)}")
    if wholes:
        rows = []
        for whole in wholes:
            say(f"{whole.chip}: {whole.name}")
            try:
                rows.append([whole.name, whole.chip, *whole_row(whole)])
            except compilers.UnavailableError as error:
                rows.append([whole.name, whole.chip, f"not compiled: {error}", "", "", "", ""])
        parts.append(f"### The whole loop\n\n{markdown(_WHOLE_HEADER, rows)}")
    return "\n\n".join(parts)


def _rows(of: Case, found: Any) -> Iterator[list[str]]:
    iterator = iter(found)
    while True:
        try:
            cells = next(iterator)
        except StopIteration:
            return
        except compilers.UnavailableError:
            raise
        except Exception as error:  # a fact as well
            yield [op_of(of), of.name, f"does not compile: {' '.join(str(error).split())[:120]}"]
            return
        yield [op_of(of), of.name, *cells]


_TITLES = {
    "v5e": "TPU v5e",
    "v6e": "TPU v6e",
    "v5p": "TPU v5p",
    "h100": "H100",
}
_HEADERS = {
    False: ("op", "case", "VMEM planned, MiB", "HBM scratch, MiB", "aliased, MiB"),
    True: ("op", "case", "kernel", "warps", "registers", "spilled bytes", "shared memory, bytes"),
}
_WHOLE_HEADER = (
    "program",
    "chip",
    "arguments, MiB",
    "caches, MiB",
    "aliased, MiB",
    "logits, MiB",
    "scratch with logits, MiB",
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def replaced(page: str, generated: str) -> str:
    """Return the page with its generated part replaced.

    Raises:
        ValueError: the page lacks the two marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{generated}\n{END}{after}"


def main(argv: Sequence[str]) -> int:
    """Run by a command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="experiments.compile_facts", description=__doc__)
    parser.add_argument("--output", help="page whose generated part is replaced; else it is shown")
    parser.add_argument("--chips", default=",".join((*TPUS, "h100")), help="separated by commas")
    arguments = parser.parse_args(argv)
    page = None if arguments.output is None else Path(arguments.output)
    if page is not None:
        try:
            replaced(page.read_text(encoding="utf-8"), "")
        except (OSError, ValueError) as error:
            print(f"error: output {page}: {error}", file=sys.stderr)
            return 2
    say = functools.partial(print, file=sys.stderr, flush=True)
    # Deprecated from JAX 0.11 on, and said of every kernel.
    warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
    generated = facts(cases(), WHOLE, arguments.chips.split(","), say)
    if page is None:
        print(generated)
    else:
        page.write_text(replaced(page.read_text(encoding="utf-8"), generated), encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(sys.argv[1:]))
