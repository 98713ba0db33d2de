"""Bias, penalties and forbidden tokens at every node, against plain Python, node by node."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import edits, trees
from jspec.edits import RowEdits
from jspec.sampling_params import SamplingParams
from tests.oracles import edits as oracle
from tests.oracles.edits import Wishes

VOCAB, ROWS, SLOTS, NODES = 7, 2, 16, 5
apply = jax.jit(edits.apply)
commit = jax.jit(edits.commit)
paths = jax.jit(trees.paths)

tokens = st.integers(0, VOCAB - 1)
few = functools.partial(st.lists, tokens)


@st.composite
def wishes(draw: Any) -> Wishes:
    quarters = st.integers(-8, 8).map(lambda n: n / 4)
    return Wishes(
        bias=draw(st.dictionaries(tokens, quarters, max_size=3)),
        repetition=draw(st.sampled_from([1.0, 0.5, 1.25, 2.0])),
        frequency=draw(quarters),
        presence=draw(quarters),
        bad_words=draw(st.lists(few(min_size=1, max_size=4), max_size=3)),
        min_new=draw(st.integers(0, 6)),
        stops=draw(few(max_size=2, unique=True)),
    )


def asked(wish: Wishes, prompt: list[int]) -> RowEdits:
    params = SamplingParams(
        logit_bias=wish.bias,
        repetition_penalty=wish.repetition,
        frequency_penalty=wish.frequency,
        presence_penalty=wish.presence,
        min_new_tokens=wish.min_new,
    )
    return RowEdits(params, prompt, [tuple(word) for word in wish.bad_words], wish.stops)


@st.composite
def parents(draw: Any) -> tuple[int, ...]:
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, NODES)))


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    wished=st.lists(wishes(), min_size=ROWS, max_size=ROWS),
    prompts=st.lists(few(min_size=1, max_size=5), min_size=ROWS, max_size=ROWS),
    generated=st.lists(few(max_size=5), min_size=ROWS, max_size=ROWS),
    drafts=st.lists(few(min_size=NODES - 1, max_size=NODES - 1), min_size=ROWS, max_size=ROWS),
    tree=parents(),
    seed=st.integers(0, 99),
)
def test_every_node_has_its_own_history(
    wished: list[Wishes],
    prompts: list[list[int]],
    generated: list[list[int]],
    drafts: list[list[int]],
    tree: tuple[int, ...],
    seed: int,
) -> None:
    logits = np.random.default_rng(seed).normal(size=(ROWS, NODES, VOCAB)).astype(np.float32)
    buffer = np.full((ROWS, SLOTS), 3, np.int32)  # stale tokens past the length
    length = np.array([len(p) + len(g) for p, g in zip(prompts, generated, strict=True)], np.int32)
    for row in range(ROWS):
        buffer[row, : length[row]] = prompts[row] + generated[row]
    given_edits = edits.rows([asked(w, p) for w, p in zip(wished, prompts, strict=True)], VOCAB)
    # Committed in two goes, each with tokens past its count.
    for start in (0, 3):
        part = [[*g[start:], 0, 1, 2][:3] for g in generated]
        count = [min(max(len(g) - start, 0), 3) for g in generated]
        given_edits = commit(given_edits, jnp.asarray(part, jnp.int32), jnp.asarray(count))
    found = apply(
        given_edits,
        jnp.asarray(logits),
        jnp.asarray(buffer),
        jnp.asarray(length),
        paths(jnp.asarray(drafts, jnp.int32), trees.from_parents(tree)),
    )
    for row in range(ROWS):
        for node in range(NODES):
            way: list[int] = []
            at = node
            while at > 0:
                way.insert(0, drafts[row][at - 1])
                at = tree[at]
            truth = oracle.edited(
                logits[row, node], wished[row], prompts[row], generated[row] + way
            )
            np.testing.assert_allclose(found[row, node], truth, rtol=1e-5, atol=1e-5)


def test_what_nobody_asks_for_is_not_there() -> None:
    plain = edits.rows([asked(Wishes(), [1]), asked(Wishes(), [2])], VOCAB)
    assert plain == edits.Edits()
    logits = jnp.ones((2, 1, VOCAB), jnp.float32)
    empty = jnp.zeros((2, 1, 0), jnp.int32)
    same = edits.apply(plain, logits, jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), empty)
    assert same is logits


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ([1, 2], [5]),  # 1 2 -> 5
        ([2], []),
        ([3, 1, 2], [5]),
        ([4], [4]),  # 4 -> 4; the single token 6 is always forbidden
        ([], []),
    ],
)
def test_a_bad_word_begins_in_the_prompt_or_in_the_drafts(
    text: list[int], forbidden: list[int]
) -> None:
    wish = Wishes(bad_words=[(1, 2, 5), (4, 4), (6,)])
    for split in range(len(text) + 1):
        committed, drafts = [0, *text[:split]], text[split:]
        given_edits = edits.rows([asked(wish, [0])], VOCAB)
        found = edits.apply(
            given_edits,
            jnp.zeros((1, len(drafts) + 1, VOCAB), jnp.float32),
            jnp.asarray([committed + [5] * 4], jnp.int32),
            jnp.asarray([len(committed)], jnp.int32),
            trees.paths(jnp.asarray([drafts], jnp.int32), trees.chain(len(drafts))),
        )
        gone = np.flatnonzero(np.isneginf(np.asarray(found)[0, -1])).tolist()
        assert gone == sorted({*forbidden, 6})
