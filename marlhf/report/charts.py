"""What is drawn, as Plotly figures in plain dictionaries.

A figure carries the numbers of the run folder and nothing made up between them: a value that was not finite
is a gap, a curve of one point is a marker, and a curve with more points than a screen has columns keeps the
lowest and the highest value of every stretch, which its caption says.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from marlhf.report.reading import Curve, Evaluation, Run
from marlhf.report.text import chart_text, decimal, number, shortened

# After Okabe and Ito's palette for colour-blind readers, moved so that each has a contrast of at least 3:1
# on white and on the dark background.
COLOURS = ("#2b7bd4", "#d9600a", "#0b9469", "#c2569a", "#9c7a1c", "#7a6be0", "#c4485a", "#4b8a9c")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
NEUTRAL = "#7c828b"

MOST_POINTS = 4000
"""Points drawn per curve; a longer curve keeps the extremes of each stretch."""
_MARKED_POINTS = 60
"""Up to here every point of a line has a marker; beyond, a few markers tell the runs apart."""
_FEW_MARKERS = 12

AXIS_NAME = {"ppo": "iteration", "sft": "optimiser step", "reward": "optimiser step"}


@dataclass(frozen=True)
class Style:
    """How one run looks in every chart of the page."""

    colour: str
    symbol: str


@dataclass(frozen=True)
class Key:
    """One line of the legend: what a mark stands for and, where it helps, its newest value."""

    label: str
    style: Style
    kind: str
    """`line`, `faint`, `dotted`, `bar` or `hatched`."""
    value: str = ""


@dataclass(frozen=True)
class Chart:
    """A titled figure with its legend, its explanation and its description for those who cannot see it."""

    identifier: str
    title: str
    explanation: str
    figure: dict[str, Any]
    legend: list[Key]
    description: str
    notes: list[str] = field(default_factory=list)
    height: int = 260


@dataclass(frozen=True)
class Panel:
    """Which metrics share a chart. `held_out` is drawn over `main`, with large markers."""

    title: str
    axis: str
    main: str
    explanation: str
    main_label: str = ""
    held_out: str = ""
    second: str = ""
    second_label: str = ""
    percent: bool = False


PANELS: dict[str, tuple[Panel, ...]] = {
    "ppo": (
        Panel(
            "Reward-model score",
            "score",
            "score",
            "Mean score of the responses. Higher is better, as far as the reward model can be trusted.",
            main_label="training prompts",
            held_out="eval/score",
        ),
        Panel(
            "KL to the reference",
            "nats per response",
            "kl",
            "How far the policy has moved from the reference, summed over a response's tokens.",
            main_label="training prompts",
            held_out="eval/kl",
        ),
        Panel(
            "Response length",
            "tokens",
            "response_length",
            "Mean number of tokens in a response.",
            main_label="training prompts",
            held_out="eval/response_length",
        ),
        Panel(
            "Stopped by themselves",
            "share of responses",
            "stopped_share",
            "Responses that ended with a stop token instead of running into the length limit.",
            main_label="training prompts",
            held_out="eval/stopped_share",
            percent=True,
        ),
        Panel(
            "Clipped ratios and values",
            "share clipped",
            "policy_clip_fraction",
            "Where the clip of the policy loss or of the value loss was active. A policy clip fraction that "
            "keeps climbing means steps that are too long.",
            main_label="policy",
            second="value_clip_fraction",
            second_label="value",
            percent=True,
        ),
        Panel("Value loss", "loss (score\u00b2)", "value_loss", "Squared error of the critic."),
        Panel("Policy loss", "loss", "policy_loss", "The clipped surrogate; its sign and trend say little."),
        Panel(
            "Entropy",
            "nats per token",
            "entropy",
            "How spread out the next-token distribution is. A collapse towards 0 ends exploration.",
        ),
        Panel(
            "KL of one update",
            "nats",
            "approx_kl",
            "Estimated distance between the policy that sampled and the policy after its updates.",
        ),
        Panel(
            "Largest ratio",
            "ratio",
            "ratio_max",
            "Of the new to the old policy; 1 is no change.",
        ),
        Panel(
            "Gradient norms",
            "norm before clipping",
            "policy_grad_norm",
            "Global norm of each model's gradient.",
            main_label="policy",
            second="critic_grad_norm",
            second_label="critic",
        ),
        Panel("KL coefficient", "coefficient", "kl_coef", "What one nat of KL costs in reward."),
        Panel(
            "Learning rates",
            "learning rate",
            "policy_learning_rate",
            "Of the optimisers, at the end of the iteration.",
            main_label="policy",
            second="critic_learning_rate",
            second_label="critic",
        ),
        Panel("Macro-action length", "tokens", "macro_length", "Mean over the rollout batch."),
        Panel("Throughput", "tokens per second", "tokens_per_second", "Response tokens per wall-clock second."),
    ),
    "reward": (
        Panel(
            "Loss",
            "nats per pair",
            "loss",
            "Of the chosen response beating the rejected one; a coin toss has ln 2 = 0.693.",
            main_label="training pairs",
            held_out="eval/loss",
        ),
        Panel(
            "Accuracy",
            "share of pairs",
            "accuracy",
            "Pairs in which the chosen response has the higher score; 50% is a coin toss.",
            main_label="training pairs",
            held_out="eval/accuracy",
            percent=True,
        ),
        Panel("Learning rate", "learning rate", "learning_rate", "Of the optimiser."),
        Panel("Gradient norm", "norm before clipping", "grad_norm", "Global norm of the gradient."),
    ),
    "sft": (
        Panel(
            "Loss",
            "nats per token",
            "loss",
            "Mean negative log-likelihood of the response tokens.",
            main_label="training rows",
            held_out="eval/loss",
        ),
        Panel("Learning rate", "learning rate", "learning_rate", "Of the optimiser."),
        Panel("Gradient norm", "norm before clipping", "grad_norm", "Global norm of the gradient."),
    ),
}
_BAR_METRICS = ("time/", "eval/accuracy/")


def styles(runs: Sequence[Run]) -> dict[str, Style]:
    """One look per run, the same in every chart; PPO runs get the palette's first and clearest places."""
    ordered = sorted(runs, key=lambda run: run.stage != "ppo")
    return {
        run.name: Style(COLOURS[place % len(COLOURS)], SYMBOLS[place % len(SYMBOLS)])
        for place, run in enumerate(ordered)
    }


