"""The loop: a round of speculation is a pure function, and a chunk runs many on the device.

A round drafts, verifies, accepts and commits. Plain decoding is the same round with gamma = 0, and
a speculative round in which no row has a draft runs that plain round, inside the same compiled
program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import cache as kv
from jspec import (
    edits,
    fused_verification,
    logprobs,
    randomness,
    sampling,
    trace,
    trees,
    typical_acceptance,
)
from jspec.cache import KVCache
from jspec.config import TypicalAcceptance, Verification
from jspec.drafting.protocol import Context, Drafter, Outcome, PointMass, Proposal
from jspec.state import DecodeState, Finish
from jspec.tree_verification import verify_tree
from jspec.trees import Topology
from jspec.verification import Verdict, verify_chain
from pallas_kernels.dispatch import Kernels


class Target(Protocol):
    """A language model as the loop sees it; `jspec.models.transformer.Transformer` is one.

    Hashable: a static argument of jitted programs.
    """

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        ...

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> KVCache:
        """Return an empty cache."""
        ...

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        cache: KVCache,
        topology: Topology,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...]]:
        """Run [B, T] nodes past the prefix; return [D, B * T] outputs, the cache and features."""
        ...

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Return [rows, V] float32 logits of [D, rows] outputs."""
        ...


# Steps narrower than this cost as much as wider ones on every backend.
NARROWEST_PREFILL = 32


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled: the static side of a chunk.

    Attributes:
        target: the target's functions.
        drafter: the drafter's functions; None only with gamma = 0.
        gamma: drafts a round.
        verification: rule by which drafts are verified.
        kernels: which implementations of verification and of a path's move it asks for.
        typical: parameters of the rule "typical".
    """

    target: Target
    drafter: Drafter | None
    gamma: int
    verification: Verification = "token"
    kernels: Kernels = kv.DEFAULT_KERNELS
    typical: TypicalAcceptance = typical_acceptance.DEFAULT


def prefill(
    target: Target,
    drafter: Drafter | None,
    width: int,
    params: Any,
    drafter_params: Any,
    state: DecodeState,
) -> DecodeState:
    """Run every row's committed tokens, short of the pending one, through target and drafter.

    Args:
        target: static.
        drafter: static; None leaves the drafter's state alone.
        width: static, most tokens a row and step.
        params: the target's.
        drafter_params: the drafter's.
        state: whose caches hold any prefix of the committed tokens.
    """
    layers = drafter.feature_layers if drafter is not None else ()

    def missing(state: DecodeState) -> jax.Array:
        return jnp.where(state.active, state.length - 1 - state.cache.length, 0)

    def run(width: int, more_than: int, state: DecodeState) -> DecodeState:
        """Run steps of `width` while some row lacks more than so many tokens."""
        chain = trees.chain(width - 1)

        def step(state: DecodeState) -> DecodeState:
            count = jnp.clip(missing(state), 0, width)
            tokens = _following(state.tokens, state.cache.length, width)
            hidden, cache, features = target.forward(params, tokens, state.cache, chain, layers)
            inner = state.drafter
            state = _record_prompt(target, params, hidden, count, state)
            if drafter is not None:
                inner = drafter.extend(drafter_params, inner, tokens, count, features)
            return dataclasses.replace(state, cache=kv.commit(cache, count), drafter=inner)

        return jax.lax.while_loop(lambda s: jnp.any(missing(s) > more_than), step, state)

    # The rest of a prompt goes in narrow steps: padding costs as much as tokens.
    narrow = width // 4
    if narrow < NARROWEST_PREFILL:
        return run(width, 0, state)
    return run(narrow, 0, run(width, width // 2, state))


def _record_prompt(
    target: Target, params: Any, hidden: jax.Array, count: jax.Array, state: DecodeState
) -> DecodeState:
    """Keep the prompt's log probabilities, if asked for: each output predicts the next token."""
    if state.logprobs is None or not state.logprobs.of_prompt:
        return state
    width = hidden.shape[1] // count.shape[0]
    start = state.cache.length + 1
    position = jnp.arange(width, dtype=jnp.int32)[None, :]
    real = position < count[:, None]
    kept = logprobs.record_prompt(
        state.logprobs,
        lambda columns: target.logits(params, columns),
        hidden,
        _following(state.tokens, start, width),
        jnp.where(real, start[:, None] + position, state.tokens.shape[1]),
    )
    return dataclasses.replace(state, logprobs=kept)


