from __future__ import annotations

import pytest

from experiments import tree_compare
from tests.experiments import tree_cases


def test_figures_are_totals_and_their_ratios() -> None:
    section = tree_cases.comparison()
    assert list(section["categories"]) == ["open_chat", "sql"]
    chat, total = section["categories"]["open_chat"], section["total"]
    assert chat["plain"]["block_efficiency"] == 1
    assert chat["chain 3"]["block_efficiency"] == pytest.approx(20 / 14)
    assert chat["tree 3"]["block_efficiency"] == pytest.approx(20 / 8)
    # Plain takes a second a token, the chain 1.25 and the tree 1.5 seconds a round.
    assert chat["chain 3"]["speedup"] == pytest.approx(20 / (14 * 1.25))
    assert chat["tree 3"]["speedup"] == pytest.approx(20 / (8 * 1.5))
    assert total["tree 3"]["speedup"] == pytest.approx(30 / (13 * 1.5))
    assert total["tree 3"]["tokens"] == 30
    assert (chat["tree 3"]["identical"], total["tree 3"]["identical"]) == (2, 2)


def test_the_table_exactly() -> None:
    section = tree_cases.comparison()
    assert tree_compare.text({"0": section}).splitlines()[:11] == [
        "Temperature 0: trees against chains of as many drafts",
        "",
        "           tokens/round          tree over    speed   speed",
        "category        chain 3  tree 3      chain  chain 3  tree 3",
        "---------  ------------  ------  ---------  -------  ------",
        "open_chat          1.43    2.50      1.75x    1.14x   1.67x",
        "sql                2.00    2.00      1.00x    1.60x   1.33x",
        "---------  ------------  ------  ---------  -------  ------",
        "all                1.58    2.31      1.46x    1.26x   1.54x",
        "",
        "Greedy output the same as plain decoding's: chain 3 3/3, tree 3 2/3 prompts.",
    ]
    assert "Greedy" not in tree_compare.text({"1": section})
