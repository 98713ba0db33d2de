"""What a first draft is worth after every prefix of a given text, whatever gamma is.

The text is forced on target and drafter token by token: each round drafts after the true prefix,
works out the chance that a first draft would be accepted, and commits the text's own next token. A
drafter sees what it sees when a round's drafts are all rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec import admission, decoding, edits, randomness, trees
from jspec import cache as kv
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting.protocol import Dense, Outcome, PointMass, Proposal
from jspec.generation import run_prefill
from jspec.requests import Request
from jspec.sampling import RowSampling
from jspec.state import DecodeState
from jspec.tree_verification import verify_tree
from jspec.verification import verify_chain

# Drafts that a row has room for, wherever in the text it is: the last tokens are drafted for alike.
_ROOM = 128


@dataclasses.dataclass(frozen=True)
class Forced:
    """What was seen along one text of N tokens.

    Attributes:
        overlap: [N] float32, at each token of the text the chance that the drafter's first draft is
            accepted; 0 where it has none. Of a chain, sum_x min(p, q); of a tree, that of any of
            the root's children: the sum of p over them where they are chosen without chance.
        drafted: [N] bool, there was a draft.
    """

    overlap: np.ndarray
    drafted: np.ndarray


class _Seen(NamedTuple):
    """[B, S] each, by the slot of the token."""

    overlap: jax.Array
    drafted: jax.Array


def first_overlap(
    logits: jax.Array, proposal: Proposal, rows: RowSampling, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the chance that a first draft is accepted, and whether there is one.

    Args:
        logits: [B, V] float32, the target's after the pending token, edited.
        proposal: K drafts a row; only those of the first level count.
        rows: transforms of the B rows.
        keys: [B] typed round keys.

    Returns:
        [B] float32 and [B] bool.
    """
    batch, vocab = logits.shape
    if proposal.topology.is_chain:
        law = proposal.law if isinstance(proposal.law, PointMass) else Dense(_first(proposal.law))
        first = Proposal(proposal.tokens[:, :1], trees.chain(1), proposal.valid[:, :1], law)
    else:
        top = proposal.topology.by_row().depths[:, 1:] == 1
        first = dataclasses.replace(proposal, valid=proposal.valid & top)
    # Nothing below the first level is looked at, so any logits will do there.
    nodes = first.topology.size
    given = jnp.broadcast_to(logits[:, None], (batch, nodes, vocab))
    if proposal.topology.is_chain:
        overlap = verify_chain(given, first, rows, keys).overlap[:, 0]
    else:
        overlap = verify_tree(given, first, rows, keys).overlap[:, 0]
    drafted = jnp.any(first.valid, axis=1)
    return jnp.where(drafted, overlap, 0.0), drafted


def _first(law: Any) -> jax.Array:
    """Return [B, 1, V], the law of a chain's first draft."""
    log_q: jax.Array = law.log_q
    return log_q[:, :1]


def forced_round(
    program: Program,
    params: Any,
    drafter_params: Any,
    script: jax.Array,
    ends: jax.Array,
    state: DecodeState,
    seen: _Seen,
) -> tuple[DecodeState, _Seen]:
    """Draft after the true prefix, see what that is worth, and commit the script's next token.

    Args:
        program: static; with a drafter.
        params: the target's.
        drafter_params: the drafter's.
        script: [B, S] int32, prompts and texts.
        ends: [B] int32, their lengths.
        state: with at least one active row.
        seen: so far.
    """
    target, drafter = program.target, program.drafter
    assert drafter is not None
    rows = state.sampling
    keys = randomness.round_keys(state.seeds, state.length)
    proposal, state = decoding.propose(program, drafter_params, keys, state)
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    alone = trees.chain(0)
    hidden, cache, features = target.forward(
        params, pending, state.cache, alone, drafter.feature_layers
    )
    logits = target.logits(params, hidden)[:, None]
    nothing = trees.paths(proposal.tokens[:, :0], alone)
    logits = edits.apply(rows.edits, logits, state.tokens, state.length, nothing)[:, 0]
    overlap, drafted = first_overlap(logits, proposal, rows, keys)

    batch, slots = state.tokens.shape
    row = jnp.arange(batch, dtype=jnp.int32)
    slot = jnp.where(state.active, state.length, slots)  # dropped
    token = script[row, jnp.minimum(state.length, slots - 1)]
    seen = _Seen(
        seen.overlap.at[row, slot].set(overlap, mode="drop"),
        seen.drafted.at[row, slot].set(drafted, mode="drop"),
    )
    count = state.active.astype(jnp.int32)
    length = state.length + count
    nodes = proposal.topology.size
    outcome = Outcome(
        length=length,
        committed=count,
        path=jnp.zeros((batch, nodes), jnp.int32),
        # Only those of the pending token are read: one token is committed, and it follows that.
        features=tuple(jnp.repeat(feature, nodes, axis=1) for feature in features),
    )
    return (
        dataclasses.replace(
            state,
            tokens=state.tokens.at[row, slot].set(token, mode="drop"),
            length=length,
            active=state.active & (length < ends),
            sampling=dataclasses.replace(
                rows, edits=edits.commit(rows.edits, token[:, None], count)
            ),
            cache=kv.commit(cache, count),
            drafter=drafter.absorb(state.drafter, outcome),
        ),
        seen,
    )