def catch_up(
    target: Target,
    drafter: Drafter,
    width: int,
    params: Any,
    drafter_params: Any,
    state: DecodeState,
) -> DecodeState:
    """Let a drafter take in what was committed while it was not wanted.

    For a drafter with `feature_layers` the target runs over these tokens again: of its features
    nothing is left. Its cache's entries of them are written anew, and its length stays.

    Args:
        target: static.
        drafter: static.
        width: static, tokens a row and step.
        params: the target's.
        drafter_params: the drafter's.
        state: of the rows.
    """
    layers = drafter.feature_layers
    chain = trees.chain(width - 1)

    def missing(state: DecodeState) -> jax.Array:
        behind = state.length - 1 - drafter.synced(state.drafter, state.length)
        return jnp.where(state.active, behind, 0)

    def step(state: DecodeState) -> DecodeState:
        count = jnp.clip(missing(state), 0, width)
        start = drafter.synced(state.drafter, state.length)
        tokens = _following(state.tokens, start, width)
        features: tuple[jax.Array, ...] = ()
        cache = state.cache
        if layers:
            # Rows that lack nothing write past their prefix.
            rerun = jnp.where(count > 0, start, cache.length)
            _, rewritten, features = target.forward(
                params, tokens, dataclasses.replace(cache, length=rerun), chain, layers
            )
            cache = dataclasses.replace(rewritten, length=cache.length)
        inner = drafter.extend(drafter_params, state.drafter, tokens, count, features)
        return dataclasses.replace(state, cache=cache, drafter=inner)

    return jax.lax.while_loop(lambda s: jnp.any(missing(s) > 0), step, state)


def _following(tokens: jax.Array, start: jax.Array, width: int) -> jax.Array:
    """Return [B, width] tokens from each row's own start."""
    slot = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(tokens, slot, axis=1, mode="clip")


def decode_round(
    program: Program, params: Any, drafter_params: Any, state: DecodeState
) -> DecodeState:
    """Run one round: draft, verify, accept, commit.

    Args:
        program: static.
        params: the target's.
        drafter_params: the drafter's.
        state: with at least one active row.
    """
    keys = randomness.round_keys(state.seeds, state.length)
    if program.gamma == 0 or program.drafter is None:
        return _verify_and_commit(program, params, keys, state, _nothing(state))
    proposal, state = propose(program, drafter_params, keys, state)
    drafted = jnp.any(proposal.valid)
    state = _run_if(
        drafted, lambda s: _verify_and_commit(program, params, keys, s, proposal), state
    )
    return _run_if(
        ~drafted, lambda s: _verify_and_commit(program, params, keys, s, _nothing(s)), state
    )


def propose(
    program: Program, drafter_params: Any, keys: jax.Array, state: DecodeState
) -> tuple[Proposal, DecodeState]:
    """Return the round's drafts, and the state with the drafter's new one.

    Args:
        program: static; with a drafter.
        drafter_params: the drafter's.
        keys: [B] typed round keys.
        state: of the rows.
    """
    if program.drafter is None:
        raise ValueError("the program has no drafter")
    room = jnp.where(state.active, state.end - state.length - 1, 0)
    context = Context(
        tokens=state.tokens,
        length=state.length,
        room=room,
        sampling=state.sampling,
        keys=keys,
        vocab_size=program.target.vocab_size,
    )
    with jax.named_scope("draft"):
        proposal, inner = program.drafter.propose(
            drafter_params, state.drafter, context, program.gamma
        )
    # Near the end of its budget a row has room for fewer drafts: the last token is never a draft.
    useful = proposal.topology.by_row().depths[:, 1:] <= room[:, None]
    proposal = dataclasses.replace(proposal, valid=proposal.valid & useful)
    return proposal, dataclasses.replace(state, drafter=inner)


