from __future__ import annotations

from collections.abc import Callable

import pytest

from experiments import tables


def test_a_table_is_aligned() -> None:
    table = tables.render(
        ["name", "tokens/s\nplain", "x"],
        [["a", "1.0", "yes"], ["longer", "123", "no"], ["all", "5", "1 of 2"]],
        total=True,
    )
    assert table.split("\n") == [
        "        tokens/s",
        "name       plain       x",
        "------  --------  ------",
        "a            1.0     yes",
        "longer       123      no",
        "------  --------  ------",
        "all            5  1 of 2",
    ]


@pytest.mark.parametrize(
    ("show", "value", "expected"),
    [
        (tables.rate, None, "-"),
        (tables.rate, 0.1234, "0.12"),
        (tables.rate, 9.996, "10.0"),
        (tables.rate, 20.26, "20.3"),
        (tables.rate, 99.96, "100"),
        (tables.rate, 1234.5, "1234"),
        (tables.milliseconds, 0.0412, "41.2 ms"),
        (tables.milliseconds, None, "-"),
        (tables.seconds, 0.42, "0.42 s"),
        (tables.seconds, 4.18, "4.2 s"),
        (tables.seconds, 9.96, "10 s"),
        (tables.seconds, 59.6, "1 min 00 s"),
        (tables.seconds, 102, "1 min 42 s"),
        (tables.seconds, 3725, "1 h 02 min"),
        (tables.percent, 0.0, "0 %"),
        (tables.percent, 0.029, "2.9 %"),
        (tables.percent, 0.0996, "10 %"),
        (tables.percent, 1.0, "100 %"),
        (tables.percent, None, "-"),
        (tables.ratio, 1.826, "1.83x"),
        (tables.number, None, "-"),
    ],
)
def test_figures_have_sensible_digits(
    show: Callable[[float | None], str], value: float | None, expected: str
) -> None:
    assert show(value) == expected
