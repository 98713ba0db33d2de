from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import batch_results

COUNTERS = {
    "rounds": 2,
    "rounds_without_draft": 0,
    "proposed": 6,
    "accepted": 1,
    "examined": 3,
    "emitted": 3,
    "discarded": 0,
    "block_efficiency": 1.5,
    "acceptance_rate": 0.25,
    "mean_overlap": None,
}
SAMPLE = {
    "text": "abc",
    "token_ids": [1, 2, 3],
    "finish_reason": "length",
    "stop_reason": None,
    "counters": COUNTERS,
    "timing": {"prefill": 0.1, "first": 0.2, "end": 0.3},
}
ANSWER = SAMPLE | {"prompt_tokens": 5}
HEAD = {"index": 0, "id": 7, "error": None, "seed": 1}
NOTHING: dict[str, Any] = {
    "text": "",
    "token_ids": [],
    "finish_reason": "error",
    "stop_reason": None,
    "counters": None,
    "timing": None,
    "prompt_tokens": None,
}
# A line of every kind, as docs/batch_jobs.md has them.
LINES: dict[str, dict[str, Any]] = {
    "answer": HEAD | {"category": "math"} | ANSWER,
    "samples": HEAD | {"samples": [SAMPLE, SAMPLE], "finish_reason": "stop", "prompt_tokens": 5},
    "turns": HEAD | {"finish_reason": "stop", "turns": [ANSWER, ANSWER]},
    "unread": HEAD | NOTHING | {"error": "row='{' is not JSON", "seed": None},
    "no turn": HEAD | {"error": "too long", "finish_reason": "error", "turns": []},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        yield (*path, name)
        if isinstance(item, dict | list):
            yield from places(item, (*path, name))


@pytest.mark.parametrize("kind", LINES)
def test_a_line_of_every_kind_is_whole(kind: str) -> None:
    assert batch_results.is_whole(LINES[kind])
    batch_results.Totals().add(LINES[kind])


@pytest.mark.parametrize("kind", LINES)
def test_a_line_without_one_of_its_fields_is_not(kind: str) -> None:
    # The journal looks at the index; what was copied from the row may be anything. A line without
    # its list of samples or turns has no answer either.
    for path in places(LINES[kind]):
        if path[0] in ("index", "category") or type(path[-1]) is int or "timing" in path[:-1]:
            continue
        line = copy.deepcopy(LINES[kind])
        inner: Any = line
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        assert not batch_results.is_whole(line), path


@pytest.mark.parametrize("kind", ["answer", "samples", "turns"])
def test_one_lossy_answer_makes_the_job_lossy(kind: str) -> None:
    line = copy.deepcopy(LINES[kind])
    totals = batch_results.Totals()
    totals.add(line)
    assert totals.summary()["lossless"] is True  # as jobs begun before the rule existed
    given = line.get("turns", [line])[-1]
    given.get("samples", [given])[-1]["lossless"] = False
    totals.add(line)
    assert totals.summary()["lossless"] is False


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 1 << 63, -1])
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@given(st.sampled_from(sorted(LINES)), st.data())
def test_what_is_whole_can_be_summed_up(kind: str, data: st.DataObject) -> None:
    line = copy.deepcopy(LINES[kind])
    path = data.draw(st.sampled_from(list(places(line))))
    inner: Any = line
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = data.draw(JSON)
    if batch_results.is_whole(line):
        totals = batch_results.Totals()
        totals.add(line)
        totals.add(line)
        json.dumps(totals.summary())
