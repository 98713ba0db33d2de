from __future__ import annotations

import pytest

from experiments import bench_page, bench_report
from tests import bench_summary
from tests.experiments import pages


@pytest.fixture
def page() -> str:
    summary = bench_summary.make({1: 1.5, 2: 0.8}, {"sql": 2.0, "<script>": 0.5})
    return bench_page.page(summary, {"one": b"first", 'two "quoted"': b"second"})


def test_everything_is_inside(page: str) -> None:
    assert pages.pictures(page) == [b"first", b"second"]


def test_it_shows_every_section(page: str) -> None:
    reader = pages.Reader(page)
    assert ["sql", "40.0", "80.0", "2.00x", "2.10x", "1.28", "42 %", "2/2"] in reader.rows
    # Throughput at batch 2: 80 tokens/s times 0.8.
    assert ["2", "80.0", "64.0", "0.80x", "0.72 - 0.88", "60.0", "48.0"] in [
        row[:7] for row in reader.rows
    ]
    latency = ["1", "plain", "16", *("250", "500", "750") * 2, *("0.25", "0.50", "0.75")]
    assert latency in reader.rows
    assert "it crosses 1 between batches 1 and 2" in page
    assert "<script>" not in page


def test_the_terminal_says_the_same() -> None:
    summary = bench_summary.make({1: 1.5, 2: 0.75}, {"sql": 2.0})
    text = bench_report.text(summary)
    for words in (
        "1.50x at batch 1 and 0.75x at batch 2; it crosses 1 between batches 1 and 2",
        "Block efficiency: ",
        "Acceptance: ",
        "TPOT: (end-to-end - TTFT) / (tokens - 1)",
    ):
        assert words in " ".join(text.split())
    titles = [section.title for section in bench_report.sections(summary)]
    assert len(set(titles)) == 5
    assert all(title in text for title in titles)
    assert text.index("a model, a machine, a day") < text.index(titles[0])
