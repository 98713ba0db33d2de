"""The reference against float64 node by node, and against `jspec.verification` on its keys."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.rejection_sampling import reference, rejection_sampling
from tests.oracles import rejection_cases as cases
from tests.oracles import rejection_sampling as oracle
from tests.oracles.rejection_cases import Asked, Case

VOCAB = 60


@jax.jit
def run(case: Case) -> object:
    return rejection_sampling(case.logits, case.transforms, case.drafts, case.coins, case.noise())


FEW = hypothesis.settings(max_examples=12)


# What is drawn, and whether every row has a tree of its own.
DRAFTS = {
    "chain": Asked(),
    "chain of a law": Asked(law=True),
    "tree": Asked(tree=True),
    "own trees": Asked(tree=True, own=True),
    "with replacement": Asked(law=True, tree=True, drawn="with replacement"),
    "without replacement": Asked(law=True, tree=True, drawn="without replacement", own=True),
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("full", [False, True])
@FEW
@hypothesis.given(seed=st.integers(0, 10**6), truncation=st.booleans(), bad=st.booleans())
def test_against_float64(drafts: str, full: bool, seed: int, truncation: bool, bad: bool) -> None:
    wish = dataclasses.replace(
        DRAFTS[drafts],
        bias=full,
        penalties=full,
        forbidden=full,
        allowed=full,
        truncation=truncation,
        bad=bad,
    )
    case = cases.make(3, 6, VOCAB, wish, seed)
    out, case = run(case), oracle.as_numpy(case)
    for row in range(3):
        laws = [oracle.law(case, row, node) for node in range(6)]
        truth = oracle.decision(case, row, laws)
        if truth.near:
            continue
        n = truth.accepted
        assert int(out.accepted[row]) == n
        assert out.path[row].tolist() == truth.path + [-1] * (5 - n)
        assert bool(out.finite[row]) == truth.finite
        if not truth.finite:
            continue
        assert int(out.final[row]) == truth.final
        nodes = [0, *truth.path]
        tokens = [int(case.drafts.tokens[row, node - 1]) for node in truth.path] + [truth.final]
        for step, (node, token) in enumerate(zip(nodes, tokens, strict=True)):
            here = laws[node]
            np.testing.assert_allclose(
                out.log_p[row, step], np.log(here.p[token]), rtol=1e-4, atol=1e-4
            )
            if np.all(here.raw < np.inf):
                raw = here.raw[token] - np.log(np.sum(np.exp(here.raw)))
                np.testing.assert_allclose(out.raw_log_p[row, step], raw, rtol=1e-4, atol=1e-4)
        found, known = out.overlap[row], truth.overlap[:5]
        np.testing.assert_allclose(found[: len(known)], known, rtol=1e-4, atol=1e-5)
        assert not found[n + 1 :].any()
        assert not out.log_p[row, n + 1 :].any()


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    case = cases.make(2, 3, VOCAB, Asked(), 0)
    with pytest.raises(ValueError, match="tokens must have shape"):
        rejection_sampling(
            case.logits[:, :2], case.transforms, case.drafts, case.coins, case.noise()
        )


def test_a_threshold_is_the_largest_that_holds() -> None:
    values = np.array([0.0, 1e-37, 1e-3, 0.7, 1.0, 3e38, np.inf], np.float32)
    found = reference.largest_threshold(lambda t: t <= -jnp.asarray(values), values.shape)
    np.testing.assert_array_equal(found, -values)
