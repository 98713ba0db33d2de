"""Dynamic trees against EAGLE-2 written with Python lists, plain decoding and fresh caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import randomness, sampling
from jspec.config import ModelConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import DraftParams
from jspec.drafting.dynamic_tree import (
    DynamicTreeDrafter,
    dynamic_draft_tree,
)
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.sampling_params import SamplingParams
from tests import table_models, tiny
from tests.jspec.drafting.draft_caches import NEW, check_caches, requests

TARGET = tiny.model()
NEARBY = tiny.nearby(TARGET.params, 0.1)


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


# --- the tree itself ------------------------------------------------------------------------------

VOCAB, DEPTH, WIDTH, NODES = 6, 3, 2, 7
ROWS, SLOTS = 12, 16


@dataclasses.dataclass(frozen=True)
class Table(table_models.TableTarget):
    """A table that can draft: it knows its longest context."""

    @property
    def config(self) -> ModelConfig:
        return dataclasses.replace(tiny.CONFIG, max_context=9)


def by_hand(table: np.ndarray, row: list[int], deepest: int) -> list[tuple[int, ...]]:
    """Return the ways to the kept nodes, best first."""
    log_p = np.log(np.exp(table) / np.exp(table).sum(axis=-1, keepdims=True))
    pool: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(DEPTH):
        found: dict[tuple[int, ...], float] = {}
        for way, value in frontier.items():
            text = [*row, *way]
            next_law = log_p[text[-2], text[-1]]
            for token in np.argsort(-next_law)[:WIDTH].tolist():
                found[*way, token] = value + next_law[token]
        pool |= found
        frontier = dict(sorted(found.items(), key=lambda item: -item[1])[:WIDTH])
    kept = sorted((way for way in pool if len(way) <= deepest), key=lambda way: -pool[way])
    return kept[:NODES]


@functools.partial(jax.jit, static_argnames="drafter")
def propose(
    drafter: DynamicTreeDrafter,
    table: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    room: jax.Array,
) -> Proposal:
    params: Any = DraftParams(table)  # type: ignore[arg-type]
    state = drafter.init(ROWS, SLOTS, jnp.float32)
    state = drafter.extend(params, state, tokens, length - 1, ())
    context = Context(
        tokens=tokens,
        length=length,
        room=room,
        sampling=sampling.rows([SamplingParams()] * ROWS),
        keys=randomness.round_keys(jnp.zeros((ROWS, 2), jnp.uint32), length),
        vocab_size=VOCAB,
    )
    return drafter.propose(params, state, context, NODES)[0]


def test_the_tree_of_each_row() -> None:
    generator = np.random.default_rng(4)
    table = generator.normal(0, 1.5, (VOCAB,) * 3).astype(np.float32)
    tokens = generator.integers(0, VOCAB, (ROWS, SLOTS)).astype(np.int32)
    length = generator.integers(2, 10, ROWS).astype(np.int32)
    length[:2] = 8, 9  # near the end of the draft model's 9 positions
    room = np.array([9] * 6 + [0, 1, 2, 9, 9, 9], np.int32)
    drafter = DynamicTreeDrafter(Table(VOCAB), NODES, DEPTH, WIDTH)  # type: ignore[arg-type]
    found = propose(drafter, *map(jnp.asarray, (table, tokens, length, room)))
    assert isinstance(found.law, PointMass)
    parents = found.topology.by_row().parents
    sizes = set()
    for row in range(ROWS):
        deepest = min(int(room[row]), 9 - int(length[row]) + 1)
        expected = by_hand(table, tokens[row, : length[row]].tolist(), deepest)
        count = int(found.valid[row].sum())
        ways: list[tuple[int, ...]] = [()]
        for token, parent in zip(
            found.tokens[row].tolist(), parents[row, 1:].tolist(), strict=True
        ):
            ways.append((*ways[parent], token))
        assert ways[1 : count + 1] == expected
        assert found.valid[row, :count].all()
        sizes.add(count)
    assert {0, 2, NODES} <= sizes


# --- through the loop -----------------------------------------------------------------------------


def drafter() -> BoundDrafter:
    return dynamic_draft_tree(TARGET.config, NEARBY, nodes=7, depth=4, width=3)


def test_greedy_is_plain_decoding_and_rows_do_not_mind_their_neighbours() -> None:
    plain = Decoder(TARGET).generate(requests())
    decoder = Decoder(TARGET, drafter(), batch_size=4)  # 10 nodes are run for 7 that are kept
    found = decoder.generate(requests())
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]
    assert sum(done.counts.rounds for done in found) < 0.5 * 5 * NEW
    for done in found:
        assert done.counts.emitted == NEW
        assert (done.counts.accepted <= done.counts.examined).all()
    mixed = [*requests(0.8)[:2], *requests()[2:]]
    together = decoder.generate(mixed)
    other = decoder.generate(mixed[::-1])[::-1]
    assert [done.token_ids for done in together] == [done.token_ids for done in other]


def test_the_end_of_the_context() -> None:
    plain = Decoder(TARGET).generate(requests(new=60))
    found = Decoder(TARGET, drafter(), batch_size=4).generate(requests(new=60))
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]


def test_the_caches_hold_the_committed_tokens() -> None:
    check_caches(TARGET, drafter(), requests()[:4])


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ((0, 3, 3), "nodes"),
        ((7, 0, 3), "depth"),
        ((7, 3, 128), "width"),
        ((7, 3, 62), "width"),
        ((13, 3, 2), "nodes"),
        ((7, 3, 2.0), "width"),
    ],
)
def test_sizes_that_make_no_sense(sizes: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InputError) as caught:
        dynamic_draft_tree(TARGET.config, NEARBY, *sizes)
    assert caught.value.field == field
