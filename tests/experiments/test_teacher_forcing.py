from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from experiments import teacher_forcing
from jspec import sampling, trees
from jspec.drafting.eagle import eagle
from jspec.drafting.protocol import Dense, Law, PointMass, Proposal, WithoutReplacement
from jspec.requests import Request
from tests import tiny, tiny_eagle

TEMPERATURE = 0.8


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, ...]]:
    """Texts that no model has written, of four tokens so that runs of them come again."""
    rng = np.random.default_rng(3)
    return [tuple(int(token) for token in rng.integers(0, 4, size)) for size in (9, 14, 6)]


def requests(temperature: float = TEMPERATURE) -> list[Request]:
    params = jspec.SamplingParams(temperature=temperature, seed=5)
    return [Request(prompt, params) for prompt in tiny.prompts(3)]


def softmax(logits: np.ndarray, temperature: float = TEMPERATURE) -> np.ndarray:
    weight = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weight / weight.sum(axis=-1, keepdims=True)


def rows(texts: list[tuple[int, ...]], layers: int | None = None) -> list[np.ndarray]:
    """The float64 reference's logits [N, V] that predict each token of each text."""
    model = tiny.to_numpy(tiny.CONFIG, tiny.params())
    model = dataclasses.replace(model, layers=model.layers[:layers])
    found = []
    for prompt, text in zip(tiny.prompts(3), texts, strict=True):
        logits, _ = model.run([*prompt, *text])
        found.append(logits[len(prompt) - 1 : -1])
    return found


def forced(
    drafter: jspec.BoundDrafter, texts: list[tuple[int, ...]], temperature: float = TEMPERATURE
) -> list[teacher_forcing.Forced]:
    # Rows of different lengths, and one of padding.
    return teacher_forcing.along(tiny.model(), drafter, requests(temperature), texts, 4)


@pytest.mark.parametrize("temperature", [TEMPERATURE, 0.0])
def test_overlap_of_a_draft_model_is_that_of_the_reference(
    texts: list[tuple[int, ...]], temperature: float
) -> None:
    drafter = jspec.early_exit(tiny.model(), 1)
    for seen, p, q in zip(
        forced(drafter, texts, temperature), rows(texts), rows(texts, 1), strict=True
    ):
        if temperature:
            expected = np.minimum(softmax(p), softmax(q)).sum(axis=-1)
            assert expected.min() < 0.9 < expected.max() + 0.5
        else:
            expected = (p.argmax(axis=-1) == q.argmax(axis=-1)).astype(np.float64)
        np.testing.assert_allclose(seen.overlap, expected, atol=2e-5)
        assert seen.drafted.all()


def test_of_a_tree_every_child_of_the_root_counts_and_none_below(
    texts: list[tuple[int, ...]],
) -> None:
    drafter = jspec.draft_tree(
        tiny.model(), jspec.early_exit_model(tiny.model(), 1), (-1, 0, 1, 0, 3), "top-k"
    )
    for seen, p, q in zip(forced(drafter, texts), rows(texts), rows(texts, 1), strict=True):
        two_best = np.argsort(-q, axis=-1)[:, :2]
        expected = np.take_along_axis(softmax(p), two_best, axis=-1).sum(axis=-1)
        np.testing.assert_allclose(seen.overlap, expected, atol=2e-5)


def looked_up(before: list[int]) -> int | None:
    """What followed the most recent longest match of the last 3 or 2 tokens."""
    for n in (3, 2):
        for end in range(len(before) - 2, n - 2, -1):
            if before[end - n + 1 : end + 1] == before[-n:]:
                return before[end + 1]
    return None


def test_a_lookup_is_worth_nothing_where_it_finds_nothing(texts: list[tuple[int, ...]]) -> None:
    found = []
    for seen, p, prompt, text in zip(
        forced(jspec.ngram(), texts), rows(texts), tiny.prompts(3), texts, strict=True
    ):
        drafts = [looked_up([*prompt, *text[:count]]) for count in range(len(text))]
        expected = [
            0.0 if draft is None else softmax(law)[draft]
            for draft, law in zip(drafts, p, strict=True)
        ]
        np.testing.assert_allclose(seen.overlap, expected, atol=2e-5)
        assert seen.drafted.tolist() == [draft is not None for draft in drafts]
        found += seen.drafted.tolist()
    assert True in found
    assert False in found


