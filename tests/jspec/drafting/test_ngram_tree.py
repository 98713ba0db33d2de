"""The trie of n-gram continuations against dictionaries in Python, and through the loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import randomness, sampling
from jspec.config import SpeculationConfig
from jspec.drafting.ngram import ngram
from jspec.drafting.ngram_tree import DEEPER, LONGER, NGramTreeDrafter, ngram_tree
from jspec.drafting.protocol import Context, PointMass
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import tiny

SLOTS = 20
NODES = 6


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.partial(jax.jit, static_argnames="drafter")
def propose(
    drafter: Any, tokens: jax.Array, length: jax.Array, room: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch = tokens.shape[0]
    context = Context(
        tokens=tokens,
        length=length,
        room=room,
        sampling=sampling.rows([SamplingParams()] * batch),
        keys=randomness.round_keys(jnp.zeros((batch, 2), jnp.uint32), length),
        vocab_size=8,
    )
    proposal, _ = drafter.propose((), (), context, NODES)
    assert isinstance(proposal.law, PointMass)
    return proposal.tokens, proposal.topology.by_row().parents, proposal.valid


def by_hand(
    row: list[int], room: int, matches: int, max_n: int, min_n: int
) -> list[tuple[int, ...]]:
    """Return the ways to the kept nodes, best first."""
    found = []  # the longest match of each place, then the most recent place
    for end in range(1, len(row)):
        run = 0
        while run < min(max_n, end) and row[end - 1 - run] == row[-1 - run]:
            run += 1
        if run >= min_n:
            found.append((run, end))
    found = sorted(found, reverse=True)[:matches]
    weights: dict[tuple[int, ...], float] = {}
    rank: dict[tuple[int, ...], int] = {}
    for place, (run, end) in enumerate(found):
        after = row[end:]
        for depth in range(1, min(NODES, room) + 1):
            way = tuple(after[i % len(after)] for i in range(depth))
            weights[way] = weights.get(way, 0) + LONGER ** (run - found[0][0])
            rank.setdefault(way, place)

    def value(way: tuple[int, ...]) -> np.float32:
        fall = np.float32(DEEPER) ** np.float32(len(way) - 1)
        return np.float32(weights[way]) * np.float32(fall)

    return sorted(weights, key=lambda way: (-value(way), len(way), rank[way]))[:NODES]


@pytest.mark.parametrize(("matches", "max_n", "min_n"), [(3, 3, 1), (5, 2, 2), (1, 3, 2)])
@settings(max_examples=60)
@given(data=st.data())
def test_the_trie(matches: int, max_n: int, min_n: int, data: st.DataObject) -> None:
    rows = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS)) for _ in range(2)]
    tokens = np.full((2, SLOTS), data.draw(st.integers(0, 2)), np.int32)  # also past the rows
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    length = jnp.array([len(row) for row in rows], jnp.int32)
    room = [data.draw(st.sampled_from([0, 1, 3, NODES + 2])) for _ in range(2)]
    drafter = NGramTreeDrafter(matches, max_n, min_n)
    drafts, parents, valid = propose(
        drafter, jnp.asarray(tokens), length, jnp.array(room, jnp.int32)
    )
    for index, row in enumerate(rows):
        expected = by_hand(row, room[index], matches, max_n, min_n)
        ways: list[tuple[int, ...]] = [()]
        for token, parent in zip(drafts[index].tolist(), parents[index, 1:].tolist(), strict=True):
            ways.append((*ways[parent], token))
        count = int(valid[index].sum())
        assert ways[1 : count + 1] == expected
        assert valid[index, :count].all()
        assert len(set(ways[: count + 1])) == count + 1  # no child twice


def test_one_match_is_the_chain() -> None:
    row = [7, 1, 2, 5, 6, 2, 4, 1, 2]
    tokens = jnp.zeros((1, SLOTS), jnp.int32).at[0, : len(row)].set(jnp.array(row, jnp.int32))
    length, room = jnp.array([len(row)], jnp.int32), jnp.array([NODES], jnp.int32)
    chain = propose(ngram(3, 2).drafter, tokens, length, room)
    tree = propose(NGramTreeDrafter(4, 3, 2), tokens, length, room)
    for ours, theirs in zip(tree, chain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shorter_matches_fill_what_longer_ones_leave() -> None:
    row = [1, 2, 5, 5, 0, 2, 4, 4, 0, 2, 4, 1, 1, 2]  # "1 2" before 5; "2" before 4 twice
    tokens = jnp.zeros((1, SLOTS), jnp.int32).at[0, : len(row)].set(jnp.array(row, jnp.int32))
    drafts, parents, _ = propose(
        NGramTreeDrafter(4, 3, 1),
        tokens,
        jnp.array([len(row)], jnp.int32),
        jnp.array([NODES], jnp.int32),
    )
    below_root = [
        t for t, p in zip(drafts[0].tolist(), parents[0, 1:].tolist(), strict=True) if not p
    ]
    assert below_root == [5, 4]


def requests(temperature: float = 0.0) -> list[Request]:
    params = SamplingParams(
        temperature=temperature, seed=3, max_new_tokens=30, bad_words=((11,), (12, 13))
    )
    tail = [Request((1,), params), Request((5, 6, 5, 6, 5), params)]
    return [Request(prompt, params) for prompt in tiny.prompts(3)] + tail


def test_greedy_is_plain_decoding_and_rows_do_not_mind_their_neighbours() -> None:
    target = tiny.model()
    plain = Decoder(target, batch_size=8).generate(requests())
    mixed = [*requests(0.8)[:2], *requests()[2:]]
    decoder = Decoder(target, ngram_tree(NODES, 4, 3), batch_size=4)
    found, together = decoder.generate(requests()), decoder.generate(mixed)
    assert [done.token_ids for done in found] == [done.token_ids for done in plain]
    # Two batches of other company give the same tokens.
    other = decoder.generate(mixed[::-1])[::-1]
    assert [done.token_ids for done in together] == [done.token_ids for done in other]
    assert sum(int(done.counts.accepted.sum()) for done in found) > 20
    # Rounds without a match in any row, as at the start of a lone short row, are plain ones.
    alone = decoder.generate(requests()[3:4])[0]
    assert alone.token_ids == plain[3].token_ids
    assert alone.counts.rounds > alone.counts.histogram[1:].sum()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 128}, "nodes"),
        ({"nodes": 2.5}, "nodes"),
        ({"matches": 0}, "matches"),
        ({"matches": True}, "matches"),
        ({"max_n": 1, "min_n": 2}, "max_n"),
    ],
)
def test_settings_that_make_no_sense(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        ngram_tree(**arguments)
    assert caught.value.field == field


def test_gamma_is_the_trees_and_block_verification_is_for_chains() -> None:
    with pytest.raises(InputError, match="not the 15 drafts of the drafter's tree"):
        Decoder(tiny.model(), ngram_tree(), SpeculationConfig(4))
    with pytest.raises(InputError, match="is a rule for chains"):
        Decoder(tiny.model(), ngram_tree(), SpeculationConfig(15, "block"))
