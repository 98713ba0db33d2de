from __future__ import annotations

import math

import numpy as np
import pytest

from experiments import results
from experiments.results import Measured
from jspec.metrics import Counts, Timing
from jspec.requests import Completion


def measured(index: int, tokens: int, first: int, begin: float, end: float) -> Measured:
    histogram = np.zeros((2, 2), np.int64)
    histogram[1, 1] = tokens // 2
    counts = Counts(histogram, np.zeros(1), tokens, 0)
    timing = Timing(begin / 2, begin, end)
    completion = Completion(tuple(range(tokens)), "", "length", None, counts, timing)
    return Measured(index, 10, first, completion)


def test_the_rate_leaves_the_first_round_out() -> None:
    # Batch 1: 9 + 7 late tokens in 4 s after its first round at 2 s. Batch 2: 4 in 1 s.
    found = [
        measured(0, 10, 1, 2.0, 6.0),
        measured(1, 10, 3, 2.0, 5.0),
        measured(2, 6, 2, 1.0, 2.0),
    ]
    assert results.tokens_per_second(found, batch_size=2) == pytest.approx(20 / 5)


def test_requests_of_one_round_have_no_rate() -> None:
    assert results.tokens_per_second([measured(0, 1, 1, 1.0, 1.0)], batch_size=4) is None


def test_quantiles_skip_what_is_unknown() -> None:
    assert results.quantile([3.0, None, 1.0, math.nan], 0.5) == 2.0
    assert results.quantile([None], 0.5) is None


def test_a_summary_adds_up() -> None:
    summary = results.summary([measured(0, 10, 1, 2.0, 6.5), measured(1, 20, 1, 2.0, 21.0)])
    assert summary["requests"] == 2
    assert summary["prompt_tokens"] == 20
    assert summary["generated_tokens"] == 30
    assert summary["rounds"] == 15
    assert summary["block_efficiency"] == 2.0
    assert summary["tpot_p50"] == pytest.approx((4.5 / 9 + 19 / 19) / 2)
    assert summary["finish_reasons"] == {"length": 2}
