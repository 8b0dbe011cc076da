"""Charts carry the numbers of the run and nothing else."""

import math
import random

import pytest

from marlhf.report import charts
from marlhf.report.reading import Curve, read_run, read_runs
from tests.trainer.report.folders import ppo_metrics, write_ppo, write_reward, write_run, write_sft


def traces_of(chart):
    return {trace["name"]: trace for trace in chart.figure["data"]}


def relative_luminance(colour):
    linear = [
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((relative_luminance(one), relative_luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_is_legible_on_both_backgrounds():
    # WCAG asks for 3:1 between a graphical object and what is behind it.
    for colour in (*charts.COLOURS, charts.NEUTRAL):
        assert contrast(colour, "#ffffff") >= 3, colour
        assert contrast(colour, "#181d25") >= 3, colour
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_runs_differ_by_symbol_as_well_as_colour(tmp_path):
    runs = read_runs({f"run {place}": write_run(tmp_path / str(place)) for place in range(8)})
    look = charts.styles(runs)
    assert len({style.colour for style in look.values()}) == 8
    assert len({style.symbol for style in look.values()}) == 8


def test_ppo_runs_get_the_first_colours(tmp_path):
    runs = read_runs({"sft": write_sft(tmp_path / "sft"), "ppo": write_ppo(tmp_path / "ppo")})
    assert charts.styles(runs)["ppo"].colour == charts.COLOURS[0]


def test_every_metric_of_a_run_is_in_exactly_one_chart(tmp_path):
    run = read_run("run", write_ppo(tmp_path / "run"))
    shown, more = charts.stage_charts("ppo", [run], charts.styles([run]), prefix="x")
    drawn = [
        (tuple(trace["x"]), tuple(trace["y"]))
        for chart in (*shown, *more)
        for trace in chart.figure["data"]
        if trace["type"] == "scatter"
    ]
    curves = {key: curve for key, curve in run.curves["ppo"].items() if not key.startswith("time/")}
    assert sorted(drawn, key=str) == sorted(((tuple(c.steps), tuple(c.values)) for c in curves.values()), key=str)
    assert [chart.title for chart in more] == ["score_std"]
    identifiers = [chart.identifier for chart in (*shown, *more)]
    assert len(set(identifiers)) == len(identifiers)


def test_a_value_that_is_not_finite_is_a_gap_and_said(tmp_path):
    run = read_run("run", write_ppo(tmp_path / "run"))
    shown, _ = charts.stage_charts("ppo", [run], charts.styles([run]), prefix="x")
    (chart,) = [chart for chart in shown if chart.title == "Value loss"]
    (trace,) = chart.figure["data"]
    assert trace["y"] == [1.0, 1 / 2, 1 / 3, None, 1 / 5, 1 / 6]
    assert trace["connectgaps"] is False
    assert chart.notes == ["run: 1 of 6 values were not finite (gaps)."]


@pytest.mark.parametrize("length", [1, 2, 60, 61, 1000])
def test_a_point_without_neighbours_has_a_marker(length):
    """Whatever the number of points: a point between gaps is no line, so only a marker shows it."""
    rng = random.Random(length)
    values = [rng.random() if rng.random() < 0.5 else None for _ in range(length)]
    alone = [
        step
        for step, value in enumerate(values)
        if value is not None
        and (step == 0 or values[step - 1] is None)
        and (step == length - 1 or values[step + 1] is None)
    ]
    panel = charts.Panel("t", "a", "k", "")
    style = charts.Style("#000000", "circle")
    traces = charts._line_traces(Curve([*range(length)], values), "run", style, "line", panel, large=False)
    marked = {
        step
        for trace in traces
        if "markers" in trace["mode"] and not trace["marker"].get("maxdisplayed")
        for step, value in zip(trace["x"], trace["y"], strict=True)
        if value is not None
    }
    assert set(alone) <= marked
    assert traces[0]["y"] == values


def test_a_long_curve_keeps_its_extremes_its_ends_and_its_gaps():
    values: list[float | None] = [math.sin(place / 500) for place in range(50_000)]
    values[12_345], values[33_333], values[40_000] = 9.0, -9.0, None
    curve = Curve([*range(50_000)], values)
    few = charts.thinned(curve, 4000)
    assert 2000 < len(few.steps) <= 4000
    assert few.steps == sorted(few.steps)
    assert (few.steps[0], few.steps[-1]) == (0, 49_999)
    points = dict(zip(few.steps, few.values, strict=True))
    assert (points[12_345], points[33_333], points[40_000]) == (9.0, -9.0, None)
    assert all(values[step] == value for step, value in points.items())
    assert charts.thinned(few, 4000) is few


def test_a_long_curve_is_said_to_be_thinned(tmp_path):
    lines = [{"stage": "sft", "step": step, "loss": float(step % 7)} for step in range(9000)]
    run = read_run("run", write_run(tmp_path / "run", metrics=lines))
    shown, _ = charts.stage_charts("sft", [run], charts.styles([run]), prefix="x")
    assert len(shown[0].figure["data"][0]["x"]) <= charts.MOST_POINTS
    assert "of 9000 points" in shown[0].notes[0]
    assert shown[0].legend[0].value == str(8999 % 7)


def test_two_runs_with_the_same_curve_are_said_to_coincide(tmp_path):
    runs = read_runs({"a": write_ppo(tmp_path / "a"), "b": write_ppo(tmp_path / "b", 0.5)})
    shown, _ = charts.stage_charts("ppo", runs, charts.styles(runs), prefix="x")
    notes = {chart.title: chart.notes for chart in shown}
    assert notes["Entropy"] == ["b lies exactly on a."]
    assert notes["Reward-model score"] == []


def test_axes_name_their_units(tmp_path):
    runs = read_runs({"ppo": write_ppo(tmp_path / "ppo"), "rm": write_reward(tmp_path / "rm")})
    for stage, x in (("ppo", "iteration"), ("reward", "optimiser step")):
        shown, more = charts.stage_charts(stage, [r for r in runs if r.stage == stage], charts.styles(runs), prefix="x")
        for chart in (*shown, *more):
            titles = [chart.figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")]
            if chart.figure["data"][0]["type"] == "scatter":
                assert titles[0] == x
                assert titles[1]
            else:
                assert titles[0]


def test_time_by_phase_is_per_iteration(tmp_path):
    run = read_run("run", write_ppo(tmp_path / "run"))
    shown, _ = charts.stage_charts("ppo", [run], charts.styles([run]), prefix="x")
    (chart,) = [chart for chart in shown if chart.title == "Time by phase"]
    seconds = dict(zip(chart.figure["data"][0]["customdata"], chart.figure["data"][0]["x"], strict=True))
    # Evaluation ran in two of six iterations, for three seconds each.
    assert seconds == pytest.approx({"generate": 1.0, "update": 0.5 + 0.1 * 3.5, "evaluate": 1.0})


def test_accuracy_by_kind_is_the_newest(tmp_path):
    run = read_run("run", write_reward(tmp_path / "run"))
    shown, more = charts.stage_charts("reward", [run], charts.styles([run]), prefix="x")
    (chart,) = [chart for chart in shown if chart.title.startswith("Accuracy by kind")]
    assert chart.figure["data"][0]["customdata"] == ["shuffled", "truncated"]
    assert chart.figure["data"][0]["x"] == [0.95, 0.6]
    assert more == []


def test_a_stage_without_metrics_or_known_panels(tmp_path):
    nothing = read_run("run", write_run(tmp_path / "a", status={"state": "running", "stage": "ppo"}))
    assert charts.stage_charts("ppo", [nothing], charts.styles([nothing]), prefix="x") == ([], [])
    assert charts.score_distributions([nothing], charts.styles([nothing])) == []
    assert charts.macro_lengths([nothing], charts.styles([nothing])) is None
    odd = read_run("run", write_run(tmp_path / "b", metrics=[{"stage": "odd", "step": 1, "time/x": 2.0}]))
    shown, more = charts.stage_charts("odd", [odd], charts.styles([odd]), prefix="x")
    assert (shown, [chart.title for chart in more]) == ([], ["time/x"])


def test_distributions_count_every_response_before_and_after(tmp_path):
    runs = read_runs({"a": write_ppo(tmp_path / "a"), "b": write_ppo(tmp_path / "b", 0.5)})
    first, second = charts.score_distributions(runs, charts.styles(runs))
    for chart in (first, second):
        assert [sum(trace["y"]) for trace in chart.figure["data"]] == [20, 20]
        assert [key.label for key in chart.legend] == ["before training", "after (iteration 6)"]
    assert first.figure["data"][0]["x"] == second.figure["data"][0]["x"]
    assert first.figure["layout"]["yaxis"]["range"] == second.figure["layout"]["yaxis"]["range"]
    # Scores before are 0.0 ... 1.9 and after 6.0 ... 7.9.
    assert first.legend[0].value == "mean 0.950 (n = 20)"
    assert first.legend[1].value == "mean 6.950 (n = 20)"
    before = {x for x, y in zip(first.figure["data"][0]["x"], first.figure["data"][0]["y"], strict=True) if y}
    assert all(-0.5 < x < 2.5 for x in before)


@pytest.mark.parametrize(
    "scores",
    [
        [0.0],
        [3.0, 3.0, 3.0],
        [-1e308, 1e308],
        [1e16, 1e16 + 2],
        [1e-320, 2e-320],
        [-0.3, 0.1, 0.7, 1.0],
        [random.Random(0).gauss(0, 1) for _ in range(500)],
    ],
)
def test_bins_hold_every_score_once(tmp_path, scores):
    folder = write_run(tmp_path / "run", evaluations=[{"step": 0, "scores": scores}])
    run = read_run("run", folder)
    start, width, count = charts.score_bins([run])
    assert width > 0
    assert 1 <= count <= 60
    counts = charts.histogram(scores, (start, width, count))
    assert sum(counts) == len(scores)
    if math.isfinite(max(scores) - min(scores)) and width > 1e-300 and abs(start) < 1e15:
        for place, found in enumerate(counts):
            low, high = start + width * place, start + width * (place + 1)
            inside = sum(low - 1e-9 * width <= score < high - 1e-9 * width for score in scores)
            assert found == inside


def test_macro_lengths_are_shares_of_the_last_evaluation(tmp_path):
    run = read_run("run", write_ppo(tmp_path / "run"))
    chart = charts.macro_lengths([run], charts.styles([run]))
    (trace,) = chart.figure["data"]
    assert (trace["x"], trace["y"], trace["customdata"]) == ([1, 5], [0.25, 0.75], [20, 60])
    assert chart.legend[0].value == "mean 4.00 tokens (n = 80)"


def test_a_chart_is_described_in_words(tmp_path):
    run = read_run("run", write_run(tmp_path / "run", metrics=ppo_metrics()))
    shown, _ = charts.stage_charts("ppo", [run], charts.styles([run]), prefix="x")
    assert shown[0].description == (
        "Reward-model score over iterations, newest values: run, training prompts: 0.6; run, held out: 0.54"
    )
    assert all(chart.description for chart in shown)
