"""Verification from raw logits by the rejection-sampling op: the edited ones are never written.

The same verdicts from the same random bits as `jspec.edits`, `jspec.sampling` and `verify_chain` or
`verify_tree` after each other, up to rounding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import edits, randomness, trees
from jspec.config import Verification
from jspec.drafting.protocol import PointMass, Proposal, WithoutReplacement
from jspec.randomness import Purpose
from jspec.sampling import RowSampling
from jspec.verification import Verdict
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Kernels, UnsupportedError
from pallas_kernels.rejection_sampling import (
    NAME,
    Drafts,
    Drawn,
    Transforms,
    rejection_sampling,
    supports,
)


def refusal(proposal: Proposal, rule: Verification) -> str | None:
    """Return why the op doesn't have the rule that a proposal is verified by, None if it has."""
    if rule == "typical" and proposal.tokens.shape[1] > 0:
        return (
            "typical acceptance wants the entropy of every p, which the kernels do not sum; ask "
            "for verification by token, or for xla"
        )
    if rule == "block" and proposal.topology.is_chain and proposal.tokens.shape[1] > 0:
        return (
            "block verification wants sum max(w p - q, 0) for weights w that are known only once "
            "every p is; ask for verification by token, or for xla"
        )
    return None


def drafts_of(proposal: Proposal) -> Drafts:
    """Return a proposal as the op takes it."""
    topology, law = proposal.topology, proposal.law
    drafts = Drafts(
        tokens=proposal.tokens,
        valid=proposal.valid,
        parents=jnp.asarray(topology.parents),
        ancestors=jnp.asarray(topology.ancestors),
    )
    if isinstance(law, PointMass):
        return drafts
    if topology.is_chain:
        # An only child is drawn alike with and without replacement.
        count = proposal.tokens.shape[1]
        return dataclasses.replace(drafts, log_q=law.log_q[:, :count], drawn="chain")
    without = isinstance(law, WithoutReplacement)
    drawn: Drawn = "without replacement" if without else "with replacement"
    return dataclasses.replace(drafts, log_q=law.log_q, drawn=drawn)


def _transforms(
    logits: jax.Array,
    proposal: Proposal,
    rows: RowSampling,
    tokens: jax.Array,
    length: jax.Array,
) -> Transforms:
    paths = trees.paths(proposal.tokens, proposal.topology)
    return Transforms(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        bias=rows.edits.bias,
        penalties=rows.edits.penalties,
        forbidden=edits.forbidden(rows.edits, tokens, length, paths, logits.shape[-1]),
    )


def wanted(
    logits: jax.Array,
    proposal: Proposal,
    rows: RowSampling,
    tokens: jax.Array,
    length: jax.Array,
    rule: Verification,
    kernels: Kernels,
) -> bool:
    """Return whether a program verifies by a kernel of the op, and note what it verifies by.

    Where it does not, the parts one by one are faster: XLA skips what no row asks for.

    Args:
        logits: as for `verify`.
        proposal: as for `verify`.
        rows: as for `verify`.
        tokens: as for `verify`.
        length: as for `verify`.
        rule: as for `verify`.
        kernels: what the program asks for.

    Raises:
        UnsupportedError: a kernel asked for can't run this.
    """
    transforms = _transforms(logits, proposal, rows, tokens, length)
    reasons = supports(logits, transforms, drafts_of(proposal))
    reason = refusal(proposal, rule)
    if reason is not None:
        reasons = dict.fromkeys(reasons, reason)
    return dispatch.choose(NAME, kernels, reasons) != "xla"


def verify(
    logits: jax.Array,
    proposal: Proposal,
    rows: RowSampling,
    tokens: jax.Array,
    length: jax.Array,
    keys: jax.Array,
    rule: Verification = "token",
    implementation: Implementation | Kernels = "auto",
) -> Verdict:
    """Verify a chain or a tree of T - 1 drafts a row against the target.

    Args:
        logits: [B, T, V] float32 or bfloat16, the target's at every node, before any edit.
        proposal: T - 1 drafts a row; T may be 1, which is plain sampling.
        rows: edits and transforms of the B rows.
        tokens: [B, S] int32, prompt and committed tokens.
        length: [B] int32, committed tokens.
        keys: [B] typed round keys.
        rule: by which a chain is verified.
        implementation: of the op; see `rejection_sampling`.

    Returns:
        The verdict, as `verify_chain` or `verify_tree` gives it; its `overlap` is 0 past the
        accepted path.

    Raises:
        UnsupportedError: `refusal` or the implementation asked for gives a reason.
    """
    batch, size, vocab = logits.shape
    reason = refusal(proposal, rule)
    if reason is not None:
        raise UnsupportedError(reason)
    transforms = _transforms(logits, proposal, rows, tokens, length)
    node = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    coins = randomness.uniforms(randomness.node_keys(keys, node[:, 1:], Purpose.ACCEPT))

    def noise(last: jax.Array) -> jax.Array:
        final_keys = randomness.node_keys(keys, last[:, None], Purpose.FINAL)[:, 0]
        return randomness.gumbels(final_keys, vocab)

    outcome = rejection_sampling(
        logits, transforms, drafts_of(proposal), coins, noise, implementation=implementation
    )
    accepted = jnp.pad(jnp.maximum(outcome.path, 0), [(0, 0), (1, 0)])
    return Verdict(
        accepted=outcome.accepted,
        final=outcome.final,
        overlap=outcome.overlap,
        finite=outcome.finite,
        # A chain's nodes lie where they belong, whatever is accepted.
        path=node if proposal.topology.is_chain else accepted,
    )