def stage_charts(
    stage: str, runs: Sequence[Run], look: dict[str, Style], *, prefix: str
) -> tuple[list[Chart], list[Chart]]:
    """A stage's charts, all runs overlaid: the known panels, and apart every other metric by its name.

    `prefix` begins the identifiers; a stage's name comes from a file and may hold anything.
    """
    panels = PANELS.get(stage, ())
    with_metrics = [run for run in runs if run.curves.get(stage)]

    def drawn(pairs: Iterable[tuple[str, Panel]]) -> list[Chart]:
        made = (_curves(identifier, panel, stage, with_metrics, look) for identifier, panel in pairs)
        return [chart for chart in made if chart]

    shown = drawn((f"{prefix}-{position}", panel) for position, panel in enumerate(panels))
    if stage == "ppo" and (chart := _time_by_phase(with_metrics, look)):
        shown.append(chart)
    if stage == "reward" and (chart := _accuracy_by_kind(with_metrics, look)):
        # Behind loss and accuracy, which every reward run has at the front.
        shown.insert(2, chart)
    known = {key for panel in panels for key in (panel.main, panel.held_out, panel.second)}
    others = dict.fromkeys(
        key
        for run in with_metrics
        for key in run.curves[stage]
        if key not in known and not (panels and key.startswith(_BAR_METRICS))
    )
    rest = drawn((f"{prefix}-more-{position}", Panel(key, key, key, "")) for position, key in enumerate(others))
    return shown, rest


def score_distributions(runs: Sequence[Run], look: dict[str, Style]) -> list[Chart]:
    """For each run the histogram of its last scores over that of its first, all on the same axes and bins."""
    bins = score_bins(runs)
    counts = (
        count
        for run in runs
        for evaluation in _first_and_last(run.evaluations)
        for count in histogram(evaluation.scores, bins)
    )
    highest = max(counts, default=0)
    return [
        _distribution(f"scores-{position}", run, look[run.name], bins, highest)
        for position, run in enumerate(runs)
        if _first_and_last(run.evaluations)
    ]


