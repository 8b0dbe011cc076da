"""The picture and the page."""

from pathlib import Path

from benchmarks import plot
from tests.benchmarks.rows import rival, row

ROWS = [
    row(4_000.0),
    rival("eager", 50_000.0),
    rival("liger", status="cannot run", reason="no <GPU>"),
    row(80.0, op="macro_gae", options="fixed 5", shape="64x512"),
    rival("loop", 90_000.0, op="macro_gae", options="fixed 5", shape="64x512"),
]


def test_every_time_is_a_bar_in_the_panel_of_its_op() -> None:
    panels = plot.figure(ROWS).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["token_logprobs", "macro_gae"]
    assert [[bar.get_width() for bar in axes.patches] for axes in panels] == [[4_000.0, 50_000.0], [80.0, 90_000.0]]


def test_the_files_and_what_the_page_needs(tmp_path: Path) -> None:
    png, page_path = tmp_path / "run.png", tmp_path / "run.html"
    plot.draw(ROWS, png, page_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    page = page_path.read_text(encoding="utf-8")
    assert "<svg" in page
    assert "no &lt;GPU&gt;" in page
    for outside in ("src=", "@import", "<script", "<link"):
        assert outside not in page


def test_a_run_without_times_is_drawn_too(tmp_path: Path) -> None:
    plot.draw(ROWS[2:3], tmp_path / "run.png", tmp_path / "run.html")
    assert "cannot run" in (tmp_path / "run.html").read_text(encoding="utf-8")
