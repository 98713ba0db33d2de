"""Verification of chains: how many drafts to accept, and the token that follows them.

By every rule but "typical", which is lossy, the emitted tokens have exactly the target's law. A
rule is a function of proposal, target logits, transforms and keys; it knows nothing of models.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import randomness, sampling, typical_acceptance
from jspec.config import TypicalAcceptance, Verification
from jspec.drafting.protocol import Dense, Law, PointMass, Proposal
from jspec.randomness import Purpose
from jspec.sampling import RowSampling
from pallas_kernels.rejection_sampling.inputs import row_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of one verification.

    Attributes:
        accepted: [B] int32, drafts accepted, n.
        final: [B] int32, the correction after a rejection, else the bonus token.
        overlap: [B, K] float32, sum_x min(p, q) at each draft's position (its acceptance
            probability under the token rule); meaningful where the position was examined, that is
            up to the first rejection.
        finite: [B] bool, the logits of the root and of every accepted draft were usable.
        path: [B, K + 1] int32, path[:, i] the accepted node of depth i; past `accepted` unread.
    """

    accepted: jax.Array
    final: jax.Array
    overlap: jax.Array
    finite: jax.Array
    path: jax.Array


def _leading(flags: jax.Array) -> jax.Array:
    """Count the true flags before the first false one: [B, K] bool to [B] int32."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


def _keep(proposal: Proposal, flags: jax.Array) -> Proposal:
    """Return the proposal with only those drafts valid whose flag ([B, K]) is set."""
    return dataclasses.replace(proposal, valid=proposal.valid & flags)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return array[b, index[b]] for [B, K, ...] and [B]."""
    shape = (-1,) + (1,) * (array.ndim - 1)
    return jnp.take_along_axis(array, index.reshape(shape), axis=1)[:, 0]