def test_an_eagle_head_is_given_true_features_at_every_position(
    texts: list[tuple[int, ...]],
) -> None:
    """Against a head in NumPy that drafts from scratch after every prefix."""
    head, vocab = tiny_eagle.to_numpy("eagle3"), tiny_eagle.VOCAB
    drafter = eagle(tiny_eagle.CONFIG, tiny_eagle.config("eagle3"), tiny_eagle.params("eagle3"))
    params = jspec.SamplingParams(temperature=TEMPERATURE, seed=5)
    prompts = tiny_eagle.prompts()[1:]
    asked = [Request(prompt, params) for prompt in prompts]
    target = tiny.to_numpy(tiny_eagle.CONFIG, tiny_eagle.TARGET.params)
    for seen, prompt, text in zip(
        teacher_forcing.along(tiny_eagle.TARGET, drafter, asked, texts[1:], 2),
        prompts,
        texts[1:],
        strict=True,
    ):
        whole = [*prompt, *text]
        p = softmax(target.run(whole)[0])
        features = tiny_eagle.features("eagle3", whole)
        expected = []
        for length in range(len(prompt), len(whole)):
            q = softmax(head.after(whole[:length], features[: length - 1], [], vocab))
            expected.append(np.minimum(p[length - 1], q).sum())
        np.testing.assert_allclose(seen.overlap, expected, atol=2e-5)
        assert min(expected) + 0.05 < max(expected)


P, Q = np.array([0.5, 0.3, 0.2], np.float32), np.array([0.2, 0.5, 0.3], np.float32)


def tree(law: type[Law], first: int, second: int, valid: bool = True) -> Proposal:
    """Two children of the root, and one below the first."""
    log_q = jnp.broadcast_to(jnp.log(jnp.asarray(Q)), (1, 4, 3))
    return Proposal(
        tokens=jnp.array([[first, second, 2]], jnp.int32),
        topology=trees.from_parents((-1, 0, 0, 1)),
        valid=jnp.full((1, 3), valid),
        law=PointMass() if law is PointMass else law(log_q),  # type: ignore[call-arg]
    )


_first_overlap = jax.jit(teacher_forcing.first_overlap)


def chance(proposal: Proposal) -> tuple[float, bool]:
    rows_of = sampling.rows([jspec.SamplingParams(temperature=1.0)])
    seen, drafted = _first_overlap(jnp.log(jnp.asarray(P))[None], proposal, rows_of)
    return float(seen[0]), bool(drafted[0])


@pytest.mark.parametrize(
    ("law", "first", "second", "expected"),
    [
        (PointMass, 1, 0, 0.3 + 0.5),
        (PointMass, 1, 1, 0.3),
        # The first is accepted with p / q = 0.6; what is left of p is all on token 0. The second's
        # chance is that under q without the first: 0.2 / 0.5.
        (WithoutReplacement, 1, 0, 1 - 0.4 * (1 - 0.4)),
        (WithoutReplacement, 1, 2, 1 - 0.4 * (1 - 0.4)),
        (WithoutReplacement, 0, 1, 1.0),
        (Dense, 1, 1, 1 - 0.4 * (1 - 0.2)),
    ],
)
def test_siblings_in_turn(law: type[Law], first: int, second: int, expected: float) -> None:
    seen, drafted = chance(tree(law, first, second))
    assert seen == pytest.approx(expected, abs=1e-6)
    assert drafted
    assert chance(tree(law, first, second, valid=False)) == (0.0, False)


@pytest.mark.parametrize("law", [WithoutReplacement, Dense])
def test_over_all_draws_it_is_how_often_a_child_is_accepted(law: type[Law]) -> None:
    mean = exact = 0.0
    for x, y in itertools.product(range(3), repeat=2):
        after = Q.astype(np.float64).copy()
        if law is WithoutReplacement:
            after[x] = 0
        after /= after.sum()
        weight = Q[x] * after[y]
        rest = np.maximum(P - Q.astype(np.float64), 0)
        rest /= rest.sum()
        second = min(1.0, rest[y] / after[y]) if after[y] else 0.0
        exact += weight * (1 - (1 - min(1.0, P[x] / Q[x])) * (1 - second))
        mean += weight * chance(tree(law, x, y))[0]
    assert mean == pytest.approx(exact, abs=1e-6)
