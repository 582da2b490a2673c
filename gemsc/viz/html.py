"""Pieces of an HTML page: tables, bars, cards; all text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Cell", "bar", "card", "cell", "link", "section", "table"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its HTML, and the number that it is sorted by, if any."""

    html: str
    value: float | None = None


def cell(shown: object, value: float | None = None) -> Cell:
    """Return a cell of plain text."""
    return Cell(escape(str(shown)), value)


def link(target: str, shown: str) -> Cell:
    """Return a cell that leads to a file beside the page."""
    return Cell(f'<a href="{escape(target)}">{escape(shown)}</a>')


def table(
    titles: Sequence[str], rows: Iterable[Sequence[Cell]], *, note: str = ""
) -> str:
    """Return a table whose columns sort when their titles are clicked."""
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in titles)
    body = []
    for row in rows:
        cells = []
        for each in row:
            number = each.value is not None
            mark = f' class="number" data-value="{each.value!r}"' if number else ""
            cells.append(f"<td{mark}>{each.html}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>'
        + "\n".join(body)
        + f"</tbody></table></div>{below}"
    )


def bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Return one bar of parts, each (name and figures, share of 1, CSS class)."""
    pieces = "".join(
        f'<span class="{kind}" style="width:{100 * share:.2f}%" '
        f'title="{escape(name)}"></span>'
        for name, share, kind in parts
        if share > 0
    )
    return f'<div class="bar">{pieces}</div>'


def card(name: str, figure: str, note: str = "") -> str:
    """Return a figure in large type with its name."""
    below = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<div class="card"><span>{escape(name)}</span>'
        f"<strong>{escape(figure)}</strong>{below}</div>"
    )


def section(anchor: str, title: str, *parts: str) -> str:
    """Return a part of the page with its heading."""
    inside = "\n".join(part for part in parts if part)
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>\n{inside}\n</section>'
