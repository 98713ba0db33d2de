"""The rejection-sampling op: its contract, its checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.dispatch import STRICTEST, Implementation, Kernels
from pallas_kernels.rejection_sampling import gpu, reference, tpu
from pallas_kernels.rejection_sampling.decide import Outcome, decide
from pallas_kernels.rejection_sampling.inputs import Drafts, Statistics, Transforms, fault

NAME = "rejection_sampling"
RUNS: dict[str, Callable[..., Statistics]] = {
    "xla": reference.statistics,
    "tpu": tpu.statistics,
    "gpu": gpu.statistics,
    "tpu_interpret": functools.partial(tpu.statistics, interpret=STRICTEST),
    "gpu_interpret": functools.partial(gpu.statistics, interpret=True),
}


def supports(logits: Any, transforms: Transforms, drafts: Drafts) -> dict[str, str | None]:
    """Return for each kernel why it can't run on these arrays (or abstract ones), or None."""
    return {
        "tpu": tpu.supports(logits, transforms, drafts),
        "gpu": gpu.supports(logits, transforms, drafts),
    }


def rejection_sampling(
    logits: jax.Array,
    transforms: Transforms,
    drafts: Drafts,
    coins: jax.Array,
    noise: Callable[[jax.Array], jax.Array],
    *,
    implementation: Implementation | Kernels = "auto",
) -> Outcome:
    """Accept drafts and draw the token that follows, with exactly the target's law.

    A chain drawn from q: rule 1 (Leviathan et al. 2023, arXiv 2211.17192; Chen et al., arXiv
    2302.01318). A tree drawn from q: siblings one after another, each on what the ones before left
    (`walk.walk`). Drafts chosen without chance: the same, each being a point mass.

    Args:
        logits: [B, T, V] float32 or bfloat16, the target's at the pending token and every draft,
            before any transform.
        transforms: of the rows.
        drafts: of the round.
        coins: [B, T - 1] float32 in [0, 1), of the drafts.
        noise: from the decided node [B] int32 to standard Gumbel noise [B, V] float32 of its own.
        implementation: of the pass over the vocabulary: "xla"; a kernel, "tpu" or "gpu";
            "tpu_interpret" or "gpu_interpret", which run the kernel's own code slowly on a CPU; or
            "auto", the platform's kernel where it can run and XLA elsewhere; or what a whole
            program asks for. `dispatch.choices` tells which ran.

    Raises:
        ValueError: shapes or dtypes do not belong together, or there is no such implementation.
        UnsupportedError: the implementation asked for can't run this call; the message says why.
    """
    problem = fault(logits, transforms, drafts)
    if problem is not None:
        raise ValueError(f"{NAME}: {problem}")
    reasons = supports(logits, transforms, drafts)
    found = dispatch.dispatch(NAME, implementation, reasons, RUNS, logits, transforms, drafts)
    return decide(logits, transforms, drafts, found, coins, noise)
