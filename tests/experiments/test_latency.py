from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import latency
from jspec.metrics import Counts, Timing
from jspec.requests import Completion


def completion(first: float, end: float, tokens: int) -> Completion:
    counts = Counts(np.zeros((2, 2), np.int64), np.zeros(1), tokens, 0)
    return Completion(
        tuple(range(tokens)), "", "length", None, counts, Timing(first / 2, first, end)
    )


def test_tpot_leaves_the_first_token_out() -> None:
    # 0.5 s to the first of 11 tokens, 2 s for the other ten: 0.2 s each.
    found = latency.summarise([completion(0.5, 2.5, 11)])
    assert found["ttft"] == {"samples": 1, "p50": 0.5, "p90": 0.5, "p99": 0.5}
    assert found["tpot"] == pytest.approx({"samples": 1, "p50": 0.2, "p90": 0.2, "p99": 0.2})
    assert found["end_to_end"]["p99"] == 2.5


def test_a_single_token_has_no_tpot() -> None:
    found = latency.summarise([completion(0.5, 0.5, 1), completion(0.5, 1.5, 3)])
    assert found["ttft"]["samples"] == 2
    assert found["tpot"]["samples"] == 1
    assert found["tpot"]["p50"] == pytest.approx(0.5)
    none = latency.summarise([completion(0.5, 0.5, 1)])["tpot"]
    assert none == {"samples": 0, "p50": None, "p90": None, "p99": None}


@given(
    st.lists(
        st.tuples(st.floats(0.01, 5), st.floats(0, 50), st.integers(2, 100)),
        min_size=1,
        max_size=30,
    )
)
def test_percentiles_are_numpys(requests: list[tuple[float, float, int]]) -> None:
    found = latency.summarise([completion(f, f + rest, n) for f, rest, n in requests])
    values = {
        "ttft": [f for f, _, _ in requests],
        "tpot": [(f + rest - f) / (n - 1) for f, rest, n in requests],
        "end_to_end": [f + rest for f, rest, _ in requests],
    }
    for name, times in values.items():
        assert found[name]["samples"] == len(times)
        expected = np.percentile(times, [50, 90, 99])
        np.testing.assert_allclose([found[name][p] for p in ("p50", "p90", "p99")], expected)


def test_the_table_shows_both_modes_and_the_samples() -> None:
    plain = latency.summarise([completion(0.25, 2.25, 11)] * 3)
    speculative = latency.summarise([completion(0.25, 1.25, 11)] * 2 + [completion(0.2, 0.2, 1)])
    header, rows = latency.cells([("4", {"plain": plain, "speculative": speculative})], "batch")
    assert len({len(header), *map(len, rows)}) == 1
    assert rows[0] == [*("4", "plain", "3"), *["250"] * 3, *["200"] * 3, *["2.25"] * 3]
    # One of the three has no TPOT.
    assert rows[1][:3] == ["", "speculative", "3/2"]
    assert rows[1][6] == "100"
    assert header[3] == "TTFT\np50 ms"
    assert header[-1] == "end-to-end\np99 s"
