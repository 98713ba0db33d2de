"""The emitted law under real random draws: chi-square at a real vocabulary and over many rounds.

Seeds are fixed, so each figure is the same every time; a test fails below p = 1e-3, which a correct
program would have seen once in a thousand choices of seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspec import decoding, randomness, sampling, trees
from jspec.config import Verification
from jspec.decoding import Program
from jspec.drafting.protocol import Dense, PointMass, Proposal
from jspec.randomness import Purpose
from jspec.sampling_params import SamplingParams
from jspec.verification import verify_chain
from tests import chi_square, table_models
from tests.oracles import chains, transforms
from tests.oracles.transforms import Transforms

RULES: tuple[Verification, ...] = ("token", "block")


# --- one round at the vocabulary of SmolLM2 -------------------------------------------------------

VOCAB = 49152
CELLS = 8
ROWS = 16


def _large_tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits of target and draft, [2, V]: which of the two rows depends on the last token's parity.

    Peaked like a language model's, and the draft's like the target's.
    """
    generator = np.random.default_rng(5)
    target = generator.normal(0, 2.5, (2, VOCAB)).astype(np.float32)
    draft = (target + generator.normal(0, 1.0, target.shape)).astype(np.float32)
    return target, draft


@functools.partial(jax.jit, static_argnames=("rule", "dense"))
def _large_round(
    target: jax.Array,
    draft: jax.Array,
    rows: sampling.RowSampling,
    seeds: jax.Array,
    rule: Verification,
    dense: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw two drafts a row from log q = draft and verify them.

    Returns:
        Drafts [B, 2], accepted [B] and final [B].
    """
    batch = seeds.shape[0]
    keys = randomness.round_keys(seeds, jnp.full(batch, 17, jnp.int32))
    last = jnp.zeros(batch, jnp.int32)
    nodes, drafts, laws = [last], [], []
    for step in range(2):
        log_q = jnp.take(draft, last % 2, axis=0)
        node = jnp.full((batch, 1), step + 1, jnp.int32)
        if dense:
            last = sampling.draw(log_q, randomness.node_keys(keys, node, Purpose.DRAFT)[:, 0])
        else:
            last = jnp.argmax(log_q, axis=-1).astype(jnp.int32)
        drafts.append(last)
        laws.append(log_q)
        nodes.append(last % 2)
    tokens = jnp.stack(drafts, axis=1)
    proposal = Proposal(
        tokens=tokens,
        topology=trees.chain(2),
        valid=jnp.ones((batch, 2), bool),
        law=Dense(log_q=jnp.stack(laws, axis=1)) if dense else PointMass(),
    )
    logits = jnp.take(target, jnp.stack(nodes, axis=1), axis=0)
    verdict = verify_chain(logits, proposal, rows, keys, rule)
    return tokens, verdict.accepted, verdict.final


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "draws"),
    [(Transforms(0.7), 1024), (Transforms(1.0, 400, 0.95, 0.002), 640)],
    ids=["T=0.7", "T=1,top-k,top-p,min-p"],
)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "point-mass"])
@pytest.mark.parametrize("rule", RULES)
def test_the_first_two_tokens_at_a_real_vocabulary(
    rule: Verification, dense: bool, row: Transforms, draws: int
) -> None:
    target, draft = _large_tables()
    p = transforms.laws(target, row)
    params = SamplingParams(row.temperature, row.top_k, row.top_p, row.min_p)
    rows = sampling.rows([params] * ROWS)
    log_q = sampling.log_probs(jnp.asarray(draft)[None], sampling.rows([params]))[0]
    generator = np.random.default_rng(100 + 2 * RULES.index(rule) + dense)
    emitted = []
    for _ in range(draws // ROWS):
        seeds = generator.integers(0, 2**32, (ROWS, 2)).astype(np.uint32)
        tokens, accepted, final = map(
            np.asarray, _large_round(target, log_q, rows, seeds, rule, dense)
        )
        path = np.concatenate([tokens, final[:, None]], axis=1)
        path[np.arange(ROWS), accepted] = final
        # A round of one token is continued by plain sampling.
        for b in np.flatnonzero(accepted == 0):
            path[b, 1] = generator.choice(VOCAB, p=p[path[b, 0] % 2])
        emitted.append(path[:, :2])
    first, second = np.concatenate(emitted).T

    cell, parity = [chi_square.cells(law, CELLS) for law in p], np.arange(VOCAB) % 2
    observed = np.zeros((CELLS, 2, CELLS))
    np.add.at(observed, (cell[0][first], first % 2, np.stack(cell)[first % 2, second]), 1)
    law = np.zeros((CELLS, 2, CELLS))
    for half in range(2):
        of_first = np.bincount(cell[0], weights=p[0] * (parity == half), minlength=CELLS)
        law[:, half] = of_first[:, None] * np.bincount(cell[half], weights=p[half])
    for n, token in enumerate(np.stack([first, second], axis=1)):
        assert p[0, token[0]] > 0, n
        assert p[token[0] % 2, token[1]] > 0, n
    assert chi_square.p_value(observed, law) > chi_square.LEAST_P
    assert chi_square.p_value(observed.sum(axis=(1, 2)), law.sum(axis=(1, 2))) > chi_square.LEAST_P


# --- many rounds of the real loop ----------------------------------------------------------------

SMALL = 8
PROMPT = (3, 5)
run_chunk = jax.jit(decoding.decode_chunk, static_argnums=0)


def _small_tables() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(8)
    target = generator.normal(0, 1.2, (SMALL, SMALL, SMALL)).astype(np.float32)
    return target, (target.mean(axis=0) * 2).astype(np.float32)


def _joint(target: np.ndarray, row: Transforms, length: int) -> np.ndarray:
    """Return the exact law of the first tokens after `PROMPT`, [V] * length."""
    p = transforms.laws(target, row)
    tables = [p[PROMPT], p[PROMPT[1]]]
    tables += [np.broadcast_to(p, (SMALL,) * (k + 1)) for k in range(2, length)]
    return chains.joint(tables[:length])


def _decode(
    rule: Verification,
    gamma: int,
    params: Sequence[SamplingParams],
    count: int,
    deterministic: bool = False,
    chunk: Callable[..., Any] = run_chunk,
) -> np.ndarray:
    """Return [params, count, longest budget] tokens of rows that differ in their seed alone."""
    target, draft = _small_tables()
    drafter = table_models.TableDrafter(deterministic)
    model = table_models.TableTarget(SMALL)
    total = len(params) * count
    prompts = np.tile(np.array(PROMPT), (total, 1))
    seeds = np.arange(total) + 1000
    state = table_models.start(model, target, prompts, params, seeds, gamma, drafter)
    program = Program(model, drafter, gamma, rule)
    state, _ = chunk(program, target, draft, state, np.int32(64), np.bool_(False))
    assert not np.asarray(state.active).any()
    np.testing.assert_array_equal(state.length, state.end)
    tokens = np.asarray(state.tokens)[:, len(PROMPT) :]
    return tokens.reshape(count, len(params), -1).swapaxes(0, 1)


def _coarse(law: np.ndarray) -> np.ndarray:
    """Put two tokens in a cell: [8] * n to [4] * n."""
    return law.reshape((4, 2) * law.ndim).sum(axis=tuple(range(1, 2 * law.ndim, 2)))


def _count(tokens: np.ndarray) -> np.ndarray:
    """Count [N, n] tokens in [4] * n cells."""
    observed = np.zeros((4,) * tokens.shape[1])
    np.add.at(observed, tuple((tokens // 2).T), 1)
    return observed


@pytest.mark.parametrize(
    ("rule", "gamma", "deterministic"),
    [(rule, gamma, False) for rule in RULES for gamma in (1, 4)]
    + [(rule, 3, True) for rule in RULES],
)
def test_the_first_four_tokens_over_many_rounds(
    rule: Verification, gamma: int, deterministic: bool
) -> None:
    # 10000 rows of each kind in one batch. Nine tokens: the budget shortens none of the rounds that
    # are counted; four: rounds of 4 drafts have room for 3, 2, 1 and none.
    kinds = [(Transforms(1.0), 9), (Transforms(0.8, 6, 0.93, 0.02), 9), (Transforms(1.0), 4)]
    params = [
        SamplingParams(row.temperature, row.top_k, row.top_p, row.min_p, max_new_tokens=budget)
        for row, budget in kinds
    ]
    target, _ = _small_tables()
    drawn = _decode(rule, gamma, params, 10000, deterministic)
    for (row, _), tokens in zip(kinds, drawn[..., :4], strict=True):
        law = _joint(target, row, 4)
        assert (law[tuple(tokens.T)] > 0).all()
        assert chi_square.p_value(_count(tokens), _coarse(law)) > chi_square.LEAST_P


# --- draws that repeat ---------------------------------------------------------------------------


def _start_in_key(seeds: jax.Array, start_length: jax.Array) -> jax.Array:
    """Carry seed and start length in the key's two words, for `_by_position` to read."""
    words = jnp.stack([seeds[:, 1], start_length.astype(jnp.uint32)], axis=1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _by_position(keys: jax.Array, nodes: jax.Array, purpose: Purpose) -> jax.Array:
    """Make keys of (seed, absolute position, purpose): a discarded draw comes back next round."""
    words = jax.random.key_data(keys)
    seeds = jnp.stack([jnp.zeros_like(words[:, 0]), words[:, 0]], axis=1)
    position = words[:, 1].astype(jnp.int32)[:, None] + nodes
    if purpose == Purpose.FINAL:
        position = position + 1  # the final token at node n stands where draft n + 1 would
    bare = jax.random.wrap_key_data(seeds, impl="threefry2x32")

    def one(key: jax.Array, at: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, at), int(purpose))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(bare, position)


def _two_tokens(count: int, chunk: Callable[..., Any]) -> float:
    """Return the chi-square (15 degrees of freedom) of two tokens in 4 x 4 cells, block rule."""
    target, _ = _small_tables()
    params = SamplingParams(temperature=1.0, max_new_tokens=4)
    tokens = _decode("block", 3, [params], count, chunk=chunk)[0, :, :2]
    law = _coarse(_joint(target, Transforms(1.0), 2))
    return float(stats.chisquare(_count(tokens).ravel(), law.ravel() * count).statistic)


def test_draws_that_repeat_bias_the_output_and_ours_do_not() -> None:
    count = 120_000
    assert _two_tokens(count, run_chunk) < stats.chi2.isf(chi_square.LEAST_P, 15)

    def chunk(*args: Any) -> Any:  # a function of its own is traced anew
        return decoding.decode_chunk(*args)

    with (
        mock.patch.object(randomness, "round_keys", _start_in_key),
        mock.patch.object(randomness, "node_keys", _by_position),
    ):
        repeated = _two_tokens(count, jax.jit(chunk, static_argnums=0))
    assert repeated > stats.chi2.isf(1e-6, 15), "keys made of position alone went unnoticed"
