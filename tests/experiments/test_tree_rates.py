from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from experiments import tree_rates, tree_report
from experiments.tree_rates import Costs, Rates
from jspec import decoding, tree_shapes, trees
from jspec.decoding import Program
from jspec.drafting.protocol import Context, PointMass, Proposal
from jspec.drafting.stateless import StatelessDrafter
from jspec.requests import Request
from jspec.sampling_params import SamplingParams
from tests import rounds, scripted, tiny

TREE = (-1, 0, 0, 0, 1, 1)


@dataclasses.dataclass(frozen=True)
class Written(StatelessDrafter):
    """Drafts the row of params [V, 5] that belongs to the pending token, as `TREE`."""

    def propose(
        self, params: jax.Array, state: tuple[()], context: Context, gamma: int
    ) -> tuple[Proposal, tuple[()]]:
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        tokens = jnp.take(params, pending, axis=0)
        valid = jnp.ones(tokens.shape, bool)
        return Proposal(tokens, trees.from_parents(TREE), valid, PointMass()), ()


def test_rates_of_a_scripted_drafter_are_those_counted_by_hand() -> None:
    # The target goes 1 -> 10 -> 11 -> 12 -> 20 -> 21 -> .., and stops nowhere here.
    drafts = np.zeros((scripted.VOCAB, 5), np.int32)
    drafts[1] = (3, 10, 4, 5, 6)  # the second child
    drafts[11] = (12, 3, 4, 6, 20)  # the first child, then its second one
    drafts[21] = (3, 4, 5, 6, 7)  # none
    drafts[22] = (3, 4, 23, 6, 7)  # the third child
    drafts[24] = (25, 3, 4, 26, 7)  # the first child; the budget's end leaves no room below it
    state = scripted.state([[1]], [10], stops=[-1])
    state = dataclasses.replace(state, drafter=())
    program: Any = Program(scripted.Bigram(), Written(), 5)
    state, ran = jax.jit(decoding.decode_chunk, static_argnames="program")(
        program=program,
        params=scripted.table(),
        drafter_params=jnp.asarray(drafts),
        state=state,
        max_rounds=np.int32(99),
        until_finish=np.bool_(False),
    )
    assert int(ran) == 5
    nodes = rounds.counted(state, 1).nodes
    # Rounds that took each node, and those of them that had drafts of the next depth.
    assert nodes.tolist() == [[5, 5], [2, 1], [1, 1], [1, 1], [0, 0], [1, 0]]
    # First children: 2 of 5 at the root, 0 of 1 below; second: 1 of 5 and 1 of 1; third: 1 of 5.
    assert tree_shapes.measured_rates(TREE, nodes) == pytest.approx([2 / 6, 2 / 6, 1 / 5])


def test_a_model_drafting_for_itself_is_right_the_first_time() -> None:
    model = tiny.model()
    sampling = SamplingParams(max_new_tokens=10)
    requests = [Request(prompt, sampling) for prompt in tiny.prompts(3)]
    with tiny.quick_compilation():
        parents = tree_shapes.k_ary([3])
        drafter = jspec.draft_tree(model, model, parents)
        rates = tree_rates.measure_rates(model, drafter, parents, requests, batch_size=4)
    assert rates == Rates((1.0, 0.0, 0.0), 3 * 5)


@pytest.mark.parametrize(
    ("verify", "drafts", "tokens"),
    [
        # The seven likeliest nodes: 1, 2, 1.1, 1.1.1, then 1.2 and 2.1, then any of the next.
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 7, 1 + 0.6 + 0.3 + 0.36 + 0.216 + 2 * 0.18 + 0.108),
        ({1: 1.0, 2: 9.0, 4: 18.0, 8: 36.0}, 0, 1.0),  # compute-bound
    ],
)
def test_costs_decide_whether_to_speculate(
    verify: dict[int, float], drafts: int, tokens: float
) -> None:
    costs = Costs(verify, dict.fromkeys(verify, 0.0))
    plan = tree_report.make(Rates((0.6, 0.3), 20), (-1, 0, 1), 2, 3, costs)
    assert plan.by_cost is not None
    assert len(plan.by_cost.parents) - 1 == drafts
    assert plan.by_cost.expected == pytest.approx(tokens)
    text = tree_report.text(plan)
    assert ("do not speculate" in text) == (drafts == 0)
    # Two drafts of a chain: 1 + 0.6 + 0.36 tokens in the time of a pass over three.
    expected = 1.96 / np.interp(3, list(verify), list(verify.values()))
    assert tree_report.speed(plan, (-1, 0, 1)) == pytest.approx(expected)


def test_a_chain_costs_passes_of_one_token_and_a_tree_passes_over_all_of_it() -> None:
    costs = Costs({1: 1.0, 4: 1.0}, {1: 0.1, 4: 0.5})
    plan = tree_report.make(Rates((0.5, 0.2), 0), (-1, 0, 0, 1), 3, 3, costs)
    assert tree_report.speed(plan, (-1, 0, 1, 2)) == pytest.approx(1.875 / 1.3)
    assert tree_report.speed(plan, (-1, 0, 0, 1)) == pytest.approx(1.95 / 2.0)
