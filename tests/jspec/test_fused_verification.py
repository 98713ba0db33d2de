"""Verification by the rejection-sampling op against edits, transforms and rules one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from jspec import edits, fused_verification, randomness, trees
from jspec.config import Verification
from jspec.drafting.protocol import Dense, Law, PointMass, Proposal, WithoutReplacement
from jspec.edits import BadWords, Edits, Minimum
from jspec.randomness import Purpose
from jspec.sampling import RowSampling
from jspec.tree_verification import verify_tree
from jspec.trees import Topology
from jspec.verification import Verdict, verify_chain
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Kernels, UnsupportedError
from tests import tiny
from tests.oracles import rejection_cases as cases
from tests.oracles import rejection_sampling as oracle
from tests.oracles.rejection_cases import Asked, Case

BATCH, VOCAB, SLOTS, LENGTH = 4, 130, 16, 7
ALL = Asked(bias=True, penalties=True, bad=True)
# Name -> nodes, and how the drafts were chosen.
KINDS = {
    "plain": (1, ALL),
    "chain": (5, ALL),
    "chain of a law": (5, dataclasses.replace(ALL, law=True)),
    "own trees": (7, dataclasses.replace(ALL, tree=True, own=True)),
    "with replacement": (
        7,
        dataclasses.replace(ALL, law=True, tree=True, drawn="with replacement"),
    ),
    "without replacement": (
        7,
        dataclasses.replace(ALL, law=True, tree=True, drawn="without replacement", own=True),
    ),
}
RUNS: list[tuple[Implementation, str, int]] = [
    *[("xla", kind, 12) for kind in KINDS],
    ("tpu_interpret", "without replacement", 2),
    ("gpu_interpret", "chain of a law", 4),
    ("gpu_interpret", "without replacement", 4),
]


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


class Given(NamedTuple):
    """What a verification is given."""

    logits: jax.Array
    proposal: Proposal
    rows: RowSampling
    tokens: jax.Array
    length: jax.Array
    keys: jax.Array


@jax.jit
def one_by_one(given: Given) -> Verdict:
    logits, proposal, rows, tokens, length, keys = given
    paths = trees.paths(proposal.tokens, proposal.topology)
    edited = edits.apply(rows.edits, logits, tokens, length, paths)
    verify = verify_chain if proposal.topology.is_chain else verify_tree
    return verify(edited, proposal, rows, keys)


@functools.partial(jax.jit, static_argnames="implementation")
def fused(given: Given, implementation: Implementation) -> Verdict:
    return fused_verification.verify(*given, implementation=implementation)


@jax.jit
def drawn_numbers(keys: jax.Array, nodes: jax.Array) -> tuple[jax.Array, jax.Array]:
    coins = randomness.uniforms(randomness.node_keys(keys, nodes, Purpose.ACCEPT))
    final = randomness.node_keys(keys, nodes, Purpose.FINAL)
    noises = randomness.gumbels(final.reshape(-1), VOCAB).reshape(*nodes.shape, VOCAB)
    return coins, noises


@jax.jit
def forbidden(given: Given) -> Any:
    paths = trees.paths(given.proposal.tokens, given.proposal.topology)
    return edits.forbidden(given.rows.edits, given.tokens, given.length, paths, VOCAB)


def words(case: Case, tokens: np.ndarray, rng: np.random.Generator) -> tuple[BadWords, Minimum]:
    """Forbid what is likely: the best token after the text, after a draft, and anywhere."""
    best = np.argmax(np.nan_to_num(np.asarray(case.logits), posinf=0, neginf=-99), axis=-1)
    prefixes = np.full((BATCH, 4, 2), -1, np.int32)
    last = np.full((BATCH, 4), VOCAB, np.int32)
    until = np.zeros(BATCH, np.int32)
    for row in range(BATCH):
        parents = oracle.parents_in(case, row)
        prefixes[row, 0] = tokens[row, LENGTH - 2 : LENGTH]
        last[row, 0] = best[row, 0]
        last[row, 1] = rng.choice(best[row])
        node = int(rng.integers(0, len(parents)))
        if node > 0:
            drafts = [tokens[row, LENGTH - 1], *case.drafts.tokens[row]]
            prefixes[row, 2] = drafts[parents[node]], drafts[node]
            last[row, 2] = best[row, node]
        until[row] = LENGTH + rng.integers(0, 3)
    stops = np.stack([rng.choice(row, 2) for row in best]).astype(np.int32)
    return (
        BadWords(prefixes=jnp.asarray(prefixes), last=jnp.asarray(last)),
        Minimum(tokens=jnp.asarray(stops), until=jnp.asarray(until)),
    )


def make(kind: str, seed: int) -> tuple[Given, Case]:
    """Return a verification, and the case that the oracle sees in it."""
    nodes, wish = KINDS[kind]
    wish = dataclasses.replace(wish, truncation=seed % 2 == 1)
    case = cases.make(BATCH, nodes, VOCAB, wish, seed)
    t, drafts = case.transforms, case.drafts
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (BATCH, SLOTS)).astype(np.int32)
    bad_words, minimum = words(case, tokens, rng)
    if drafts.log_q is not None and drafts.drawn == "chain":
        # A greedy row's q is a point mass.
        hit = jnp.arange(VOCAB, dtype=jnp.int32)[None, None, :] == drafts.tokens[..., None]
        point = jnp.where(hit, jnp.float32(0), -jnp.inf)
        log_q = jnp.where((t.temperature == 0)[:, None, None], point, drafts.log_q)
        drafts = dataclasses.replace(drafts, log_q=log_q)
    law: Law = PointMass()
    if drafts.log_q is not None:
        without = drafts.drawn == "without replacement"
        law = WithoutReplacement(drafts.log_q) if without else Dense(drafts.log_q)
    ways = [[len(w) for w in cases.ways(oracle.parents_in(case, row))] for row in range(BATCH)]
    topology = Topology(
        parents=drafts.parents,
        depths=jnp.asarray(ways if wish.own else ways[0], jnp.int32),
        ancestors=drafts.ancestors,
        is_chain=not wish.tree,
    )
    seeds = jnp.asarray(rng.integers(0, 2**32, (BATCH, 2)), jnp.uint32)
    length = jnp.full(BATCH, LENGTH, jnp.int32)
    given = Given(
        logits=case.logits,
        proposal=Proposal(drafts.tokens, topology, drafts.valid, law),
        rows=RowSampling(
            temperature=t.temperature,
            top_k=t.top_k,
            top_p=t.top_p,
            min_p=t.min_p,
            edits=Edits(t.bias, t.penalties, bad_words, minimum),
        ),
        tokens=jnp.asarray(tokens),
        length=length,
        keys=randomness.round_keys(seeds, length),
    )
    node = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (BATCH, nodes))
    coins, noises = drawn_numbers(given.keys, node)
    case = dataclasses.replace(
        case,
        transforms=dataclasses.replace(t, forbidden=forbidden(given)),
        drafts=drafts,
        coins=coins[:, 1:],
        noises=noises,
    )
    return given, oracle.as_numpy(case)


def check(given: Given, case: Case, implementation: Implementation) -> int:
    """Compare the verdicts of the rows that are not near a tie; return their drafts accepted."""
    truth, found = one_by_one(given), fused(given, implementation)
    if implementation == "tpu_interpret":
        races: Any = interpret_pallas_call.races
        assert not races.races_found
    accepted = 0
    for row in range(BATCH):
        laws = [oracle.law(case, row, node) for node in range(case.logits.shape[1])]
        decision = oracle.decision(case, row, laws)
        if decision.near:
            continue
        n = int(truth.accepted[row])
        assert n == decision.accepted
        accepted += n
        assert int(found.accepted[row]) == n
        assert bool(found.finite[row]) == bool(truth.finite[row]) == decision.finite
        np.testing.assert_array_equal(found.path[row, : n + 1], truth.path[row, : n + 1])
        if decision.finite:
            assert int(found.final[row]) == int(truth.final[row])
        examined = slice(0, n + decision.finite)
        valid = np.asarray(given.proposal.valid)[row]
        if given.proposal.topology.is_chain and np.all(np.asarray(given.rows.temperature) == 0):
            # Past the last draft that rule says whether an invalid one would have matched.
            examined = slice(0, min(n + decision.finite, int(np.cumprod(valid).sum())))
        np.testing.assert_allclose(
            found.overlap[row, examined], truth.overlap[row, examined], rtol=2e-5, atol=2e-6
        )
    return accepted


@pytest.mark.parametrize(("implementation", "kind", "count"), RUNS)
def test_the_same_verdict_as_one_by_one(
    implementation: Implementation, kind: str, count: int
) -> None:
    dispatch.forget()
    accepted = sum(check(*make(kind, seed), implementation) for seed in range(count))
    assert kind == "plain" or 2 * accepted >= count
    (choice,) = dispatch.choices()
    assert choice.ran == implementation


@pytest.mark.parametrize("kind", ["chain of a law", "own trees"])
def test_greedy_rows_alone(kind: str) -> None:
    given, case = make(kind, 3)
    zero = jnp.zeros(BATCH, jnp.float32)
    rows = dataclasses.replace(given.rows, temperature=zero)
    transforms = dataclasses.replace(case.transforms, temperature=zero)
    given = given._replace(rows=rows)
    if kind != "own trees":
        proposal = dataclasses.replace(given.proposal, law=PointMass())
        given = given._replace(proposal=proposal)
        case = dataclasses.replace(case, drafts=dataclasses.replace(case.drafts, log_q=None))
    case = oracle.as_numpy(dataclasses.replace(case, transforms=transforms))
    check(given, case, "xla")


def test_an_only_child_may_be_drawn_without_replacement() -> None:
    given, _ = make("chain of a law", 0)
    law = given.proposal.law
    assert isinstance(law, Dense)
    of_all_nodes = jnp.pad(law.log_q, [(0, 0), (0, 1), (0, 0)])
    proposal = dataclasses.replace(given.proposal, law=WithoutReplacement(of_all_nodes))
    drawn = given._replace(proposal=proposal)
    jax.tree.map(np.testing.assert_array_equal, one_by_one(drawn), one_by_one(given))
    jax.tree.map(np.testing.assert_array_equal, fused(drawn, "xla"), fused(given, "xla"))


def test_what_is_refused() -> None:
    given, _ = make("chain", 0)
    with pytest.raises(UnsupportedError, match="block verification"):
        fused_verification.verify(*given, rule="block")
    with pytest.raises(UnsupportedError, match="typical acceptance wants the entropy"):
        fused_verification.verify(*given, rule="typical")
    with pytest.raises(UnsupportedError, match="no such kernel"):
        fused_verification.verify(*given, implementation="triton")


def test_whether_a_program_wants_it() -> None:
    given, _ = make("chain", 0)
    plain, _ = make("plain", 0)

    def wanted(given: Given, rule: Verification, kernels: Kernels) -> bool:
        return fused_verification.wanted(*given[:5], rule, kernels)

    on_tpu, on_cpu = Kernels(platform="tpu"), Kernels(platform="cpu")
    dispatch.forget()
    assert wanted(given, "token", on_tpu)
    assert not wanted(given, "token", on_cpu)
    assert not wanted(given, "block", on_tpu)
    assert not wanted(given, "typical", on_tpu)
    assert wanted(plain, "block", on_tpu)  # without drafts every rule is the same
    assert [choice.reason is None for choice in dispatch.choices("tpu")] == [True, False, False]
    with pytest.raises(UnsupportedError, match="block verification"):
        wanted(given, "block", Kernels("tpu", platform="tpu"))
