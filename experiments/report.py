"""Sections of tables and sentences, as text for a terminal and as one self-contained page."""

from __future__ import annotations

import base64
import dataclasses
import html
import textwrap
from collections.abc import Mapping, Sequence

from experiments import tables

_WIDTH = 100  # columns of a sentence
_STYLE = """\
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem;line-height:1.2}
h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
.result{font-size:1.1rem;max-width:60rem}
.note{color:#555;font-size:.9rem;max-width:60rem;margin:.4rem 0}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
.wide{grid-template-columns:1fr}
img{width:100%;height:auto}
.table{overflow-x:auto}
table{border-collapse:separate;border-spacing:0;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .45rem;text-align:right;white-space:nowrap;border-bottom:1px solid #ddd}
th{vertical-align:bottom;border-bottom:1px solid #888}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:#fff}
.total tr:last-child{font-weight:600}
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A table with a title and what there is to say about it.

    Attributes:
        title: in a few words.
        header: a title a column; a title may have several lines.
        rows: as many cells each.
        notes: sentences below.
        total: the last row sums up the others.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...]
    total: bool = False


def text(sentences: Sequence[str], sections: Sequence[Section]) -> str:
    """Return all of it for a terminal.

    Args:
        sentences: above the tables.
        sections: in order.
    """
    parts = ["\n".join(textwrap.fill(sentence, _WIDTH) for sentence in sentences)]
    for section in sections:
        parts.append(
            "\n".join(
                [
                    f"{section.title}\n",
                    tables.render(section.header, section.rows, total=section.total),
                    *(textwrap.fill(note, _WIDTH) for note in section.notes),
                ]
            )
        )
    return "\n\n\n".join(parts)


def page(
    title: str,
    heading: str,
    results: Sequence[str],
    note: str,
    pictures: Mapping[str, bytes],
    sections: Sequence[Section],
    *,
    wide: bool = False,
) -> str:
    """Return a page that needs no other file.

    Args:
        title: of the window.
        heading: on top.
        results: what was found, a sentence each.
        note: what was measured where and when.
        pictures: PNG files by what they show.
        sections: in order.
        wide: pictures stand below each other, as wide as the page.
    """
    images = "".join(
        f'<img alt="{html.escape(shown)}" '
        f'src="data:image/png;base64,{base64.b64encode(picture).decode("ascii")}">'
        for shown, picture in pictures.items()
    )
    result = "".join(f'<p class="result">{html.escape(text)}</p>' for text in results)
    shown_tables = "".join(map(_section, sections))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(heading)}</h1>{result}"
        f'<p class="note">{html.escape(note)}</p>'
        f'<div class="pictures{" wide" if wide else ""}">{images}</div>{shown_tables}'
        "</body></html>\n"
    )


def _section(section: Section) -> str:
    rows = [_row(section.header, "th"), *(_row(cells, "td") for cells in section.rows)]
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in section.notes)
    kind = "table total" if section.total else "table"
    return (
        f'<h2>{html.escape(section.title)}</h2><div class="{kind}"><table>{"".join(rows)}</table>'
        f"</div>{notes}"
    )


def _row(cells: Sequence[str], tag: str) -> str:
    inner = (html.escape(cell).replace("\n", "<br>") for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in inner)}</tr>"