def _of_tokens(log_p: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return log_p[b, k, tokens[b, k]]."""
    return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]


# accepted [B], final token [B], overlap [B, K], usable nodes [B, K + 1]
_Decision = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _greedy(logits: jax.Array, proposal: Proposal) -> _Decision:
    """Accept drafts while they are the argmax. Same law as every rule at temperature 0."""
    best = sampling.best(logits)
    # A NaN counts as the largest, so the best logit alone tells `sampling.usable`.
    usable = jnp.isfinite(_of_tokens(logits, best))
    match = proposal.tokens == best[:, :-1]
    accepted = _leading(match & proposal.valid & usable[:, :-1])
    return accepted, _at(best, accepted), match.astype(jnp.float32), usable


def _overlap(log_p: jax.Array, tokens: jax.Array, law: Law) -> jax.Array:
    """Return sum_x min(p, q) at each draft's position, [B, K]."""
    if isinstance(law, Dense):
        return jnp.sum(jnp.minimum(jnp.exp(log_p[:, :-1]), jnp.exp(law.log_q)), axis=-1)
    return jnp.exp(_of_tokens(log_p[:, :-1], tokens))


def _residual(
    log_p: jax.Array, proposal: Proposal, accepted: jax.Array, scale: jax.Array, cut: jax.Array
) -> jax.Array:
    """Return the log of the law of the token after the accepted drafts, up to a constant.

    max(scale * p - q, 0) where the row was cut by a rejection, p itself elsewhere and where the
    residual is empty (p equal to q leaves nothing).

    Args:
        log_p: [B, K + 1, V].
        proposal: K drafts.
        accepted: [B] int32, n.
        scale: [B] float32 in [0, 1]; 1 for the token rule.
        cut: [B] bool, draft n + 1 exists and was rejected.

    Returns:
        [B, V] float32.
    """
    own = row_of(log_p, accepted)
    rejected = jnp.minimum(accepted, proposal.tokens.shape[1] - 1)
    if isinstance(proposal.law, Dense):
        q = jnp.exp(row_of(proposal.law.log_q, rejected))
        rest = jnp.maximum(scale[:, None] * jnp.exp(own) - q, 0.0)
        log_rest = jnp.log(rest)
    else:
        token = _at(proposal.tokens, rejected)
        is_token = jnp.arange(own.shape[-1], dtype=jnp.int32)[None, :] == token[:, None]
        log_rest = jnp.where(is_token, -jnp.inf, own)
    empty = jnp.max(log_rest, axis=-1) == -jnp.inf
    return jnp.where((cut & ~empty)[:, None], log_rest, own)


def _token_rule(
    log_p: jax.Array, proposal: Proposal, coins: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Leviathan et al. 2023 (arXiv 2211.17192): accept draft x while u q(x) < p(x), strict."""
    p = jnp.exp(_of_tokens(log_p[:, :-1], proposal.tokens))
    if isinstance(proposal.law, Dense):
        q = jnp.exp(_of_tokens(proposal.law.log_q, proposal.tokens))
    else:
        q = jnp.ones_like(p)
    accepted = _leading((coins * q < p) & proposal.valid)
    cut = accepted < _leading(proposal.valid)
    return accepted, jnp.ones_like(p[:, 0]), cut


def _block_rule(
    log_p: jax.Array, proposal: Proposal, coins: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sun et al. (arXiv 2403.10444), algorithm 2: accept the longest block whose coin says so.

    With w_i = min(w_{i-1} p(x_i) / q(x_i), 1), a block of i < gamma drafts is accepted with
    probability h_i = S_i / (S_i + 1 - w_i), S_i = sum_x max(w_i p(x) - q(x), 0) over the next
    position, and the whole block with w_gamma.
    """
    drafts = _leading(proposal.valid)
    p_draft = jnp.exp(_of_tokens(log_p[:, :-1], proposal.tokens))
    if isinstance(proposal.law, Dense):
        q_draft = jnp.exp(_of_tokens(proposal.law.log_q, proposal.tokens))
    else:
        q_draft = jnp.ones_like(p_draft)
    ratio = p_draft / q_draft  # q of a token that was drawn is positive

    def carry(weight: jax.Array, ratio: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight = jnp.minimum(weight * ratio, 1.0)
        return weight, weight

    _, weights = jax.lax.scan(carry, jnp.ones_like(ratio[:, 0]), ratio.T)
    weights = weights.T  # [B, K], w_1 .. w_K

    # The surplus after block i < K is over the position of draft i + 1.
    inner = weights[:, :-1]
    if isinstance(proposal.law, Dense):
        scaled = inner[..., None] * jnp.exp(log_p[:, 1:-1])
        surplus = jnp.sum(jnp.maximum(scaled - jnp.exp(proposal.law.log_q[:, 1:]), 0.0), axis=-1)
    else:
        surplus = inner * (1.0 - p_draft[:, 1:])
    denominator = surplus + 1.0 - inner
    # 0 / 0: the next position's residual is empty, and a longer block is accepted for certain.
    h = jnp.where(denominator > 0, surplus / jnp.where(denominator > 0, denominator, 1.0), 0.0)
    h = jnp.concatenate([h, weights[:, -1:]], axis=1)
    size = jnp.arange(1, h.shape[1] + 1, dtype=jnp.int32)[None, :]
    h = jnp.where(size == drafts[:, None], weights, h)

    taken = (coins < h) & (size <= drafts[:, None])
    accepted = jnp.max(jnp.where(taken, jnp.broadcast_to(size, taken.shape), 0), axis=1)
    start = jnp.ones_like(weights[:, :1])
    scale = _at(jnp.concatenate([start, weights], axis=1), accepted)
    return accepted, scale, accepted < drafts


def _typical_rule(
    log_p: jax.Array, proposal: Proposal, rule: TypicalAcceptance
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accept drafts while they are typical of p; the next token is drawn from p, without a cut."""
    before = log_p[:, :-1]
    p = jnp.exp(_of_tokens(before, proposal.tokens))
    typical = p > typical_acceptance.thresholds(before, rule)
    accepted = _leading(typical & proposal.valid)
    return accepted, jnp.ones_like(p[:, 0]), jnp.zeros_like(accepted, bool)


def verify_chain(
    logits: jax.Array,
    proposal: Proposal,
    rows: RowSampling,
    keys: jax.Array,
    rule: Verification = "token",
    typical: TypicalAcceptance = typical_acceptance.DEFAULT,
) -> Verdict:
    """Verify a chain of K drafts a row against the target.

    Args:
        logits: [B, K + 1, V] float32, the target's at the pending token and at every draft, after
            `jspec.edits`.
        proposal: K drafts a row; K may be 0, which is plain sampling.
        rows: transforms of the B rows.
        keys: [B] typed round keys.
        rule: "token", "block" or "typical".
        typical: parameters of "typical".
    """
    batch, nodes, _ = logits.shape
    if not isinstance(proposal.law, PointMass):
        # An only child is drawn alike with and without replacement, and the last node has none.
        law = Dense(proposal.law.log_q[:, : nodes - 1])
        proposal = dataclasses.replace(proposal, law=law)
    greedy = sampling.is_greedy(rows)
    node = jnp.broadcast_to(jnp.arange(1, nodes, dtype=jnp.int32), (batch, nodes - 1))

    def stochastic() -> _Decision:
        usable = sampling.usable(logits)
        log_p = sampling.log_probs(logits, rows)
        if nodes == 1:
            accepted = jnp.zeros(batch, jnp.int32)
            last, overlap = log_p[:, 0], jnp.zeros((batch, 0), jnp.float32)
        else:
            coins = randomness.uniforms(randomness.node_keys(keys, node, Purpose.ACCEPT))
            # Nothing can be decided about a draft where p or q is no distribution. Whether it is
            # depends on the draft's predecessors alone, so ending the chain there keeps the law.
            drafts = _keep(proposal, usable[:, :-1])
            if isinstance(drafts.law, Dense):
                drafts = _keep(drafts, sampling.usable(drafts.law.log_q))
            if rule == "typical":
                accepted, scale, cut = _typical_rule(log_p, drafts, typical)
            else:
                decide = _token_rule if rule == "token" else _block_rule
                accepted, scale, cut = decide(log_p, drafts, coins)
            last = _residual(log_p, drafts, accepted, scale, cut)
            overlap = _overlap(log_p, drafts.tokens, drafts.law)
            overlap = jnp.where(drafts.valid, overlap, 0.0)
        final_keys = randomness.node_keys(keys, accepted[:, None], Purpose.FINAL)[:, 0]
        return accepted, sampling.draw(last, final_keys), overlap, usable

    accepted, final, overlap, usable = jax.lax.cond(
        jnp.all(greedy), lambda: _greedy(logits, proposal), stochastic
    )
    examined = jnp.arange(nodes, dtype=jnp.int32)[None, :] <= accepted[:, None]
    finite = jnp.all(usable | ~examined, axis=-1)
    path = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    return Verdict(accepted=accepted, final=final, overlap=overlap, finite=finite, path=path)
