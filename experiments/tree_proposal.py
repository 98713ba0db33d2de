"""The tree that a drafter makes of a prompt, with its tokens."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

import jspec
from experiments import timing, tree_text
from jspec import decoding, randomness
from jspec.decoding import Program
from jspec.generation import run_chunk
from jspec.requests import Request
from jspec.state import DecodeState


@dataclasses.dataclass(frozen=True)
class Proposed:
    """The drafts of one round.

    Attributes:
        parents: of the pending token (node 0) and the drafts.
        tokens: of the nodes.
        generated: tokens after the prompt, the pending one among them.
    """

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    generated: tuple[int, ...]


def _propose(
    program: Program, drafter_params: object, state: DecodeState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = randomness.round_keys(state.seeds, state.length)
    proposal, _ = decoding.propose(program, drafter_params, keys, state)
    return proposal.topology.by_row().parents[0], proposal.tokens[0], proposal.valid[0]


_run_propose = jax.jit(_propose, static_argnames="program")


def first(decoder: jspec.Decoder, request: Request) -> Proposed | None:
    """Return the first tree that branches (else the first drafts) while decoding a request.

    None where nothing is ever drafted.
    """
    program, drafter_params = decoder._program, decoder._drafter_params
    state = timing.prefilled(decoder, request)
    found = None
    while bool(state.active[0]):
        parents, tokens, valid = jax.device_get(_run_propose(program, drafter_params, state))
        length = int(state.length[0])
        known = np.asarray(state.tokens)[0, len(request.token_ids) - 1 : length]
        drafted = _valid(parents, tokens, valid, known)
        if len(drafted.parents) > 1:
            found = found or drafted
            if len(tree_text.paths(drafted.parents)) > 1:
                return drafted
        state, _ = run_chunk(
            program=program,
            params=decoder.target.params,
            drafter_params=drafter_params,
            state=state,
            max_rounds=np.int32(1),
            until_finish=np.bool_(False),
        )
    return found


def _valid(
    parents: np.ndarray, tokens: np.ndarray, valid: np.ndarray, known: np.ndarray
) -> Proposed:
    """Leave out the nodes that are no drafts; none of them has one below it."""
    kept = [0, *(int(node) + 1 for node in np.flatnonzero(valid))]
    place = {node: index for index, node in enumerate(kept)}
    return Proposed(
        parents=(-1, *(place[int(parents[node])] for node in kept[1:])),
        tokens=(int(known[-1]), *(int(tokens[node - 1]) for node in kept[1:])),
        generated=tuple(int(token) for token in known[1:]),
    )


def text(model: jspec.Model, proposed: Proposed) -> str:
    """Return the tree with its tokens as text."""
    shown = labels(model, proposed)
    so_far = _shown(model, *proposed.generated) if proposed.generated else "nothing"
    return (
        f"{len(shown) - 1} drafts after the pending token (on top); generated so far: {so_far}\n\n"
        f"{tree_text.drawing(proposed.parents, shown)}"
    )


def labels(model: jspec.Model, proposed: Proposed) -> list[str]:
    """Return the text of each node's token, quoted."""
    return [_shown(model, token) for token in proposed.tokens]


def _shown(model: jspec.Model, *tokens: int) -> str:
    if model.tokenizer is None:
        return " ".join(map(str, tokens))
    return repr(model.tokenizer.decode(tokens, skip_special_tokens=False))
