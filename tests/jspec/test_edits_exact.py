"""The law is the target's with every parameter on at once: enumeration, then chi-square."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jspec import decoding, edits, trees
from jspec.config import ModelConfig, Verification
from jspec.decoding import Program
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_tree import draft_tree
from jspec.drafting.dynamic_tree import dynamic_draft_tree
from jspec.drafting.hybrid import hybrid
from jspec.drafting.hybrid_tree import hybrid_tree
from jspec.drafting.medusa import medusa, medusa_tree
from jspec.drafting.ngram_tree import ngram_tree
from jspec.drafting.protocol import Drafter
from jspec.edits import RowEdits
from jspec.models.medusa import MedusaConfig, MedusaParams
from jspec.state import DecodeState
from tests import chi_square, table_models, tiny
from tests.jspec import exact_rounds
from tests.jspec.exact_rounds import check, params
from tests.oracles import chains, transforms
from tests.oracles import edits as oracle
from tests.oracles.edits import Wishes
from tests.oracles.transforms import Transforms

RULES: tuple[Verification, ...] = ("token", "block")
enumerator = functools.cache(exact_rounds.enumerator)
apply = jax.jit(edits.apply)


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


def edited_tables(
    tables: Sequence[np.ndarray], wishes: Wishes, prompt: Sequence[int], past: Sequence[int] = ()
) -> list[np.ndarray]:
    """Edit tables that hold logits for every prefix: [V] * (k + 1) for k tokens so far."""
    result = []
    for depth, table in enumerate(tables):
        new = np.empty(table.shape)
        for prefix in itertools.product(range(table.shape[-1]), repeat=depth):
            new[prefix] = oracle.edited(table[prefix], wishes, prompt, [*past, *prefix])
        result.append(new.astype(np.float32))
    return result


# --- one round, every outcome ---------------------------------------------------------------------

ALL = Wishes(
    bias={0: 0.75, 2: -0.5},
    repetition=1.5,
    frequency=0.5,
    presence=0.25,
    bad_words=((3,), (1, 2), (0, 0, 1)),
    min_new=3,
    stops=(),
)
HELD = Wishes(bias={1: 1.0}, repetition=0.7, frequency=-0.5, bad_words=((0, 0),), min_new=2)


def round_grid(
    target: list[np.ndarray],
    draft: list[np.ndarray],
    rows: list[Transforms],
    wishes: list[Wishes],
    prompt: list[int],
    past: list[int],
    forgetful: bool = False,
) -> exact_rounds.Grid:
    """List the rounds: laws by the oracle, logits by the code under test.

    Args:
        target: raw logits for every prefix.
        draft: the same of the drafter.
        rows: transforms.
        wishes: edits of the rows.
        prompt: of every row.
        past: tokens generated before the round.
        forgetful: leave the drafts out of the history, a known mistake.
    """
    logits = [edited_tables(target, w, prompt, past) for w in wishes]
    drafted = [edited_tables(draft, w, prompt, past) for w in wishes]
    for tables, t in zip([*logits, *drafted], [*rows, *rows], strict=True):
        if any(transforms.is_borderline(table, t) for table in tables):
            hypothesis.reject()
    grid = exact_rounds.grid(
        target,
        [[transforms.laws(t, r) for t in ts] for ts, r in zip(logits, rows, strict=True)],
        [[transforms.laws(t, r) for t in ts] for ts, r in zip(drafted, rows, strict=True)],
        rows,
    )
    count, (vocab, gamma) = len(grid.paths.drafted), (target[0].shape[-1], len(draft))
    asked = [
        RowEdits(params(r, w), prompt, list(map(tuple, w.bad_words)), w.stops)
        for r, w in zip(rows, wishes, strict=True)
        for _ in range(count)
    ]
    committed = jnp.asarray([prompt + past] * len(asked), jnp.int32)
    given_edits = edits.commit(
        edits.rows(asked, vocab),
        jnp.asarray([[*past, 0]] * len(asked), jnp.int32),
        jnp.full(len(asked), len(past), jnp.int32),
    )
    paths = trees.paths(grid.rounds.tokens, trees.chain(gamma))
    found = apply(
        given_edits,
        grid.rounds.logits,
        committed,
        jnp.full(len(asked), committed.shape[1], jnp.int32),
        jnp.full_like(paths, -1) if forgetful else paths,
    )
    return grid._replace(rounds=dataclasses.replace(grid.rounds, logits=found))


def random_tables(seed: int, vocab: int, gamma: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    shapes = [(vocab,) * (k + 1) for k in range(gamma + 1)]
    target = [generator.normal(0, 1.5, shape).astype(np.float32) for shape in shapes]
    draft = [t + generator.normal(0, 0.5, t.shape).astype(np.float32) for t in target[:gamma]]
    return target, draft


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "point-mass"])
@pytest.mark.parametrize(("vocab", "gamma"), [(4, 2), (5, 3)])
@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    row=st.builds(
        Transforms,
        temperature=st.sampled_from([0.7, 1.3]),
        top_k=st.sampled_from([0, 3]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
    ),
    stop=st.integers(0, 2),
)
def test_the_law_of_a_round_with_everything_on(
    vocab: int, gamma: int, dense: bool, seed: int, row: Transforms, stop: int
) -> None:
    target, draft = random_tables(seed, vocab, gamma)
    rows = [row, Transforms(temperature=0.0), Transforms()]
    wishes = [ALL._replace(stops=(stop,)), HELD._replace(stops=(stop,)), Wishes()]
    grid = round_grid(target, draft, rows, wishes, [1, 0, 1], [0, 1][: seed % 3])
    for rule in RULES:
        check(grid, enumerator(rule, dense)(grid.rounds), dense)


def test_a_history_without_the_drafts_is_noticed() -> None:
    target, draft = random_tables(1, 4, 2)
    grid = round_grid(target, draft, [Transforms()], [ALL], [1, 0, 1], [0], forgetful=True)
    with pytest.raises(AssertionError):
        check(grid, enumerator("token", False)(grid.rounds), False)


# --- many rounds of the real loop -----------------------------------------------------------------

SMALL = 8
PROMPT = (3, 5)
LOOP = Wishes(
    bias={0: 0.5, 7: -0.5},
    repetition=1.3,
    frequency=0.4,
    presence=0.3,
    bad_words=((6,), (5, 2), (1, 1, 0)),
    min_new=4,
    stops=(4,),
)
ROW = Transforms(0.9, 6, 0.95, 0.01)
run_chunk = jax.jit(decoding.decode_chunk, static_argnums=0)


def _tables() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(8)
    target = generator.normal(0, 1.2, (SMALL, SMALL, SMALL)).astype(np.float32)
    return target, (target.mean(axis=0) * 2).astype(np.float32)


def _start(gamma: int, count: int, drafter: Drafter) -> DecodeState:
    target, _ = _tables()
    return table_models.start(
        table_models.TableTarget(SMALL),
        target,
        np.tile(np.array(PROMPT), (count, 1)),
        [params(ROW, LOOP)],
        np.arange(count) + 1000,
        gamma,
        drafter,
        LOOP.stops,
    )


@functools.cache
def _law(prompt: tuple[int, ...] = PROMPT) -> np.ndarray:
    """Return the exact law of the first four tokens, none of which can be the stop."""
    target, _ = _tables()
    raw = [target[prompt[-2:]], target[prompt[-1]]]
    raw += [np.broadcast_to(target, (SMALL,) * (k + 1)) for k in (2, 3)]
    tables = edited_tables(raw, LOOP, prompt)
    assert not any(transforms.is_borderline(table, ROW) for table in tables)
    return chains.joint([transforms.laws(table, ROW) for table in tables])


@pytest.mark.parametrize(
    ("rule", "gamma", "deterministic"),
    [("token", 3, False), ("block", 3, False), ("token", 2, True), ("block", 4, True)],
)
def test_the_first_four_tokens_over_many_rounds(
    rule: Verification, gamma: int, deterministic: bool
) -> None:
    count = 5000
    target, draft = _tables()
    drafter = table_models.TableDrafter(deterministic)
    program = Program(table_models.TableTarget(SMALL), drafter, gamma, rule)
    state = _start(gamma, count, drafter)
    more, done = np.int32(64), np.bool_(False)
    after, _ = run_chunk(program, target, draft, state, more, done)
    tokens = np.asarray(after.tokens)[:, len(PROMPT) :]
    first = tokens[:, :4]
    assert (np.asarray(after.length) >= len(PROMPT) + 4).all()
    assert (_law()[tuple(first.T)] > 0).all()
    observed = np.zeros((4,) * 4)
    np.add.at(observed, tuple((first // 2).T), 1)
    coarse = _law().reshape((4, 2) * 4).sum(axis=(1, 3, 5, 7))
    assert chi_square.p_value(observed, coarse) > chi_square.LEAST_P

    _check_on_eight_devices(program, target, draft, state, after)


def _check_on_eight_devices(
    program: Program, target: np.ndarray, given: Any, state: DecodeState, after: DecodeState
) -> None:
    """Check that rows split over eight devices get the tokens of one."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(state, NamedSharding(mesh, PartitionSpec("rows")))
    assert len(split.tokens.sharding.device_set) == 8
    spread, _ = run_chunk(program, target, given, split, np.int32(64), np.bool_(False))
    np.testing.assert_array_equal(spread.tokens, after.tokens)
    np.testing.assert_array_equal(spread.length, after.length)


