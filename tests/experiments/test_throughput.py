from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest

import jspec
from experiments import throughput
from experiments.status import Status
from experiments.throughput import Turn
from experiments.workloads import Workload
from jspec.errors import InputError
from jspec.metrics import Counts, Timing
from jspec.requests import Completion, Request
from tests import tiny


def row(end: float, tokens: int = 4, prefill: float = 1.0, first_token: int = 0) -> Completion:
    """Return a row whose every second round had a draft, which was accepted."""
    counts = Counts(np.array([[2, 0], [0, 1]]), np.zeros(1), tokens, 0)
    ids = tuple(range(first_token, first_token + tokens))
    return Completion(ids, "", "length", None, counts, Timing(prefill, prefill + 0.1, end))


def test_prompts_come_from_the_categories_in_turn() -> None:
    texts = [
        ("qa", "aa"),
        ("qa", "a"),
        ("sql", "b"),
        ("qa", "ccccc"),
        ("qa", "d"),
        ("rag", "e" * 9),
    ]
    found = [Workload(str(i), category, text) for i, (category, text) in enumerate(texts)]

    def chosen(count: int, longest: int) -> list[str]:
        prompts = throughput.choose(
            lambda text: tuple(map(ord, text)), found, count=count, longest=longest
        )
        assert all(ids == tuple(map(ord, workload.prompt)) for workload, ids in prompts)
        return [workload.question_id for workload, _ in prompts]

    assert chosen(3, 9) == ["0", "2", "5"]
    # One that is too long gives way to the next of its category, or to the other categories.
    assert chosen(3, 4) == ["0", "2", "1"]
    assert chosen(9, 4) == ["0", "2", "1", "4"]
    with pytest.raises(InputError, match="throughput_prompt_tokens=0 leaves no prompt"):
        chosen(1, 0)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(1, ["a", "b", "c"]), (2, ["ab", "ca"]), (3, ["abc"]), (4, ["abca"]), (7, ["abcabca"])],
)
def test_groups_are_full(batch: int, expected: list[str]) -> None:
    requests = [Request((ord(letter),)) for letter in "abc"]
    groups = throughput.groups(requests, batch)
    assert ["".join(chr(r.token_ids[0]) for r in group) for group in groups] == expected


def test_a_batch_lasts_until_its_slowest_row() -> None:
    # Prefill 1 s. Plain: 8 tokens in 3 s and 8 in 1 s. Speculative: 8 in 1.5 s and 8 in 0.5 s.
    turn = Turn(
        plain=((row(4.0), row(3.0)), (row(2.0), row(2.0))),
        speculative=((row(1.5), row(2.5)), (row(1.5), row(1.5, first_token=1))),
    )
    found = throughput.figures([turn])
    assert found["plain_tokens_per_second"] == pytest.approx(16 / 4)
    assert found["speculative_tokens_per_second"] == pytest.approx(16 / 2)
    assert found["speedup"] == pytest.approx(2)
    assert found["plain_tokens_per_second_with_prefill"] == pytest.approx(16 / 6)
    assert found["speculative_tokens_per_second_with_prefill"] == pytest.approx(16 / 4)
    assert found["speedup_with_prefill"] == pytest.approx(1.5)
    assert (found["identical"], found["rows"]) == (3, 4)
    assert found["block_efficiency"] == pytest.approx(4 / 3)
    assert found["acceptance_rate"] == 1
    assert found["latency"]["plain"]["end_to_end"]["samples"] == 4
    assert found["latency"]["plain"]["end_to_end"]["p50"] == pytest.approx(2.5)
    assert found["latency"]["speculative"]["tpot"]["p99"] == pytest.approx(
        np.percentile([0.4 / 3, 1.4 / 3, 0.4 / 3, 0.4 / 3], 99)
    )


