"""The reference against float64 node by node, and against `jspec.verification` on its keys."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec import edits, randomness, sampling, trees, verification
from jspec.drafting.protocol import Dense, PointMass, Proposal
from jspec.randomness import Purpose
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
    edited = dict.fromkeys(("bias", "penalties", "forbidden", "allowed"), full)
    wish = dataclasses.replace(DRAFTS[drafts], truncation=truncation, bad=bad, **edited)
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


@functools.partial(jax.jit, static_argnames="law")
def by_jspec(case: Case, keys: jax.Array, law: bool) -> verification.Verdict:
    t = case.transforms
    batch, nodes, _ = case.logits.shape
    history = jnp.zeros((batch, 4), jnp.int32)
    raw = case.logits.astype(jnp.float32)
    topology = trees.chain(nodes - 1)
    given = edits.Edits(
        bias=None if t.bias is None else edits.Bias(t.bias.tokens, t.bias.values),
        penalties=None
        if t.penalties is None
        else edits.Penalties(
            t.penalties.repetition,
            t.penalties.frequency,
            t.penalties.presence,
            t.penalties.in_prompt,
            t.penalties.generated,
        ),
    )
    edited = edits.apply(
        given,
        raw,
        history,
        jnp.full(batch, 4, jnp.int32),
        trees.paths(case.drafts.tokens, topology),
    )
    rows = sampling.RowSampling(t.temperature, t.top_k, t.top_p, t.min_p, given)
    chosen = Dense(case.drafts.log_q) if case.drafts.log_q is not None else PointMass()
    proposal = Proposal(case.drafts.tokens, topology, case.drafts.valid, chosen)
    return verification.verify_chain(edited, proposal, rows, keys)


@jax.jit
def by_kernel(case: Case, keys: jax.Array) -> object:
    batch, nodes, vocab = case.logits.shape
    node = jnp.broadcast_to(jnp.arange(1, nodes, dtype=jnp.int32), (batch, nodes - 1))
    coins = randomness.uniforms(randomness.node_keys(keys, node, Purpose.ACCEPT))

    def noise(node: jax.Array) -> jax.Array:
        own = randomness.node_keys(keys, node[:, None], Purpose.FINAL)[:, 0]
        return randomness.gumbels(own, vocab)

    return rejection_sampling(case.logits, case.transforms, case.drafts, coins, noise)


@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("law", [False, True])
@FEW
@hypothesis.given(seed=st.integers(0, 10**6), truncation=st.booleans(), bad=st.booleans())
def test_same_decisions_as_the_spine_on_the_same_keys(
    nodes: int, law: bool, seed: int, truncation: bool, bad: bool
) -> None:
    wish = Asked(law=law, penalties=True, bias=True, truncation=truncation, bad=bad)
    case = cases.make(4, nodes, 300, wish, seed)
    # A batch of greedy rows alone takes every q for the point mass that it should be.
    hypothesis.assume(not law or bool(jnp.any(case.transforms.temperature > 0)))
    seeds = jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (4, 2)), jnp.uint32)
    keys = randomness.round_keys(seeds, jnp.full(4, 7, jnp.int32))
    truth = by_jspec(case, keys, law=law)
    found = by_kernel(case, keys)
    case = oracle.as_numpy(case)
    for row in range(4):
        if any(oracle.law(case, row, node).near for node in range(nodes)):
            continue
        np.testing.assert_array_equal(found.finite[row], truth.finite[row])
        np.testing.assert_array_equal(found.accepted[row], truth.accepted[row])
        if truth.finite[row]:
            np.testing.assert_array_equal(found.final[row], truth.final[row])
        n = int(truth.accepted[row])
        looked_at = slice(0, n + 1 if truth.finite[row] else n)
        known = case.drafts.valid[row, looked_at] & ~np.isnan(found.overlap[row, looked_at])
        np.testing.assert_allclose(
            np.where(known, found.overlap[row, looked_at], 0),
            np.where(known, truth.overlap[row, looked_at], 0),
            rtol=1e-5,
            atol=1e-6,
        )


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
