"""Tables for the page and the terminal."""

import io

import pytest
from rich.console import Console

from marlhf.errors import UserError
from marlhf.report import Table, rich_table
from tests.trainer.report.folders import HOSTILE


def test_columns_of_numbers_are_told_from_columns_of_words():
    table = Table(
        "t",
        ["2024", "score", "interval", "share", "missing", "word", "mixed"],
        [
            ["1", "-0.4", "[-0.5, -0.3]", "95%", "-", "n", "1"],
            ["2", "\u22120.4 \u00b1 0.1", "(0.1, 0.2)", "> 5%", "1.5", "3rd", "word"],
        ],
    )
    assert table.numeric == [False, True, True, True, True, False, False]
    assert Table("t", ["a", "b"], []).numeric == [False, False]


def test_a_row_of_another_width_is_refused():
    with pytest.raises(UserError, match="2 columns, but a row of 1"):
        Table("t", ["a", "b"], [["1", "2"], ["1"]])


def test_the_terminal_shows_markup_and_escape_sequences_as_text():
    output = io.StringIO()
    table = Table("[red]title", ["[bold]a", "b"], [["[/x]", "\x1b[31m1"], [HOSTILE, "2"]], caption="[link=x]c")
    Console(file=output, width=400, force_terminal=False).print(rich_table(table))
    shown = output.getvalue()
    for text in ("[red]title", "[bold]a", "[/x]", "[U+001B][31m1", "</script><script>", "[link=x]c"):
        assert text in shown
    assert "\x1b" not in shown
    assert "\0" not in shown
    shown.encode("utf-8")