def _run_if(
    wanted: jax.Array, step: Callable[[DecodeState], DecodeState], state: DecodeState
) -> DecodeState:
    """Run `step` if `wanted`, as a loop of at most one iteration.

    XLA updates a loop's buffers in place; it copies those of a conditional, caches and all.
    """

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        return jnp.bool_(False), step(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], body, (wanted, state))[1]


def _nothing(state: DecodeState) -> Proposal:
    """Return a proposal of no drafts."""
    batch = state.length.shape[0]
    return Proposal(
        tokens=jnp.zeros((batch, 0), jnp.int32),
        topology=trees.chain(0),
        valid=jnp.zeros((batch, 0), bool),
        law=PointMass(),
    )


def _verify_and_commit(
    program: Program, params: Any, keys: jax.Array, state: DecodeState, proposal: Proposal
) -> DecodeState:
    """Run the target over pending token and drafts, and commit what is accepted."""
    drafter = program.drafter
    layers = drafter.feature_layers if drafter is not None else ()
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    nodes = jnp.concatenate([pending, proposal.tokens], axis=1)
    batch, width = nodes.shape
    with jax.named_scope("verify"):
        hidden, cache, features = program.target.forward(
            params, nodes, state.cache, proposal.topology, layers
        )
        logits = program.target.logits(params, hidden)
        logits = logits.reshape(batch, width, -1)

    @functools.cache
    def edited() -> jax.Array:
        with jax.named_scope("edit"):
            paths = trees.paths(proposal.tokens, proposal.topology)
            return edits.apply(rows.edits, logits, state.tokens, state.length, paths)

    rows, rule = state.sampling, program.verification
    given = (logits, proposal, rows, state.tokens, state.length)
    fused = fused_verification.wanted(*given, rule, program.kernels)
    with jax.named_scope("accept"):
        if fused:
            verdict = fused_verification.verify(*given, keys, implementation=program.kernels)
        elif proposal.topology.is_chain:
            verdict = verify_chain(edited(), proposal, rows, keys, rule, program.typical)
        else:
            verdict = verify_tree(edited(), proposal, rows, keys, rule, program.typical)
    with jax.named_scope("commit"):
        if not proposal.topology.is_chain:
            cache = kv.gather_path(cache, verdict.path, program.kernels)
        state = dataclasses.replace(state, cache=cache)
        state, committed = _commit(state, proposal, verdict)
        count = committed.counts
        if state.logprobs is not None:
            kept = logprobs.record(
                state.logprobs,
                logits,
                sampling.log_probs(edited(), rows),
                committed.tokens,
                committed.slots,
            )
            state = dataclasses.replace(state, logprobs=kept)
        if drafter is not None and program.gamma > 0:
            outcome = Outcome(
                length=state.length, committed=count, path=verdict.path, features=features
            )
            state = dataclasses.replace(state, drafter=drafter.absorb(state.drafter, outcome))
    return state


class _Committed(NamedTuple):
    """What a round committed: [B, K + 1] tokens and their slots (S past the [B] count)."""

    tokens: jax.Array
    slots: jax.Array
    counts: jax.Array