# --- trees through the same loop ------------------------------------------------------------------

TREE = (-1, 0, 0, 1, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class TableModel(table_models.TableTarget):
    """A table that can draft: it knows its longest context."""

    @property
    def config(self) -> ModelConfig:
        return dataclasses.replace(tiny.CONFIG, max_context=1000)


def _medusa() -> tuple[MedusaConfig, MedusaParams]:
    """Return heads that read one-hot tokens, of the marginal law so many tokens on."""
    step = jax.nn.softmax(jnp.asarray(_tables()[1]), axis=-1)
    laws = [jnp.linalg.matrix_power(step, head + 2) for head in range(6)]
    blocks = jnp.zeros((6, 0, SMALL, SMALL), jnp.float32)
    scores = jnp.stack([jnp.log(law).T for law in laws])
    config = MedusaConfig(6, 0, SMALL, SMALL, 2)
    return config, MedusaParams(blocks, blocks[..., 0], scores, None)


def _branching(name: str) -> BoundDrafter:
    if name == "ngram-tree":
        return ngram_tree(6, 4, 2)
    if name == "hybrid":
        return hybrid(medusa(*_medusa()), max_n=2, min_n=1)
    if name == "hybrid-tree":
        return hybrid_tree(medusa_tree(*_medusa(), TREE), lookups=3, max_n=2, min_n=1)
    if name == "dynamic-tree":
        bound = dynamic_draft_tree(tiny.CONFIG, (), 6, 3, 2)  # type: ignore[arg-type]
    else:
        bound = draft_tree(tiny.CONFIG, (), TREE, name)  # type: ignore[arg-type]
    # The drafter's table knows nothing of the token before.
    table = np.broadcast_to(_tables()[1], (SMALL,) * 3)
    return dataclasses.replace(
        bound,
        drafter=dataclasses.replace(bound.drafter, model=TableModel(SMALL)),  # type: ignore[type-var]
        params=dataclasses.replace(bound.params, model=table),
    )


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("top-k", PROMPT),
        ("without-replacement", PROMPT),
        ("independent", PROMPT),
        ("dynamic-tree", PROMPT),
        ("ngram-tree", (3, 5, 2, 0, 3, 1, 3, 5)),  # something to look up
        ("hybrid", (3, 5, 2, 0, 3, 1, 3, 5)),
        ("hybrid-tree", (3, 5, 2, 0, 3, 1, 3, 5)),
    ],
)
def test_the_first_four_tokens_over_many_rounds_of_trees(
    name: str, prompt: tuple[int, ...]
) -> None:
    count = 5000
    target, _ = _tables()
    model, bound = TableModel(SMALL), _branching(name)
    state = table_models.start(
        model,
        target,
        np.tile(np.array(prompt), (count, 1)),
        [params(ROW, LOOP)],
        np.arange(count) + 1000,
        len(TREE),
        bound.drafter,
        LOOP.stops,
        bound.params,
    )
    program = Program(model, bound.drafter, len(TREE) - 1)
    after, rounds = run_chunk(program, target, bound.params, state, np.int32(64), np.bool_(False))
    first = np.asarray(after.tokens)[:, len(prompt) : len(prompt) + 4]
    law = _law(prompt)
    assert (law[tuple(first.T)] > 0).all()
    observed = np.zeros((4,) * 4)
    np.add.at(observed, tuple((first // 2).T), 1)
    coarse = law.reshape((4, 2) * 4).sum(axis=(1, 3, 5, 7))
    assert chi_square.p_value(observed, coarse) > chi_square.LEAST_P
    # Not by never accepting: rounds are fewer than tokens.
    words = np.asarray(after.trace.rounds)
    most = 0.9 if name in ("ngram-tree", "hybrid") else 0.8  # which finds little in so short a text
    assert (words >= 0).sum() < most * (np.asarray(after.length) - len(prompt)).sum()
    assert int(rounds) > 1
    if name in ("ngram-tree", "hybrid-tree"):  # every row has a tree of its own
        _check_on_eight_devices(program, target, bound.params, state, after)
