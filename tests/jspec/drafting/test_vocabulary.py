"""Drafters with a vocabulary of their own: nothing else is proposed, and the output stays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import decoding, randomness
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.dynamic_tree import dynamic_draft_tree
from jspec.drafting.vocabulary import checked, most_frequent, prune, spread
from jspec.errors import InputError
from jspec.generation import Decoder
from jspec.quantization import quantize_matrix
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import chi_square, tiny
from tests.jspec.drafting import draft_caches

TARGET = tiny.model()
NEARBY = tiny.nearby(TARGET.params, 0.1)
IDS = tuple(range(1, 60, 3))  # 20 of 61
TREE = (-1, 0, 0, 1, 1, 2)
NEW = 24
ROWS = 8
SAMPLES = 506  # fills the rows
PROMPT = tiny.prompts(2)[1]

BOUND: dict[str, Callable[[Any], BoundDrafter]] = {
    "chain": lambda ids: draft_model(TARGET.config, NEARBY, vocabulary=ids),
    "drawn": lambda ids: draft_tree(TARGET.config, NEARBY, TREE, vocabulary=ids),
}


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def asked() -> list[Request]:
    """Return 4 greedy requests, 2 that forbid all of the vocabulary, and samples of 2 tokens."""
    words = tuple((token,) for token in IDS)

    def params(**more: Any) -> SamplingParams:
        settings: dict[str, Any] = {"max_new_tokens": NEW, "bad_words": ((60, 60),)}
        return SamplingParams(**settings | more)

    return [
        *(Request(prompt, params()) for prompt in tiny.prompts(4)),
        *(Request(PROMPT, params(temperature=t, bad_words=words)) for t in (0.0, 1.0)),
        *(
            Request(PROMPT, params(temperature=1.0, seed=seed, max_new_tokens=2))
            for seed in range(SAMPLES)
        ),
    ]


def proposed(decoder: Decoder, requests: list[Request]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first round's drafts [B, K] and which of them are any."""
    bound = decoder.drafter
    assert bound is not None
    state = draft_caches.prefilled(decoder, requests)

    @functools.partial(jax.jit, static_argnames="program")
    def propose(program: Program, params: Any, state: Any) -> Any:
        keys = randomness.round_keys(state.seeds, state.length)
        return decoding.propose(program, params, keys, state)[0]

    found = propose(decoder._program, bound.params, state)
    return np.asarray(found.tokens), np.asarray(found.valid)


@pytest.mark.parametrize("name", BOUND)
def test_the_output_is_the_targets_and_nothing_outside_is_proposed(name: str) -> None:
    bound, requests = BOUND[name](IDS), asked()
    decoder = Decoder(
        TARGET, bound, jspec.SpeculationConfig(bound.drafts or 3), batch_size=ROWS, prefill_width=32
    )
    # As many at once as there are rows, so that one program does for all.
    batches = [requests[i : i + ROWS] for i in range(0, len(requests), ROWS)]
    found = [done for batch in batches for done in decoder.generate(batch)]
    assert all(done.error is None for done in found)
    greedy, forbidding, sampled = found[:4], found[4:6], found[6:]

    plain = Decoder(TARGET, batch_size=4, prefill_width=32).generate(requests[:4])
    assert [done.token_ids for done in greedy] == [done.token_ids for done in plain]
    assert sum(int(done.counts.accepted.sum()) for done in greedy) > 10
    for done in forbidding:
        assert len(done.token_ids) == NEW
        assert not set(done.token_ids) & set(IDS)
        assert done.counts.proposed.sum() == 0

    reference = tiny.to_numpy(TARGET.config, TARGET.params)
    tokens = np.array([done.token_ids for done in sampled])
    law = softmax(np.asarray(reference.run(list(PROMPT))[0][-1]))
    assert 0.2 < law[list(IDS)].sum() < 0.8  # tokens of both kinds are common
    first = np.bincount(tokens[:, 0], minlength=len(law))
    assert chi_square.p_value(first, law) > chi_square.LEAST_P
    after = [softmax(np.asarray(reference.run([*PROMPT, t])[0][-1])) for t in range(len(law))]
    second = np.bincount(tokens[:, 1], minlength=len(law))
    assert chi_square.p_value(second, law @ np.array(after)) > chi_square.LEAST_P
    assert sum(int(done.counts.accepted.sum()) for done in sampled) > 100

    check_proposed(decoder)


