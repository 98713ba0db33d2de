"""The enumeration fails when verification is wrong: known mistakes, put in one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sampling, verification
from jspec.config import Verification
from tests.jspec import exact_rounds
from tests.jspec.exact_rounds import Grid, check
from tests.jspec.test_verification_enumeration import PLAIN, random_tables
from tests.oracles import transforms
from tests.oracles.transforms import Transforms

VOCAB, GAMMA = 3, 2
ROWS = [PLAIN, Transforms(temperature=0.6, top_k=2)]


def make_grid(untransformed_q: bool = False) -> Grid:
    generator = np.random.default_rng(2)
    target = random_tables(generator, VOCAB, GAMMA + 1, 0.25, 1e-3)
    draft = random_tables(generator, VOCAB, GAMMA, 0.0, 1e-3)
    drawn = [[transforms.laws(table, row) for table in draft] for row in ROWS]
    plain = [[transforms.laws(table, PLAIN) for table in draft] for _ in ROWS]
    return exact_rounds.grid(
        target,
        [[transforms.laws(table, row) for table in target] for row in ROWS],
        drawn,
        ROWS,
        plain if untransformed_q else drawn,
    )


def _wrapped(change: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the rule `name` with its outcome changed."""
    rule = getattr(verification, name)
    return lambda log_p, proposal, coins: change(*rule(log_p, proposal, coins))


def non_strict(log_p: Any, proposal: Any, coins: Any) -> Any:
    p = jnp.exp(verification._of_tokens(log_p[:, :-1], proposal.tokens))
    q = jnp.exp(verification._of_tokens(proposal.law.log_q, proposal.tokens))
    accepted = verification._leading((coins * q <= p) & proposal.valid)
    return accepted, jnp.ones_like(p[:, 0]), accepted < verification._leading(proposal.valid)


def deaf_to_valid(log_p: Any, proposal: Any, coins: Any) -> Any:
    everything = jnp.ones_like(proposal.valid)
    return _TOKEN_RULE(log_p, dataclasses.replace(proposal, valid=everything), coins)


def by_weights(log_p: Any, proposal: Any, coins: Any) -> Any:
    """Accept every block with w_i, as only the whole one may be."""
    p = jnp.exp(verification._of_tokens(log_p[:, :-1], proposal.tokens))
    q = jnp.exp(verification._of_tokens(proposal.law.log_q, proposal.tokens))
    weight, weights = jnp.ones_like(p[:, 0]), []
    for i in range(p.shape[1]):
        weight = jnp.minimum(weight * p[:, i] / q[:, i], 1.0)
        weights.append(weight)
    size = jnp.arange(1, len(weights) + 1, dtype=jnp.int32)[None]
    taken = (coins < jnp.stack(weights, axis=1)) & proposal.valid
    accepted = jnp.max(jnp.where(taken, jnp.broadcast_to(size, taken.shape), 0), axis=1)
    scales = jnp.stack([jnp.ones_like(weight), *weights], axis=1)
    cut = accepted < verification._leading(proposal.valid)
    return accepted, verification._at(scales, accepted), cut


def target_instead_of_residual(log_p: Any, proposal: Any, accepted: Any, *_: Any) -> Any:
    return verification._at(log_p, accepted)


def residual_without_max(log_p: Any, proposal: Any, accepted: Any, scale: Any, cut: Any) -> Any:
    own = verification._at(log_p, accepted)
    rejected = jnp.minimum(accepted, proposal.tokens.shape[1] - 1)
    q = jnp.exp(verification._at(proposal.law.log_q, rejected))
    rest = jnp.log(jnp.abs(scale[:, None] * jnp.exp(own) - q))
    return jnp.where(cut[:, None], rest, own)


def residual_always(log_p: Any, proposal: Any, accepted: Any, scale: Any, cut: Any) -> Any:
    return _RESIDUAL(log_p, proposal, accepted, scale, jnp.ones_like(cut))


def untransformed(logits: jax.Array, rows: Any) -> jax.Array:
    return jax.nn.log_softmax(logits, axis=-1)


_TOKEN_RULE = verification._token_rule
_RESIDUAL = verification._residual
MUTATIONS: dict[str, tuple[Verification, bool, Any, str, Any]] = {
    # name: rule, dense, module, function, replacement
    "non-strict": ("token", True, verification, "_token_rule", non_strict),
    "deaf to valid": ("token", True, verification, "_token_rule", deaf_to_valid),
    "p for the residual": (
        "token", True, verification, "_residual", target_instead_of_residual,
    ),
    "p for the residual of a point mass": (
        "token", False, verification, "_residual", target_instead_of_residual,
    ),
    "residual without max": ("token", True, verification, "_residual", residual_without_max),
    "residual for the bonus": ("token", True, verification, "_residual", residual_always),
    "p before transforms": ("token", True, sampling, "log_probs", untransformed),
    "block residual of scale 1": (
        "block", True, verification, "_block_rule",
        _wrapped(lambda n, scale, cut: (n, jnp.ones_like(scale), cut), "_block_rule"),
    ),
    "block accepted by its weight": ("block", True, verification, "_block_rule", by_weights),
    "block one short": (
        "block", True, verification, "_block_rule",
        _wrapped(lambda n, scale, cut: (jnp.maximum(n - 1, 0), scale, cut), "_block_rule"),
    ),
    "block with p for the residual": (
        "block", True, verification, "_block_rule",
        _wrapped(lambda n, scale, cut: (n, scale, jnp.zeros_like(cut)), "_block_rule"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "point-mass"])
def test_the_tables_used_here_pass_without_a_mistake(rule: Verification, dense: bool) -> None:
    grid = make_grid()
    check(grid, exact_rounds.enumerator(rule, dense)(grid.rounds), dense)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name: str) -> None:
    rule, dense, module, function, replacement = MUTATIONS[name]
    grid = make_grid()
    with mock.patch.object(module, function, replacement):
        outcomes = exact_rounds.enumerator(rule, dense)(grid.rounds)
    with pytest.raises(AssertionError):
        check(grid, outcomes, dense)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_before_its_transforms_is_found(rule: Verification) -> None:
    grid = make_grid(untransformed_q=True)
    with pytest.raises(AssertionError):
        check(grid, exact_rounds.enumerator(rule, True)(grid.rounds), True)