def _forced(
    program: Program,
    params: Any,
    drafter_params: Any,
    script: jax.Array,
    ends: jax.Array,
    state: DecodeState,
) -> _Seen:
    """Run rounds until every text has ended."""

    def step(carry: tuple[DecodeState, _Seen]) -> tuple[DecodeState, _Seen]:
        return forced_round(program, params, drafter_params, script, ends, *carry)

    seen = _Seen(jnp.zeros(script.shape, jnp.float32), jnp.zeros(script.shape, bool))
    _, seen = jax.lax.while_loop(lambda carry: jnp.any(carry[0].active), step, (state, seen))
    return seen


_run_forced = jax.jit(_forced, static_argnames="program")


def along(
    target: jspec.Model,
    drafter: jspec.BoundDrafter,
    requests: Sequence[Request],
    texts: Sequence[Sequence[int]],
    batch_size: int = 8,
    on_progress: Callable[[int], None] | None = None,
) -> list[Forced]:
    """Force texts on target and drafter.

    Args:
        target: whose law the texts have.
        drafter: a chain's drafts one token a round, a tree's its whole tree.
        requests: the prompts, and the transforms of p and q.
        texts: token ids that follow each prompt, at least one.
        batch_size: texts at a time.
        on_progress: called with the number of texts done.
    """
    speculation = SpeculationConfig(drafter.drafts or 1)
    decoder = jspec.Decoder(target, drafter, speculation, batch_size=batch_size)
    pairs = list(zip(requests, texts, strict=True))
    found: list[Forced] = []
    for start in range(0, len(pairs), batch_size):
        found += _batch(decoder, pairs[start : start + batch_size])
        if on_progress is not None:
            on_progress(len(found))
    return found


def _batch(decoder: jspec.Decoder, pairs: Sequence[tuple[Request, Sequence[int]]]) -> list[Forced]:
    program = decoder._program
    sized = [
        dataclasses.replace(
            request,
            sampling=dataclasses.replace(
                request.sampling,
                max_new_tokens=len(text),
                min_new_tokens=min(request.sampling.min_new_tokens, len(text)),
                n=1,
                logprobs=None,
                prompt_logprobs=None,
            ),
        )
        for request, text in pairs
    ]
    state = decoder.new_state(sized)
    script = np.array(state.tokens)
    ends = np.zeros(len(script), np.int32)
    for row, (request, text) in enumerate(pairs):
        begin = len(request.token_ids)
        ends[row] = begin + len(text)
        script[row, begin : ends[row]] = text
    longest = max(len(request.token_ids) for request, _ in pairs)
    state = run_prefill(
        target=program.target,
        drafter=program.drafter,
        width=min(decoder.prefill_width, admission.power_of_two(longest)),
        params=decoder.target.params,
        drafter_params=decoder._drafter_params,
        state=state,
    )
    state = dataclasses.replace(state, end=jnp.asarray(ends + _ROOM))
    seen = jax.device_get(
        _run_forced(
            program=program,
            params=decoder.target.params,
            drafter_params=decoder._drafter_params,
            script=jnp.asarray(script),
            ends=jnp.asarray(ends),
            state=state,
        )
    )
    spans = [
        slice(len(request.token_ids), int(ends[row])) for row, (request, _) in enumerate(pairs)
    ]
    return [
        Forced(seen.overlap[row, span], seen.drafted[row, span]) for row, span in enumerate(spans)
    ]