def _commit(
    state: DecodeState, proposal: Proposal, verdict: Verdict
) -> tuple[DecodeState, _Committed]:
    """Cut the accepted tokens at stop and budget, and append them."""
    batch, gamma = proposal.tokens.shape
    position = jnp.arange(gamma + 1, dtype=jnp.int32)[None, :]
    accepted = verdict.accepted[:, None]
    following = jnp.concatenate([verdict.path[:, 1:], jnp.zeros_like(accepted)], axis=1)
    drafts = jnp.concatenate([jnp.zeros_like(accepted), proposal.tokens], axis=1)
    drafts = jnp.take_along_axis(drafts, following, axis=1)
    tokens = jnp.where(position == accepted, verdict.final[:, None], drafts)

    # A stop ends the row at the stop's own token; the budget ends it otherwise. Unusable logits
    # end it only where plain decoding would have come to them.
    verified = verdict.accepted + verdict.finite.astype(jnp.int32)
    is_stop = jnp.any(tokens[:, :, None] == state.stop_ids[:, None, :], axis=-1)
    is_stop &= position < verified[:, None]
    to_stop = jnp.min(jnp.where(is_stop, position, gamma + 1), axis=1) + 1
    room = state.end - state.length
    count = jnp.minimum(jnp.minimum(verified, to_stop), room)
    count = jnp.where(state.active, count, 0)
    stopped = to_stop <= count
    full = state.active & ~stopped & (count == room)
    failed = state.active & ~stopped & ~full & ~verdict.finite

    length = state.length + count
    row = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], tokens.shape)
    slot = state.length[:, None] + position
    slot = jnp.where(position < count[:, None], slot, state.tokens.shape[1])  # dropped
    buffer = state.tokens.at[row, slot].set(tokens, mode="drop")

    finish = jnp.where(stopped, int(Finish.STOP), state.finish)
    finish = jnp.where(full, int(Finish.LENGTH), finish)
    finish = jnp.where(failed, int(Finish.ERROR), finish)
    depths = proposal.topology.by_row().depths[:, 1:]
    traced = trace.record(
        state.trace,
        slots=slot,
        proposed=jnp.max(jnp.where(proposal.valid, depths, 0), axis=1, initial=0),
        accepted=verdict.accepted,
        overlap=verdict.overlap,
        nodes=verdict.path[:, 1:],
        discarded=jnp.where(state.active, verified - count, 0),
    )
    known = edits.commit(state.sampling.edits, tokens, count)
    state = dataclasses.replace(
        state,
        tokens=buffer,
        length=length,
        active=state.active & (finish == int(Finish.NONE)),
        finish=finish,
        sampling=dataclasses.replace(state.sampling, edits=known),
        cache=kv.commit(state.cache, count),
        trace=traced,
    )
    return state, _Committed(tokens, slot, count)


def decode_chunk(
    program: Program,
    params: Any,
    drafter_params: Any,
    state: DecodeState,
    max_rounds: jax.Array,
    until_finish: jax.Array,
    ended: jax.Array | None = None,
) -> tuple[DecodeState, jax.Array]:
    """Run rounds on the device until one of three things happens.

    Args:
        program: static.
        params: the target's.
        drafter_params: the drafter's.
        state: donated by the caller's jit; its buffers are updated in place.
        max_rounds: int32 scalar, most rounds to run.
        until_finish: bool scalar; return as soon as a row finishes, so that its slot can be reused.
        ended: [B] bool, rows that the host has ended since the last chunk, at a stop text.

    Returns:
        The state when no row is active, `max_rounds` have run or (if asked) a row has finished;
        and the int32 number of rounds run.
    """
    if ended is not None:
        state = dataclasses.replace(state, active=state.active & ~ended)
    running = jnp.sum(state.active, dtype=jnp.int32)

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        rounds, state = carry
        left = jnp.sum(state.active, dtype=jnp.int32)
        return (rounds < max_rounds) & (left > 0) & ~(until_finish & (left < running))

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        rounds, state = carry
        return rounds + 1, decode_round(program, params, drafter_params, state)

    rounds, state = jax.lax.while_loop(more, body, (jnp.int32(0), state))
    return state, rounds