def test_figures_are_medians_and_ratios_go_turn_by_turn() -> None:
    # A slow spell doubles both times of the second turn, which leaves its ratio alone.
    turns = [
        Turn(((row(1 + plain),),), ((row(1 + speculative),),))
        for plain, speculative in ((1, 1), (8, 4), (4, 1))
    ]
    found = throughput.figures(turns)
    assert found["plain_tokens_per_second"] == pytest.approx(1)  # of 4, 0.5, 1
    assert found["plain_range"] == pytest.approx([0.5, 4])
    assert found["speculative_tokens_per_second"] == pytest.approx(4)  # of 4, 1, 4
    assert found["speedup"] == pytest.approx(2)  # of 1, 2, 4
    assert found["speedup_range"] == pytest.approx([1, 4])
    written = list(throughput.lines({2: turns}))
    assert [(x["batch"], x["repeat"], x["mode"]) for x in written[:3]] == [
        (2, 0, "plain"),
        (2, 0, "speculative"),
        (2, 1, "plain"),
    ]
    assert written[2]["end"] == [9]
    assert written[2]["tokens"] == [4]
    assert written[2]["rounds"] == [3]


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        # Half the way in log(batch): between 1 and 4 that is 2.
        ({1: 1.5, 4: 0.5}, [(1, 4, 2.0)]),
        ({2: 2.0, 8: 1.25, 16: 0.75}, [(8, 16, 8 * 2**0.5)]),
        ({1: 0.9, 2: 1.1, 4: 0.9}, [(1, 2, 2**0.5), (2, 4, 2 * 2**0.5)]),
        # Exactly 1 counts as not lost, and the crossing lies there.
        ({1: 2.0, 2: 1.0, 4: 0.5}, [(2, 4, 2.0)]),
        ({1: 1.4, 2: 1.2, 4: 1.1}, []),
        ({1: 0.9, 2: 0.7}, []),
        ({8: 1.2}, []),
    ],
)
def test_where_the_speedup_crosses_one(
    speedups: dict[int, float], expected: list[tuple[int, int, float]]
) -> None:
    found = throughput.crossings(speedups)
    assert [(c["after"], c["before"]) for c in found] == [(a, b) for a, b, _ in expected]
    assert [c["batch"] for c in found] == pytest.approx([batch for *_, batch in expected])


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ({1: 1.5, 4: 0.5}, "1.50x at batch 1 and 0.50x at batch 4; it crosses 1 between batches 1"),
        ({1: 1.5, 4: 1.2}, "at least 1 at every batch measured, so it crosses 1 nowhere"),
        ({1: 0.5, 4: 0.2}, "below 1 at every batch measured, so it crosses 1 nowhere"),
        ({4: 1.25}, "1.25x at batch 4;"),
    ],
)
def test_the_verdict_says_where_or_that_it_does_not(speedups: dict[int, float], words: str) -> None:
    section = {
        "prompts": ["1", "2"],
        "batches": {str(batch): {"speedup": speedup} for batch, speedup in speedups.items()},
        "crossings": throughput.crossings(speedups),
    }
    assert words in throughput.verdict(section)


def test_measuring_decodes_all_prompts_in_every_turn() -> None:
    target = tiny.model()
    sampling = jspec.SamplingParams(max_new_tokens=6, ignore_eos=True, seed=1)
    requests = [Request((token, token + 1, token, token + 1), sampling) for token in (3, 5, 7)]
    speculation = jspec.SpeculationConfig(gamma=2, rounds_per_chunk=8)

    def decoders(batch: int) -> tuple[jspec.Decoder, jspec.Decoder]:
        plain = dataclasses.replace(speculation, gamma=0)
        return (
            jspec.Decoder(target, None, plain, batch_size=batch),
            jspec.Decoder(target, jspec.ngram(), speculation, batch_size=batch),
        )

    turns = throughput.measure(decoders, requests, [2], 3, Status(io.StringIO()))
    a, b, c = (done.token_ids for done in decoders(2)[0].generate(requests))
    assert len(a) == len(b) == len(c) == 6
    assert list(turns) == [2]
    assert len(turns[2]) == 3
    for turn in turns[2]:
        # Greedily, a drafter changes rounds and nothing else.
        for mode in (turn.plain, turn.speculative):
            assert [[done.token_ids for done in group] for group in mode] == [[a, b], [c, a]]
        assert all(done.counts.proposed.sum() == 0 for group in turn.plain for done in group)