def _distribution(identifier: str, run: Run, own: Style, bins: tuple[float, float, int], highest: int) -> Chart:
    start, width, count = bins
    first, *later = _first_and_last(run.evaluations)
    parts = [(_when(first.step, "before training"), first, Style(NEUTRAL, own.symbol), "hatched")]
    parts += [(_when(last.step, "after"), last, own, "bar") for last in later]
    traces: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    legend: list[Key] = []
    notes: list[str] = []
    for label, evaluation, style, kind in parts:
        counts = histogram(evaluation.scores, bins)
        mean = sum(evaluation.scores) / len(evaluation.scores)
        traces.append(
            {
                "type": "bar",
                "name": chart_text(label),
                "x": [start + width * (place + 0.5) for place in range(count)],
                "y": counts,
                "width": width,
                "customdata": [[number(start + width * (place + side)) for side in (0, 1)] for place in range(count)],
                "marker": _bar_marker(style, hatched=kind == "hatched", opacity=0.55),
                "hovertemplate": f"{chart_text(label)}<br>score %{{customdata[0]}} to %{{customdata[1]}}: "
                "%{y} responses<extra></extra>",
            }
        )
        shapes.append(
            {
                "type": "line",
                "x0": mean,
                "x1": mean,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": style.colour, "width": 2, "dash": "dash" if kind == "hatched" else "solid"},
            }
        )
        legend.append(Key(label, style, kind, f"mean {decimal(mean, 3)} (n = {len(evaluation.scores)})"))
        if evaluation.left_out:
            notes.append(f"{evaluation.left_out} scores {label} were not finite and are not drawn.")
    layout = _layout("score", "responses")
    layout.update(barmode="overlay", bargap=0, hovermode="closest", shapes=shapes)
    layout["xaxis"]["range"] = [start, start + width * count]
    layout["yaxis"].update(range=[0, highest * 1.05], rangemode="tozero")
    return Chart(
        identifier=identifier,
        title=run.name,
        explanation="",
        figure={"data": traces, "layout": layout},
        legend=legend,
        description=f"Histogram of held-out scores of {run.name}: "
        + "; ".join(f"{key.label}: {key.value}" for key in legend),
        notes=notes,
    )


def score_bins(runs: Sequence[Run]) -> tuple[float, float, int]:
    """Bins (lowest edge, width, number) over the first and last scores of all runs, of a round width."""
    scores = [score for run in runs for evaluation in _first_and_last(run.evaluations) for score in evaluation.scores]
    if not scores:
        return 0.0, 1.0, 1
    low, high = min(scores), max(scores)
    per_run = len(scores) / max(1, 2 * len(runs))
    wanted = min(40, max(8, round(2 * math.sqrt(per_run))))
    if high == low:
        return low - 0.5, 1.0, 1
    width = _round_up(high / wanted - low / wanted)
    start = math.floor(low / width) * width
    # The highest score lies inside the last bin, never on the edge behind it.
    return start, width, math.floor(high / width - start / width) + 1


def histogram(scores: Iterable[float], bins: tuple[float, float, int]) -> list[int]:
    """Counts per bin; a score on an inner edge belongs to the bin above it."""
    start, width, count = bins
    counts = [0] * count
    for score in scores:
        counts[min(count - 1, max(0, math.floor(score / width - start / width)))] += 1
    return counts


