"""Statistics of rejection sampling for TPU (Pallas Mosaic).

Up to 8 nodes' whole rows of logits lie in VMEM at once, a node a sublane, so HBM is read once and
every later pass, the bisections included, goes over VMEM. Without drafts the nodes of a block are
8 batch rows instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rejection_sampling.columns import unfit, unpacked
from pallas_kernels.rejection_sampling.inputs import Drafts, Statistics, Transforms
from pallas_kernels.rejection_sampling.tpu_kernel import kernel
from pallas_kernels.rejection_sampling.tpu_operands import (
    LANES,
    LOG_Q,
    OVERLAP,
    SUBLANES,
    operands,
    shape_of,
)

# What a kernel may take of the 128 MiB of VMEM (v5e, v6e).
MOST_VMEM = 100 * 2**20
# The same of the 1 MiB of scalar memory.
MOST_SMEM = 1000 * 2**10


def vmem_bytes(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> int:
    """Return an upper bound of the VMEM that the kernel takes."""
    shape = shape_of(logits, transforms, drafts)
    row = SUBLANES * shape.padded
    inputs = row * (2 * logits.dtype.itemsize + 8 * shape.law + 8 * shape.penalties)
    return inputs + 2 * row * 4 + SUBLANES * shape.words * 8 * shape.allowed + 2**22


def supports(logits: jax.Array, transforms: Transforms, drafts: Drafts) -> str | None:
    """Return why the kernel cannot run on these arrays (or abstract ones), or None."""
    problem = unfit(logits, transforms, drafts)
    if problem is not None:
        return problem
    nodes, vocab = logits.shape[1:]
    if nodes > LANES:
        return f"at most {LANES} nodes, not {nodes}"
    scalars = 4 * shape_of(logits, transforms, drafts).scalars
    if scalars > MOST_SMEM:
        return f"needs {scalars} bytes of SMEM for bias and forbidden tokens; {MOST_SMEM} at most"
    needed = vmem_bytes(logits, transforms, drafts)
    if needed > MOST_VMEM:
        return f"needs {needed} bytes of VMEM for a vocabulary of {vocab}; {MOST_VMEM} at most"
    return None


def statistics(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Statistics:
    """Do as `reference.statistics`.

    Args:
        logits: as there.
        transforms: as there.
        drafts: as there.
        interpret: run without a TPU.

    Raises:
        ValueError: `supports` gives a reason.
    """
    reason = supports(logits, transforms, drafts)
    if reason is not None:
        raise ValueError(f"rejection_sampling on TPU: {reason}")
    shape = shape_of(logits, transforms, drafts)
    scalars, arrays, specs = operands(shape, logits, transforms, drafts)
    rows = shape.blocks * shape.block
    of_nodes = jax.ShapeDtypeStruct((shape.batch, rows, LANES), jnp.float32)
    node_spec = pl.BlockSpec((1, shape.block, LANES), lambda b, j, *_: (b, j, 0))
    names, outputs, output_specs = ["stats"], [of_nodes], [node_spec]
    if shape.drafts:
        names += ["log_p", "raw"]
        outputs += [of_nodes] * 2
        output_specs += [node_spec] * 2
    if shape.law:
        names.append("law")
        law_rows = shape.blocks * shape.law_block
        outputs.append(jax.ShapeDtypeStruct((shape.batch, law_rows, LANES), jnp.float32))
        law_spec = pl.BlockSpec((1, shape.law_block, LANES), lambda b, j, *_: (b, j, 0))
        output_specs.append(law_spec)
    keys = [*scalars, *arrays, *names, "work", "extra"]
    row = pltpu.VMEM((shape.block, shape.padded), jnp.float32)
    elements = logits.size + (0 if drafts.chain_log_q is None else drafts.chain_log_q.size)
    results = pl.pallas_call(
        lambda *refs: kernel(shape, dict(zip(keys, refs, strict=True))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.batch, shape.blocks),
            in_specs=specs,
            out_specs=output_specs,
            scratch_shapes=[row, row],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=vmem_bytes(logits, transforms, drafts),
        ),
        cost_estimate=pl.CostEstimate(
            flops=20 * elements,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays.values()),
            transcendentals=2 * elements,
        ),
        interpret=interpret,
        name="rejection_sampling",
    )(*scalars.values(), *arrays.values())
    found = dict(zip(names, results, strict=True))
    stats = found["stats"][:, : shape.nodes]
    compared = None
    if shape.law:
        law = found["law"][:, : shape.drafts]
        compared = law[..., OVERLAP], law[..., LOG_Q]
    if not shape.shared:
        stats = stats.reshape(shape.nodes, 1, LANES)
    return unpacked(drafts, stats, found.get("log_p"), found.get("raw"), compared)
