"""`python -m benchmarks.plot RUN.csv`: the times as a picture, and as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
import html
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.results import BANDWIDTH, COLUMNS, OK, Row, read
from benchmarks.table import duration

COLOURS = {
    "marlhf:cpu": "#0b9469",
    "marlhf in place:cpu": "#66c2a5",
    "marlhf:gpu": "#0b9469",
    "marlhf in place:gpu": "#66c2a5",
    "marlhf:reference": "#2b7bd4",
    "marlhf in place:reference": "#8fb9e8",
    "eager": "#7c828b",
    "compile": "#d9600a",
    "compile:reference": "#f2a66b",
    "trl": "#9c7a1c",
    "loop": "#c2569a",
    "torch": "#c4485a",
    "liger": "#7a6be0",
    "cce": "#4b8a9c",
}
OTHER_COLOUR = "#1d2430"
_INK, _SOFT_INK, _GRID = "#1d2430", "#5b6472", "#e3e7ec"
BAR, GAP = 0.20, 0.34
"""Inches of a bar, and between two cases."""
WIDTH, FRAME, TITLE = 7.0, 0.75, 0.5
"""Inches of a column, above and below a panel together, and of the title."""

_Cases = dict[str, list[Row]]
_Placed = tuple[str, float, _Cases]


def figure(rows: Sequence[Row]) -> Figure:
    """Bars of the times of every case, a panel for each op in two columns, the logarithm of the time to the right."""
    columns = _columns({op: (_height(cases), cases) for op, cases in _panels(rows).items()})
    tallest = max(sum(height + FRAME for _, height, _ in column) for column in columns)
    drawn = Figure(figsize=(2 * WIDTH, tallest + TITLE), dpi=100, facecolor="white")
    FigureCanvasAgg(drawn)
    total = tallest + TITLE
    for left, column in zip((0.0, 0.5), columns, strict=True):
        top = total - TITLE
        for op, height, cases in column:
            top -= height + FRAME
            place = (left + 0.02, (top + FRAME / 2) / total, 0.46, height / total)
            _panel(drawn.add_axes(place), op, cases)
    for first in rows[:1]:
        told = f"Time of a call: {first.device}, torch {first.torch}, commit {first.commit}"
        drawn.text(0.02, 1 - 0.3 / total, told, fontsize=12, color=_INK)
    return drawn


def _columns(panels: dict[str, tuple[float, _Cases]]) -> tuple[list[_Placed], list[_Placed]]:
    """Each panel into the column that is shorter so far."""
    columns: tuple[list[_Placed], list[_Placed]] = ([], [])
    heights = [0.0, 0.0]
    for op, (height, cases) in panels.items():
        shorter = heights.index(min(heights))
        columns[shorter].append((op, height, cases))
        heights[shorter] += height + FRAME
    return columns


def page(rows: Sequence[Row]) -> str:
    """The picture as vectors, and every row below it."""
    picture = io.StringIO()
    figure(rows).savefig(picture, format="svg", metadata={"Date": None})
    drawing = picture.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "\n".join(f'<tr class="{row.status.replace(" ", "-")}">{_cells(row)}</tr>' for row in rows)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>marlhf benchmarks</title><style>\n"
        "body{font:14px system-ui,sans-serif;color:#1d2430;margin:2rem}svg{max-width:100%;height:auto}\n"
        "div{overflow-x:auto}table{border-collapse:collapse;font-size:12px}td,th{padding:2px 8px;"
        "border-bottom:1px solid #e3e7ec;white-space:nowrap;text-align:left}.wrong{color:#b3261e}"
        ".cannot-run{color:#7c828b}\n</style></head><body>\n<h1>marlhf benchmarks</h1>\n"
        f"{drawing}\n<h2>Every row</h2>\n<div><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n"
        "</tbody></table></div></body></html>\n"
    )


def _panels(rows: Sequence[Row]) -> dict[str, _Cases]:
    """Op, then case, then its rows that have a time, the fastest first."""
    panels: dict[str, _Cases] = {}
    for row in rows:
        if row.status == OK and row.op != BANDWIDTH and row.time_us is not None:
            panels.setdefault(row.op, {}).setdefault(_label(row), []).append(row)
    return {
        op: {label: sorted(found, key=lambda row: row.time_us or 0.0) for label, found in cases.items()}
        for op, cases in panels.items()
    }


def _label(row: Row) -> str:
    threads = "" if row.threads is None else f"{row.threads} thread" + ("s" if row.threads > 1 else "")
    metric = "" if row.metric == "call" else row.metric
    words = (row.options, row.shape, row.dtype, row.mode, threads, metric)
    return ", ".join(word for word in words if word)


def _height(cases: _Cases) -> float:
    return sum(BAR * len(found) + GAP for found in cases.values())


def _panel(axes: Axes, op: str, cases: _Cases) -> None:
    fastest = min(row.time_us or 0.0 for found in cases.values() for row in found)
    slowest = max(row.time_us or 0.0 for found in cases.values() for row in found)
    y = 0.0
    for label, found in cases.items():
        axes.text(fastest / 1.9, y, label, fontsize=8.5, color=_INK, va="center", fontweight="bold")
        y += GAP / 2 + BAR / 2
        for row in found:
            assert row.time_us is not None
            axes.barh(y, row.time_us, height=BAR * 0.86, color=COLOURS.get(row.who, OTHER_COLOUR))
            text = f" {row.who}  {duration(row.time_us)}"
            axes.text(row.time_us, y, text, fontsize=8, color=_SOFT_INK, va="center")
            y += BAR
        y += GAP / 2 - BAR / 2
    axes.set_xscale("log")
    axes.set_xlim(fastest / 2, slowest * (slowest / fastest) ** 0.4 * 8)
    axes.set_ylim(y, -GAP / 2)
    axes.set_title(op, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([])
    axes.tick_params(colors=_SOFT_INK, labelsize=8, length=0)
    axes.grid(True, axis="x", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _cells(row: Row) -> str:
    values = (getattr(row, name) for name in COLUMNS)
    texts = ("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
    return "".join(f"<td>{html.escape(text)}</td>" for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description="A benchmark CSV as a picture and as an HTML page.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--html", type=Path)
    arguments = parser.parse_args()
    rows = read(arguments.csv)
    draw(rows, arguments.png or arguments.csv.with_suffix(".png"), arguments.html or arguments.csv.with_suffix(".html"))


def draw(rows: Sequence[Row], png: Path, page_path: Path) -> None:
    """Write both files."""
    figure(rows).savefig(png, format="png", dpi=100, metadata={"Software": None})
    page_path.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