def macro_lengths(runs: Sequence[Run], look: dict[str, Style]) -> Chart | None:
    """Share of macro actions by their length in the last evaluation, one bar per run and length."""
    traces: list[dict[str, Any]] = []
    legend: list[Key] = []
    for run in runs:
        counts = next((entry.macro_lengths for entry in reversed(run.evaluations) if entry.macro_lengths), {})
        total = sum(counts.values())
        if not total:
            continue
        mean = sum(length * count for length, count in counts.items()) / total
        style = look[run.name]
        traces.append(
            {
                "type": "bar",
                "name": chart_text(run.name),
                "x": list(counts),
                "y": [count / total for count in counts.values()],
                "customdata": list(counts.values()),
                "marker": _bar_marker(style, hatched=len(traces) % 2 == 1),
                "hovertemplate": "%{fullData.name}<br>%{x} tokens: %{customdata} macro actions, "
                "%{y:.1%}<extra></extra>",
            }
        )
        kind = "hatched" if len(traces) % 2 == 0 else "bar"
        legend.append(Key(run.name, style, kind, f"mean {decimal(mean, 2)} tokens (n = {total})"))
    if not traces:
        return None
    layout = _layout("tokens in a macro action", "share of macro actions", percent=True)
    layout.update(barmode="group", hovermode="closest")
    layout["yaxis"]["rangemode"] = "tozero"
    layout["xaxis"].update(tickformat="d", **({"dtick": 1} if max(max(t["x"]) for t in traces) <= 16 else {}))
    return Chart(
        identifier="macro-lengths",
        title="Macro-action lengths",
        explanation="In the last evaluation. A response's last macro action may be shorter than the rest.",
        figure={"data": traces, "layout": layout},
        legend=legend,
        description="Macro-action lengths: " + "; ".join(f"{key.label}: {key.value}" for key in legend),
        height=300,
    )


def _curves(identifier: str, panel: Panel, stage: str, runs: Sequence[Run], look: dict[str, Style]) -> Chart | None:
    axis = AXIS_NAME.get(stage, "step")
    traces: list[dict[str, Any]] = []
    legend: list[Key] = []
    notes: list[str] = []
    drawn: list[tuple[str, Curve]] = []
    for run in runs:
        curves = run.curves[stage]
        held_out = curves.get(panel.held_out)
        for curve, label, kind in (
            (curves.get(panel.main), panel.main_label, "faint" if held_out else "line"),
            (held_out, "held out", "line"),
            (curves.get(panel.second), panel.second_label, "dotted"),
        ):
            if curve is None:
                continue
            full_label = f"{run.name}, {label}" if label else run.name
            if twin := next((other for other, seen in drawn if seen == curve), None):
                notes.append(f"{full_label} lies exactly on {twin}.")
            drawn.append((full_label, curve))
            missing = curve.values.count(None)
            if missing:
                notes.append(f"{full_label}: {missing} of {len(curve.values)} values were not finite (gaps).")
            if len(curve.values) > MOST_POINTS:
                notes.append(
                    f"{full_label}: of {len(curve.values)} points, each stretch's lowest and highest are drawn."
                )
            traces += _line_traces(
                thinned(curve, MOST_POINTS), full_label, look[run.name], kind, panel, large=curve is held_out
            )
            legend.append(Key(full_label, look[run.name], kind, number(curve.last, percent=panel.percent)))
    if not traces:
        return None
    layout = _layout(axis, panel.axis, percent=panel.percent)
    steps = [step for trace in traces for step in trace["x"]]
    if max(steps) - min(steps) <= 8:
        layout["xaxis"]["dtick"] = 1
    if max(steps) == min(steps):
        layout["xaxis"]["range"] = [min(steps) - 1, min(steps) + 1]
    values = {value for trace in traces for value in trace["y"] if value is not None}
    if len(values) == 1 and min(values) > 0:
        # Around a constant Plotly would show a range of two units, however small the constant is.
        layout["yaxis"]["rangemode"] = "tozero"
    return Chart(
        identifier=identifier,
        title=panel.title,
        explanation=panel.explanation,
        figure={"data": traces, "layout": layout},
        legend=legend,
        description=f"{panel.title} over {axis}s, newest values: "
        + "; ".join(f"{key.label}: {key.value}" for key in legend),
        notes=notes,
        height=320 if panel in PANELS.get(stage, ())[:2] else 260,
    )


