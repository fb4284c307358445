"""Tables that fit the terminal: the narrower it is, the fewer columns."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_FILE_WIDTH = 160


@dataclass(slots=True, frozen=True)
class Columns:
    """Columns by their titles, in order: `texts` are flush left, `wraps` may take several lines."""

    titles: Sequence[str]
    texts: Collection[str]
    wraps: str
    expendable: Sequence[str]
    """What a narrow terminal does without, the first first."""


def terminal() -> "Console":
    """A terminal as wide as it is; a file or a pipe as wide as a table may get."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def fitted(columns: Columns, rows: Iterable[Mapping[str, str]], width: int) -> "Table":
    """As many columns as fit with every word whole; a row: markup by title."""
    from rich.console import Console

    measuring, listed = Console(width=_FILE_WIDTH), list(rows)
    for count in range(len(columns.expendable) + 1):
        table = _table(columns, columns.expendable[:count], listed)
        if measuring.measure(table).minimum <= width:
            break
    return table


def _table(columns: Columns, left_out: Collection[str], rows: Sequence[Mapping[str, str]]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    titles = [title for title in columns.titles if title not in left_out]
    for title in titles:
        wraps = title == columns.wraps
        whole = None if wraps else max((Text.from_markup(row[title]).cell_len for row in rows), default=0)
        justify: Literal["left", "right"] = "left" if title in columns.texts else "right"
        table.add_column(title, justify=justify, no_wrap=not wraps, min_width=whole)
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table
