from __future__ import annotations

import numpy as np
import pytest

from experiments import low_acceptance
from jspec.metrics import Counts


def counts(rounds: int, proposed: int, accepted_rounds: int) -> Counts:
    """Rounds that propose so many drafts each, of which some rounds accept exactly one."""
    histogram = np.zeros((8, 8), np.int64)
    histogram[proposed, 0] = rounds - accepted_rounds
    histogram[proposed, min(proposed, 1)] += accepted_rounds
    return Counts(histogram, np.zeros(7), rounds + accepted_rounds, 0)


@pytest.mark.parametrize(
    ("given", "drafter", "expected"),
    [
        (counts(100, 4, 0), "ngram-2-3", "only 0.0 % of 400 drafts"),
        (counts(100, 4, 19), "draft-model-2l", "only 4.8 % of 400 drafts"),  # 19 / 400
        (counts(100, 4, 20), "draft-model-2l", None),  # 20 / 400 is the threshold
        (counts(100, 0, 0), "ngram-2-3", "proposed nothing in 100 rounds"),
        (counts(19, 4, 0), "ngram-2-3", None),  # too little evidence
        (counts(49, 1, 0), "ngram-2-3", None),
        (counts(50, 1, 0), "ngram-2-3", "only 0.0 % of 50 drafts"),
        (counts(100, 0, 0), None, None),  # plain decoding
    ],
)
def test_threshold(given: Counts, drafter: str | None, expected: str | None) -> None:
    warning = low_acceptance.warning(given, drafter)
    if expected is None:
        assert warning is None
    else:
        assert warning is not None
        assert expected in warning


@pytest.mark.parametrize(
    ("drafter", "cause"),
    [
        ("ngram-2-3", "repeats"),
        ("draft-model-6l", "tokenizer"),
        ("early-exit-4l", "too few layers"),
        ("medusa", "wrong head"),
    ],
)
def test_the_causes_are_those_of_the_drafter(drafter: str, cause: str) -> None:
    warning = low_acceptance.warning(counts(100, 7, 1), drafter)
    assert warning is not None
    assert warning.startswith("WARNING")
    assert cause in warning