def _line_traces(
    curve: Curve, label: str, style: Style, kind: str, panel: Panel, *, large: bool
) -> list[dict[str, Any]]:
    size = 8 if large or len(curve.values) == 1 else 5
    crowded = len(curve.values) > _MARKED_POINTS
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": chart_text(label),
        "x": curve.steps,
        "y": curve.values,
        "connectgaps": False,
        "opacity": 0.55 if kind == "faint" else 1,
        # Every point stays in the path: Plotly would drop those that it thinks nobody sees.
        "line": {
            "color": style.colour,
            "width": 1.5 if kind == "faint" or crowded else 2,
            "dash": "dot" if kind == "dotted" else "solid",
            "simplify": False,
        },
        "marker": {
            "color": style.colour,
            "symbol": style.symbol + ("-open" if kind == "dotted" else ""),
            "size": size,
            "maxdisplayed": _FEW_MARKERS if crowded else 0,
        },
        "hovertemplate": f"%{{y:{'.1%' if panel.percent else '.4g'}}}",
    }
    if not crowded:
        return [trace]
    # With few markers, a point between two gaps would be neither line nor marker.
    alone = [
        position
        for position, value in enumerate(curve.values)
        if value is not None
        and (position == 0 or curve.values[position - 1] is None)
        and (position + 1 == len(curve.values) or curve.values[position + 1] is None)
    ]
    if not alone:
        return [trace]
    lonely = {
        **trace,
        "mode": "markers",
        "x": [curve.steps[position] for position in alone],
        "y": [curve.values[position] for position in alone],
        "marker": {**trace["marker"], "maxdisplayed": 0},
        "hoverinfo": "skip",
    }
    del lonely["hovertemplate"]
    return [trace, lonely]


