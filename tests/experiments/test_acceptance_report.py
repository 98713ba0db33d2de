from __future__ import annotations

import io
import xml.etree.ElementTree
from typing import Any

import pytest
from matplotlib import image

from experiments import acceptance_plot, acceptance_report, acceptance_speed, report, tree_plot
from experiments.acceptance_measure import Measured
from experiments.tree_compare import Result
from experiments.workloads import Workload
from tests.experiments import acceptance_cases, pages, tree_cases


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    return acceptance_cases.measured("eagle3", 0.0)


def test_figures_of_hand_made_counts(measured: list[Measured]) -> None:
    section = acceptance_report.summarise(measured)
    sql, total = section["categories"]["sql"], section["total"]
    # Rounds of sql: none drafted, 0, 1, 2, 2 of 2 accepted: 1 + 1 + 2 + 3 + 3 tokens.
    assert sql["block_efficiency"] == pytest.approx(10 / 5)
    # First draft examined in 4 rounds, accepted in 3; second in those 3, accepted in 2. A gamma of
    # 4 whose third draft was never made has no third rate.
    assert sql["conditional_rates"] == pytest.approx([3 / 4, 2 / 3])
    assert sql["mean_overlap"] == pytest.approx(5 / 7)
    assert sql["forced_overlap"] == pytest.approx((0.5 + 0 + 0.9 + 0.8) / 4)
    assert sql["forced_overlap_where_drafted"] == pytest.approx((0.5 + 0.9 + 0.8) / 3)
    assert sql["drafted_share"] == 0.75
    assert total["conditional_rates"] == pytest.approx([4 / 8, 2 / 3])
    math = section["categories"]["math_reasoning"]
    assert math["block_efficiency"] == pytest.approx(5 / 4)
    assert section["mean"]["block_efficiency"] == pytest.approx((2 + 1.25) / 2)
    assert section["worst"] == {"category": "math_reasoning", "block_efficiency": 1.25}
    assert total["identical"] == 2
    assert total["differences"] == [{"question_id": "3", "place": 4, "gap": 2e-6}]


def test_the_line_of_a_request(measured: list[Measured]) -> None:
    line = measured[0].line()
    assert line["identical"] is True
    assert line["forced_overlap"] == 0.5
    assert (line["forced_positions"], line["forced_drafted"]) == (2, 1)
    assert line["conditional_rates"] == [0.5, 0.0, None, None]
    assert acceptance_cases.measured("eagle3", 0.7)[2].line()["identical"] is None
    assert measured[2].line()["difference"] == {"place": 4, "gap": 2e-6}


def rows(summary: dict[str, Any], title: str) -> list[list[str]]:
    (found,) = [s for s in acceptance_report.sections(summary) if s.title.startswith(title)]
    return found.rows


def test_tables() -> None:
    summary = acceptance_cases.summary(["eagle3", "ngram"])
    assert rows(summary, "Temperature 0: tokens")[0] == ["eagle3", "1.62", "1.25", "2.00", "1.25"]
    assert rows(summary, "Temperature 0.7: sum min(p, q), teacher")[1] == [
        *("ngram", "0.43", "80 %", "0.63", "0.55", "0.31")
    ]
    assert rows(summary, "Temperature 0: sum min(p, q) at")[0] == [
        *("eagle3", "0.48", "0.71", "0.25")
    ]
    assert rows(summary, "Temperature 0: accepted")[:3] == [
        ["eagle3", "all", "50 %", "67 %"],
        ["", "sql", "75 %", "67 %"],
        ["", "math_reasoning", "25 %", "-"],
    ]
    assert rows(summary, "Temperature 0: output") == [
        ["eagle3", "2/3", "2e-06", "3:4"],
        ["ngram", "2/3", "2e-06", "3:4"],
    ]
    assert rows(summary, "Temperature 0: speed") == [
        ["eagle3", "1.00x", "0.75x", "1.25x", "1.25x", "0.75x"]
    ]
    assert rows(summary, "Memory")[0] == [
        *("eagle3", "2.00 MB", "2.0 %", "10.0 MB", "10 %", "0.50 MB", "3.0 %")
    ]


def test_the_text_begins_with_the_result() -> None:
    summary = acceptance_cases.summary(["eagle3"])
    headline = acceptance_report.headline(summary)
    assert headline[0].endswith(
        "1.62 tokens a round averaged over categories, 1.25 on the worst (math_reasoning)."
    )
    assert "1.00x plain decoding's speed" in headline[2]
    assert "2 of 3 cases" in headline[3]
    assert "at most 2e-06 apart" in headline[3]
    text = report.text([*headline, summary["setting"]], acceptance_report.sections(summary))
    assert text.startswith("Temperature 0: eagle3 commits most")
    assert "a_i / a_(i-1)" in text


def test_pictures_and_page() -> None:
    summary = acceptance_cases.summary([f"drafter-{index}@dynamic:16" for index in range(9)])
    # One that never drafts on a category.
    idle = summary["acceptance"]["0"]["drafter-0@dynamic:16"]["categories"]["sql"]
    idle |= {"conditional_rates": [], "mean_overlap": None}
    shown = {}
    for stem, (words, figure) in acceptance_plot.pictures(summary).items():
        files = tree_plot.files(figure, stem)
        shown[words] = files[f"{stem}.png"]
        picture = image.imread(io.BytesIO(shown[words]), "png")
        assert picture.min() < picture.max()
        drawn = files[f"{stem}.svg"].decode()
        xml.etree.ElementTree.fromstring(drawn)
        named = range(1) if stem == "speed" else range(9)
        assert all(f"<!-- drafter-{index}@dynamic:16 -->" in drawn for index in named)
    assert len(shown) == 5  # tokens a round, overlap, rates at two temperatures, speed
    page = report.page(
        "title",
        "a < b",
        acceptance_report.headline(summary),
        summary["setting"],
        shown,
        acceptance_report.sections(summary),
    )
    assert pages.pictures(page) == list(shown.values())
    assert ["drafter-0@dynamic:16", "1.62", "1.25", "2.00", "1.25"] in pages.Reader(page).rows
    assert "<h1>a &lt; b</h1>" in page


def test_speed_is_a_median_of_medians() -> None:
    # Plain decodes 10 tokens in 10 s; the drafter in 5, 4 and 8 s, or in 20 s.
    def result(question: str, category: str, seconds: float) -> Result:
        done = {
            "plain": tree_cases.completion(10, 10, 10.0),
            "eagle3": tree_cases.completion(5, 10, seconds),
        }
        return Result(Workload(question, category, "p"), done)

    results = [result("1", "sql", seconds) for seconds in (5.0, 4.0, 8.0)]
    results += [result("2", "qa", 20.0), result("3", "sql", 2.5)]
    section = acceptance_speed.summarise(results)["eagle3"]
    assert section["categories"]["sql"] == {"prompts": 2, "speedup": 3.0, "range": [2.0, 4.0]}
    assert section["categories"]["qa"]["speedup"] == 0.5
    assert section["total"]["speedup"] == 2.0
    assert section["mean"] == 1.75
    assert section["worst"] == {"category": "qa", "speedup": 0.5}
    assert section["repeats"] == 3
