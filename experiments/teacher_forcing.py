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
from jspec import admission, decoding, edits, randomness, sampling, trees
from jspec import cache as kv
from jspec.config import SpeculationConfig
from jspec.decoding import Program
from jspec.drafting.protocol import Dense, Outcome, PointMass, Proposal
from jspec.generation import run_prefill
from jspec.requests import Request
from jspec.sampling import RowSampling
from jspec.state import DecodeState

# Drafts that a row has room for, wherever in the text it is: the last tokens are drafted for alike.
_ROOM = 128
_TINY = 1e-38


@dataclasses.dataclass(frozen=True)
class Forced:
    """What was seen along one text of N tokens.

    Attributes:
        overlap: [N] float32, at each token of the text the chance that a first draft is accepted, 0
            where there is none: sum_x min(p, q) of a chain, `first_overlap` of a tree.
        drafted: [N] bool, there was a draft.
    """

    overlap: np.ndarray
    drafted: np.ndarray


class _Seen(NamedTuple):
    """[B, S] each, by the slot of the token."""

    overlap: jax.Array
    drafted: jax.Array


class _Examined(NamedTuple):
    """After some children were examined: r and q [B, V], [B] chances of none so far and of any."""

    r: jax.Array
    q: jax.Array
    missed: jax.Array
    chance: jax.Array


def first_overlap(
    logits: jax.Array, proposal: Proposal, rows: RowSampling
) -> tuple[jax.Array, jax.Array]:
    """Return the chance that a draft of the first level is accepted, and whether there is one.

    Of children chosen without chance it is the sum of p over them. Of children drawn from q it is
    1 - prod_i (1 - a_i), a_i = min(1, r(x_i) / q(x_i)) by the rules of `jspec.tree_verification`;
    the last a_i is averaged over its draw, sum_x min(r, q), which leaves the expectation as it is
    and is all there is of a chain.

    Args:
        logits: [B, V] float32, the target's after the pending token, edited.
        proposal: K drafts a row; only those of the first level count.
        rows: transforms of the B rows.

    Returns:
        [B] float32 and [B] bool.
    """
    p = jnp.exp(sampling.log_probs(logits[:, None], rows)[:, 0])
    batch, vocab = p.shape
    depths = proposal.topology.by_row().depths[:, 1:]
    children = proposal.valid & (depths == 1)
    law = proposal.law
    drawn = not isinstance(law, PointMass)
    q = p if isinstance(law, PointMass) else jnp.exp(law.log_q[:, 0])
    place = jnp.arange(vocab, dtype=jnp.int32)[None, :]

    def deterministic(node: jax.Array, left: jax.Array) -> jax.Array:
        token = proposal.tokens[:, node]
        return jnp.where(children[:, node, None] & (place == token[:, None]), 0.0, left)

    def examined(node: jax.Array, carry: _Examined) -> _Examined:
        token, here = proposal.tokens[:, node], children[:, node]
        r, q = carry.r, carry.q
        of_token = [jnp.take_along_axis(law, token[:, None], axis=1)[:, 0] for law in (r, q)]
        accepted = jnp.minimum(of_token[0] / jnp.maximum(of_token[1], _TINY), 1.0)
        on_average = jnp.sum(jnp.minimum(r, q), axis=-1)
        rest = _normal(jnp.maximum(r - q, 0.0), r)
        without = (
            q if isinstance(law, Dense) else _normal(jnp.where(place == token[:, None], 0.0, q), q)
        )
        return _Examined(
            r=jnp.where(here[:, None], rest, r),
            q=jnp.where(here[:, None], without, q),
            missed=jnp.where(here, carry.missed * (1.0 - accepted), carry.missed),
            chance=jnp.where(here, 1.0 - carry.missed * (1.0 - on_average), carry.chance),
        )

    drafts = proposal.tokens.shape[1]
    left = jax.lax.fori_loop(0, drafts, deterministic, p)
    chance = jnp.sum(p, axis=-1) - jnp.sum(left, axis=-1)
    if drawn:
        start = _Examined(p, q, jnp.ones(batch, jnp.float32), jnp.zeros(batch, jnp.float32))
        of_drawn = jax.lax.fori_loop(0, drafts, examined, start).chance
        # Greedy rows take the most probable children, and their q is not kept.
        chance = jnp.where(sampling.is_greedy(rows), chance, of_drawn)
    drafted = jnp.any(children, axis=1)
    return jnp.where(drafted, jnp.clip(chance, 0.0, 1.0), 0.0), drafted


def _normal(weight: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Return [B, V] weights as a law, or the other law where rounding has left none."""
    mass = jnp.sum(weight, axis=-1, keepdims=True)
    return jnp.where(mass > 0, weight / jnp.where(mass > 0, mass, 1.0), otherwise)


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
    overlap, drafted = first_overlap(logits, proposal, rows)

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
