"""Plain-text tables, and figures as people read them."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "-"


def render(header: Sequence[str], rows: Sequence[Sequence[str]], *, total: bool = False) -> str:
    """Return a table: the first column to the left, the others to the right.

    Args:
        header: a title a column; a title may have several lines.
        rows: as many cells each.
        total: the last row sums up the others and is set apart.
    """
    titles = [title.split("\n") for title in header]
    depth = max(len(lines) for lines in titles)
    head = [[""] * (depth - len(lines)) + lines for lines in titles]
    lines_of_head = [[column[line] for column in head] for line in range(depth)]
    widths = [
        max(len(row[column]) for row in [*lines_of_head, *rows]) for column in range(len(header))
    ]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    body = [line(row) for row in rows]
    if total:
        body.insert(len(body) - 1, rule)
    return "\n".join([*(line(cells) for cells in lines_of_head), rule, *body])


def rate(tokens_per_second: float | None) -> str:
    """Return tokens a second to three digits, without the unit."""
    return MISSING if tokens_per_second is None else _digits(tokens_per_second)


def figure(value: float | None, scale: float = 1) -> str:
    """Return `value * scale` to three digits, without a unit."""
    return MISSING if value is None else _digits(value * scale)


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds to three digits."""
    return MISSING if seconds is None else f"{_digits(seconds * 1000)} ms"


def seconds(value: float) -> str:
    """Return a duration: 0.42 s, 4.2 s, 42 s, 1 min 42 s, 1 h 02 min."""
    if value < 1:
        return f"{value:.2f} s"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def percent(share: float | None) -> str:
    """Return a share of 1 as a percentage, a digit after the point below 10 %."""
    if share is None:
        return MISSING
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def ratio(value: float | None) -> str:
    """Return a ratio, as 1.83x."""
    return MISSING if value is None else f"{value:.2f}x"


def number(value: float | None) -> str:
    """Return a small figure with two digits after the point."""
    return MISSING if value is None else f"{value:.2f}"


def _digits(value: float) -> str:
    """Three digits, but never fewer than the whole part has."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
