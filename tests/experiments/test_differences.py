"""Where outputs part, and how close the best logits are there."""

from __future__ import annotations

import math

import pytest

from experiments import differences
from jspec import Decoder, Request, SamplingParams
from tests import tiny

TARGET = tiny.model()


def test_the_first_difference() -> None:
    assert differences.first((1, 2, 3), (1, 2, 3)) is None
    assert differences.first((1, 2, 3), (1, 9, 3)) == 1
    # One that is a prefix of the other differs where it ends.
    assert differences.first((1, 2), (1, 2, 3)) == 2


def test_the_gap_is_that_of_the_two_best_logits() -> None:
    request = Request((5, 6, 7), SamplingParams(max_new_tokens=6))
    plain = Decoder(TARGET, batch_size=1)
    (done,) = plain.generate([request])
    other = (*done.token_ids[:4], done.token_ids[4] + 1)
    found = differences.between(plain, request, other, done.token_ids)
    assert found is not None
    assert found.place == 4
    oracle = tiny.to_numpy(TARGET.config, TARGET.params)
    _, gaps = oracle.greedy((*request.token_ids, *done.token_ids[:4]), 1)
    assert found.gap == pytest.approx(gaps[0], abs=1e-4)
    assert str(found).startswith("at token 4, where the two best logits are ")
    assert differences.between(plain, request, done.token_ids, done.token_ids) is None
    assert math.isfinite(found.gap)