def test_a_dynamic_tree_of_known_tokens() -> None:
    bound = dynamic_draft_tree(TARGET.config, NEARBY, 5, 3, 2, vocabulary=IDS)
    check_proposed(Decoder(TARGET, bound, batch_size=ROWS, prefill_width=32))


def check_proposed(decoder: Decoder) -> None:
    """All first drafts are known tokens; rows that forbid these have none."""
    drafts, valid = proposed(decoder, asked()[:ROWS])
    assert not valid[4:6].any()
    assert valid[[0, 1, 2, 3, 6, 7], 0].all()
    assert set(drafts[valid].tolist()) <= set(IDS)


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max())
    return np.asarray(weight / weight.sum())


def test_spread_puts_each_logit_at_its_tokens_id() -> None:
    logits = jnp.array([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
    low = -np.inf
    expected = [[[low, 1, low, 2, low, 3]], [[low, 4, low, 5, low, 6]]]
    np.testing.assert_array_equal(spread(logits, jnp.array([1, 3, 5], jnp.int32), 6), expected)


def test_without_a_vocabulary_embeddings_are_cut_and_padded() -> None:
    logits = jnp.array([[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(spread(logits, None, 5), [[1, 2, 3, -np.inf, -np.inf]])
    np.testing.assert_array_equal(spread(logits, None, 2), [[1, 2]])
    np.testing.assert_array_equal(spread(logits, None, 3), logits)


def test_a_pruned_head_is_the_rows_of_the_head() -> None:
    pruned, kept = prune(TARGET.params, [9, 2, 33])
    np.testing.assert_array_equal(kept, [2, 9, 33])
    np.testing.assert_array_equal(pruned.head, TARGET.params.head[jnp.array([2, 9, 33])])
    assert pruned.layers is TARGET.params.layers
    int8 = dataclasses.replace(TARGET.params, head=quantize_matrix(TARGET.params.head))
    small, _ = prune(int8, [9, 2, 33])
    np.testing.assert_array_equal(small.head.values, int8.head.values[jnp.array([2, 9, 33])])
    np.testing.assert_array_equal(small.head.scales, int8.head.scales[jnp.array([2, 9, 33])])


def test_the_most_frequent_tokens() -> None:
    counts = np.array([5, 0, 9, 5, 1, 5])
    np.testing.assert_array_equal(most_frequent(counts, 1), [2])
    np.testing.assert_array_equal(most_frequent(counts, 3), [0, 2, 3])
    np.testing.assert_array_equal(most_frequent(counts, 6), range(6))
    for size in (0, 7, 2.0):
        with pytest.raises(InputError, match="size="):
            most_frequent(counts, size)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="counts="):
        most_frequent(np.array([1, -1]), 1)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ((), "is empty"),
        ("123", "is no list"),
        (5, "is no list"),
        ((1, 1), "comes more than once"),
        ((1, -1), "is outside the 61 tokens"),
        ((1, 61), "is outside the 61 tokens"),
        ((1.0, 2.0), "is no list of integers"),
        ((True, False), "is no list of integers"),
        ([[1, 2]], "is no list of integers"),
        (np.array([3, 3]), "comes more than once"),
    ],
)
def test_what_is_no_vocabulary(ids: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        jspec.draft_model(TARGET, TARGET, vocabulary=ids)
    assert caught.value.field == "vocabulary"


def test_ids_that_only_pad_the_embedding_are_refused() -> None:

    padded = dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, token_count=50))
    with pytest.raises(InputError, match="50 tokens"):
        jspec.early_exit(padded, 1, vocabulary=[49, 50])
    np.testing.assert_array_equal(checked(jnp.array([3, 1], jnp.int32), 50), [1, 3])


def test_a_tree_needs_as_many_tokens_as_a_node_has_children() -> None:
    with pytest.raises(InputError, match="of only 2 tokens"):
        jspec.draft_tree(TARGET, TARGET, (-1, 0, 0, 0), vocabulary=(1, 2))
    with pytest.raises(InputError, match="2 tokens"):
        jspec.dynamic_draft_tree(TARGET, TARGET, 5, 3, 3, vocabulary=(1, 2))
