"""The learning curves as one picture, for a README."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from marlhf.errors import UserError
from marlhf.files import write_bytes_atomically
from marlhf.report.charts import Style, styles
from marlhf.report.reading import Curve, Run, read_runs
from marlhf.report.text import printable, shortened

_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
    "triangle-down": "v",
    "star": "*",
}
_INK, _SOFT_INK, _GRID = "#1d2430", "#5b6472", "#e3e7ec"


def write_curve_picture(runs: Mapping[str, Path], output: Path) -> Path:
    """Draws the score of PPO runs with their KL beside it, 1200 x 600 pixels, and returns the PNG's path.

    Training batches are faint lines, evaluations on held-out prompts are points. Raises UserError if a folder
    is not a run folder, or if none of the runs has a PPO metric yet.
    """
    read = read_runs(runs)
    shown = [run for run in read if {"score", "eval/score"} & set(run.curves.get("ppo", {}))]
    if not shown:
        raise UserError(f"none of the runs has a PPO score to draw yet: {', '.join(map(str, runs.values()))}")
    look = styles(read)

    figure = Figure(figsize=(12, 6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    score_axes, kl_axes = figure.subplots(1, 2)
    _panel(score_axes, shown, look, "score", "Reward-model score", "mean score per response")
    _panel(kl_axes, shown, look, "kl", "KL to the reference", "nats per response")

    handles = [Line2D([], [], linewidth=2.2, **_look(look[run.name])) for run in shown]
    names = [shortened(printable(run.name), 40) for run in shown]
    if any({"score", "eval/score"} <= set(run.curves["ppo"]) for run in shown):
        handles.append(Line2D([], [], linewidth=1.5, color=_SOFT_INK, alpha=0.5))
        names.append("faint: training batches; markers: held-out prompts")
    legend = figure.legend(
        handles, [""] * len(handles), loc="lower center", ncols=min(4, len(names)), frameon=False, fontsize=12
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        # Set afterwards: a name is never read as a formula, nor dropped for its leading underscore.
        text.set_parse_math(False)
        text.set_text(name)
        text.set_color(_INK)
    rows = -(-len(handles) // 4)
    figure.subplots_adjust(left=0.07, right=0.985, top=0.91, bottom=0.16 + 0.045 * rows, wspace=0.17)

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    write_bytes_atomically(Path(output), picture.getvalue())
    return Path(output)


def _panel(axes: Axes, runs: list[Run], look: dict[str, Style], key: str, title: str, unit: str) -> None:
    for run in runs:
        curves, style = run.curves["ppo"], look[run.name]
        held_out = curves.get(f"eval/{key}")
        if key in curves:
            _line(axes, curves[key], style, faint=held_out is not None)
        if held_out is not None:
            _line(axes, held_out, style, faint=False, zorder=3)
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold", color=_INK, pad=12)
    axes.set_xlabel("iteration", fontsize=12, color=_SOFT_INK)
    axes.set_ylabel(unit, fontsize=12, color=_SOFT_INK)
    axes.tick_params(colors=_SOFT_INK, labelsize=11, length=0)
    steps = {step for run in runs for curve in run.curves["ppo"].values() for step in curve.steps}
    if len(steps) == 1:
        axes.set_xlim(min(steps) - 1, min(steps) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(True, color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#aeb6c1")


def _line(axes: Axes, curve: Curve, style: Style, *, faint: bool, zorder: float = 2) -> None:
    # NaN is a gap to Matplotlib as None is to the page.
    values = [float("nan") if value is None else value for value in curve.values]
    look = _look(style)
    if faint and len(values) > 1:
        del look["marker"]
    axes.plot(
        curve.steps,
        values,
        **look,
        alpha=0.4 if faint else 1.0,
        linewidth=1.4 if faint else 2.2,
        markevery=max(1, len(values) // 60),
        zorder=zorder,
    )


def _look(style: Style) -> dict[str, Any]:
    marker = {"marker": _MARKERS[style.symbol], "markersize": 9, "markeredgecolor": "white", "markeredgewidth": 1.2}
    return {"color": style.colour, **marker}
