"""Trees by a draft model: the same tokens as plain decoding, a cache without holes, exact laws."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from jspec import trees
from jspec.config import SpeculationConfig
from jspec.drafting import BoundDrafter
from jspec.drafting.draft_model import draft_model
from jspec.drafting.draft_tree import Draws, draft_tree
from jspec.errors import InputError
from jspec.generation import Decoder, run_chunk
from jspec.requests import Completion
from tests import tiny
from tests.jspec.drafting.draft_caches import NEW, check_caches, requests

TARGET = tiny.model()
NEARBY = tiny.nearby(TARGET.params, 0.1)
TREE = (-1, 0, 0, 1, 1, 2, 3, 6)
BUSH = (-1, 0, 0, 0, 1, 2, 3, 4)
DRAWS: tuple[Draws, ...] = ("top-k", "without-replacement", "independent")


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    with tiny.quick_compilation():
        yield


@functools.cache
def plain(new: int = NEW) -> list[Completion]:
    return Decoder(TARGET).generate(requests(new=new))


def drafter(draws: Draws, parents: tuple[int, ...] = TREE, exact: bool = False) -> BoundDrafter:
    return draft_tree(TARGET.config, TARGET.params if exact else NEARBY, parents, draws)


@pytest.mark.parametrize(
    ("draws", "parents"),
    [("without-replacement", TREE), ("top-k", BUSH)],
)
def test_greedy_is_plain_decoding(draws: Draws, parents: tuple[int, ...]) -> None:
    decoder = Decoder(TARGET, drafter(draws, parents), batch_size=3)
    found = decoder.generate(requests())
    assert [done.token_ids for done in found] == [done.token_ids for done in plain()]
    accepted = sum(int(done.counts.accepted.sum()) for done in found)
    assert accepted > 20
    depth = int(trees.from_parents(parents).depths.max())
    for done in found:
        assert done.counts.emitted == NEW
        assert not done.counts.proposed[depth:].any()
        assert (done.counts.accepted <= done.counts.examined).all()


def test_the_end_of_the_context() -> None:
    for new in (1, 2, 60):
        found = Decoder(TARGET, drafter("top-k"), batch_size=5).generate(requests(new=new))
        assert [done.token_ids for done in found] == [done.token_ids for done in plain(new)]


def test_a_tree_accepts_more_than_its_chain() -> None:
    def rounds(bound: BoundDrafter, gamma: int | None = None) -> int:
        settings = None if gamma is None else SpeculationConfig(gamma)
        found = Decoder(TARGET, bound, settings).generate(requests())
        return sum(done.counts.rounds for done in found)

    assert rounds(drafter("top-k", (-1, 0, 0, 0, 1, 4))) < rounds(
        draft_model(TARGET.config, NEARBY), 3
    )


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    mixed = [*requests(0.8)[:3], *requests()[3:]]
    bound = drafter("without-replacement")
    together = Decoder(TARGET, bound, batch_size=8).generate(mixed)
    alone = Decoder(TARGET, bound, batch_size=1).generate(mixed)
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]


@pytest.mark.parametrize("draws", DRAWS)
def test_drafts_of_the_target_itself_are_all_accepted_in_some_order(draws: Draws) -> None:
    found = Decoder(TARGET, drafter(draws, exact=True)).generate(requests())
    depth = int(trees.from_parents(TREE).depths.max())
    assert sum(done.counts.rounds for done in found) <= 5 * -(-NEW // (depth + 1))


def test_a_tree_that_is_a_chain_is_verified_by_what_its_drafts_were_drawn_from() -> None:
    # q is p, so every draft is accepted, though none was certain.
    bound = drafter("independent", (-1, 0, 1), exact=True)
    found = Decoder(TARGET, bound).generate(requests(temperature=1.0))
    assert sum(done.counts.rounds for done in found) <= 5 * -(-NEW // 3)


def test_the_caches_hold_the_committed_tokens() -> None:
    check_caches(TARGET, drafter("top-k"), requests()[:4])


def test_another_tree_of_the_same_size_runs_the_same_program() -> None:
    first = Decoder(TARGET, drafter("top-k", TREE), batch_size=5)
    first.generate(requests())
    before = run_chunk._cache_size()  # type: ignore[attr-defined]
    wide, deep = (-1, *[0] * 7), tuple(range(-1, 7))
    for other in ((-1, 0, 0, 1, 1, 2, 2, 3), wide, deep):
        Decoder(TARGET, drafter("top-k", other), batch_size=5).generate(requests())
        assert run_chunk._cache_size() == before, other  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parents", "draws", "field"),
    [
        ((-1,), "top-k", "parents"),
        ((0, 1), "top-k", "parents"),
        ((-1, *[0] * (tiny.CONFIG.vocab_size + 1)), "top-k", "parents"),
        ((-1, 0), "any", "draws"),
    ],
)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...], draws: Draws, field: str) -> None:
    with pytest.raises(InputError) as caught:
        draft_tree(TARGET.config, TARGET.params, parents, draws)
    assert caught.value.field == field


def test_gamma_is_the_trees() -> None:
    with pytest.raises(InputError, match="not the 7 drafts of the drafter's tree"):
        Decoder(TARGET, drafter("top-k"), SpeculationConfig(4))
    with pytest.raises(InputError, match="is a rule for chains"):
        Decoder(TARGET, drafter("top-k"), SpeculationConfig(7, "block"))