def thinned(curve: Curve, most: int) -> Curve:
    """At most `most` points: the first, the last, and of every stretch the lowest, the highest and a gap."""
    if len(curve.values) <= most:
        return curve
    size = math.ceil(len(curve.values) / max(1, (most - 2) // 3))
    kept = {0, len(curve.values) - 1}
    for start in range(0, len(curve.values), size):
        stretch = [*enumerate(curve.values[start : start + size], start)]
        finite = [(value, position) for position, value in stretch if value is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        kept.update([position for position, value in stretch if value is None][:1])
    order = sorted(kept)
    return Curve([curve.steps[place] for place in order], [curve.values[place] for place in order])


def _time_by_phase(runs: Sequence[Run], look: dict[str, Style]) -> Chart | None:
    phases = dict.fromkeys(key for run in runs for key in run.curves["ppo"] if key.startswith("time/"))
    values: list[tuple[Run, list[float | None]]] = []
    for run in runs:
        curves = [run.curves["ppo"].get(key) for key in phases]
        # A phase that runs now and then, such as evaluation, is spread over all iterations.
        iterations = len({step for curve in curves if curve for step in curve.steps})
        totals = [sum(value or 0.0 for value in curve.values) if curve else None for curve in curves]
        values.append((run, [total if total is None else total / iterations for total in totals]))
    return _bars(
        "ppo-time",
        "Time by phase",
        "seconds per iteration, mean",
        "Where an iteration's wall time goes.",
        [key.removeprefix("time/") for key in phases],
        values,
        look,
        lambda of_run: f"{number(sum(value for value in of_run if value is not None))} s in all",
    )


def _accuracy_by_kind(runs: Sequence[Run], look: dict[str, Style]) -> Chart | None:
    prefix = "eval/accuracy/"
    kinds = dict.fromkeys(key for run in runs for key in run.curves["reward"] if key.startswith(prefix))
    curves = [(run, [run.curves["reward"].get(key) for key in kinds]) for run in runs]
    return _bars(
        "reward-kinds",
        "Accuracy by kind of rejected response",
        "share of held-out pairs",
        "In the last evaluation; the line at 50% is a coin toss.",
        [key.removeprefix(prefix) for key in kinds],
        [(run, [curve.last if curve else None for curve in of_run]) for run, of_run in curves],
        look,
        lambda values: "",
        percent=True,
        line_at=0.5,
    )


def _bars(
    identifier: str,
    title: str,
    axis: str,
    explanation: str,
    categories: list[str],
    values: list[tuple[Run, list[float | None]]],
    look: dict[str, Style],
    summary: Callable[[list[float | None]], str],
    *,
    percent: bool = False,
    line_at: float | None = None,
) -> Chart | None:
    """Horizontal bars, one group per category and one bar per run, each with its number beside it."""
    values = [(run, of_run) for run, of_run in values if any(value is not None for value in of_run)]
    if not values:
        return None
    traces: list[dict[str, Any]] = []
    legend: list[Key] = []
    for place, (run, of_run) in enumerate(values):
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": chart_text(run.name),
                "x": of_run,
                "y": list(range(len(categories))),
                "customdata": [chart_text(category) for category in categories],
                "text": [number(value, percent=percent) if value is not None else "" for value in of_run],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": _bar_marker(look[run.name], hatched=place % 2 == 1),
                "hovertemplate": "%{fullData.name}<br>%{customdata}: %{text}<extra></extra>",
            }
        )
        legend.append(Key(run.name, look[run.name], "hatched" if place % 2 else "bar", summary(of_run)))
    layout = _layout(axis, "", percent=percent)
    layout.update(barmode="group", hovermode="closest", bargap=0.25)
    layout["xaxis"]["rangemode"] = "tozero"
    # Positions, not names: two names may begin alike.
    ticks = [chart_text(shortened(category, 22)) for category in categories]
    layout["yaxis"].update(
        tickvals=list(range(len(ticks))), ticktext=ticks, range=[len(ticks) - 0.5, -0.5], showgrid=False
    )
    highest = max(value for _, of_run in values for value in of_run if value is not None)
    # Room for the numbers behind the bars.
    layout["xaxis"]["range"] = [0, max(highest, 1e-9) * 1.2]
    if line_at is not None:
        layout["shapes"] = [
            {
                "type": "line",
                "x0": line_at,
                "x1": line_at,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": NEUTRAL, "width": 1.5, "dash": "dash"},
            }
        ]
    described = [
        f"{run.name}: "
        + ", ".join(
            f"{category} {number(value, percent=percent)}" for category, value in zip(categories, of_run, strict=True)
        )
        for run, of_run in values
    ]
    return Chart(
        identifier=identifier,
        title=title,
        explanation=explanation,
        figure={"data": traces, "layout": layout},
        legend=legend,
        description=f"{title}, {axis}. " + "; ".join(described),
        height=max(260, 90 + len(categories) * (18 + 16 * len(values))),
    )


def _layout(x_title: str, y_title: str, *, percent: bool = False) -> dict[str, Any]:
    # Colours of text, grid and background come from the style sheet, so that light, dark and print need no
    # second figure.
    axis: dict[str, Any] = {"zeroline": False, "ticks": "", "automargin": True, "exponentformat": "e"}
    layout: dict[str, Any] = {
        "autosize": True,
        "margin": {"l": 8, "r": 14, "t": 10, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12},
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#98a2b3", "namelength": 40},
        "dragmode": "zoom",
        "xaxis": {**axis, "title": {"text": chart_text(x_title), "standoff": 8}},
        "yaxis": {**axis, "title": {"text": chart_text(y_title), "standoff": 8}},
    }
    if percent:
        # Bars lie on their side: there the share is on the x axis and the y axis has no title.
        layout["yaxis" if y_title else "xaxis"]["tickformat"] = ".0%"
    return layout


def _bar_marker(style: Style, *, hatched: bool, opacity: float = 0.85) -> dict[str, Any]:
    colour = style.colour
    marker: dict[str, Any] = {"color": colour, "opacity": opacity, "line": {"color": colour, "width": 1}}
    if hatched:
        clear = "rgba(0,0,0,0)"
        marker["pattern"] = {"shape": "/", "size": 6, "solidity": 0.35, "fgcolor": colour, "bgcolor": clear}
    return marker


def _first_and_last(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    scored = [evaluation for evaluation in evaluations if evaluation.scores]
    return scored[:1] + scored[1:][-1:]


def _when(step: int, what: str) -> str:
    return what if what == "before training" and step == 0 else f"{what} (iteration {step})"


def _round_up(width: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= width * (1 - 1e-9))
