"""A titled table of plain strings, for the page and for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from marlhf.errors import UserError
from marlhf.report.text import printable


@dataclass(frozen=True)
class Table:
    """Rows of plain strings under named columns; nothing in them is read as markup.

    The first column names the row. A column whose cells all begin like numbers is set flush right.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise UserError(
                    f"table {self.title!r} has {len(self.columns)} columns, but a row of {len(row)}: {list(row)}"
                )

    @property
    def numeric(self) -> list[bool]:
        """For each column, whether its cells are numbers."""
        return [
            position > 0 and bool(self.rows) and all(_is_number(row[position]) for row in self.rows)
            for position in range(len(self.columns))
        ]


def rich_table(table: Table) -> RichTable:
    """The table for a terminal, with every cell taken as text: no rich markup, no escape sequences."""
    shown = RichTable(
        title=Text(printable(table.title)),
        caption=Text(printable(table.caption)) if table.caption else None,
        box=box.SIMPLE_HEAD,
        caption_justify="left",
    )
    for name, numeric in zip(table.columns, table.numeric, strict=True):
        shown.add_column(Text(printable(name)), justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def _is_number(cell: str) -> bool:
    # A cell such as "1.23 [1.10, 1.36]", "[1.10, 1.36]" or "85%" is a number with something behind it.
    start = cell.strip().lstrip("+-\u2212\u00b1~<>=\u2248\u2264\u2265([ ")
    return start[:1].isdigit() or start in ("", "\u2013", "\u2014", "n/a")
