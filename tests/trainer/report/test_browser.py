"""The page in a real browser: what it draws, what it asks for, and what hostile text does to it."""

import itertools
import json

import pytest

from marlhf.report import Table, build_report
from tests.trainer.report.folders import (
    HOSTILE,
    SHOWN,
    ppo_metrics,
    ppo_samples,
    write_ppo,
    write_reward,
    write_run,
    write_sft,
)

pytestmark = pytest.mark.browser

# Title of a chart -> the metrics that it draws per run, in the order of drawing.
PPO_CHARTS = {
    "Reward-model score": ("score", "eval/score"),
    "KL to the reference": ("kl", "eval/kl"),
    "Response length": ("response_length", "eval/response_length"),
    "Stopped by themselves": ("stopped_share", "eval/stopped_share"),
    "Clipped ratios and values": ("policy_clip_fraction", "value_clip_fraction"),
    "Value loss": ("value_loss",),
    "Policy loss": ("policy_loss",),
    "Entropy": ("entropy",),
    "KL of one update": ("approx_kl",),
    "Largest ratio": ("ratio_max",),
    "Gradient norms": ("policy_grad_norm", "critic_grad_norm"),
    "KL coefficient": ("kl_coef",),
    "Learning rates": ("policy_learning_rate",),
    "Macro-action length": ("macro_length",),
    "Throughput": ("tokens_per_second",),
}

# Of every chart: its title, the data that Plotly holds, and what stands in its SVG.
READ_CHARTS = """
return [...document.querySelectorAll("[data-chart]")].filter(e => e.data).map(element => ({
  title: element.closest("figure").querySelector("h3").textContent,
  section: element.closest("section").id,
  data: element.data.map(t => ({type: t.type, name: t.name, x: [...t.x], y: [...t.y]})),
  lines: [...element.querySelectorAll(".scatterlayer .trace")].map(trace =>
    [...trace.querySelectorAll("path.js-line")].map(p => (p.getAttribute("d").match(/[ML]/g) || []).length)),
  markers: [...element.querySelectorAll(".scatterlayer .trace")].map(trace =>
    [...trace.querySelectorAll(".points path.point")].filter(p => p.getBBox().width > 0).length),
  bars: [...element.querySelectorAll(".barlayer .trace")].map(trace =>
    [...trace.querySelectorAll(".point path")].map(p => p.getBBox())
      .filter(box => box.width > 0 && box.height > 0).length),
}))
"""


def runs_of_values(values):
    """Lengths of the stretches of values without a gap."""
    stretches = [0]
    for value in values:
        if value is None:
            stretches.append(0)
        else:
            stretches[-1] += 1
    return [length for length in stretches if length]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    runs = {
        "SFT": write_sft(root / "sft"),
        "RM": write_reward(root / "rm"),
        "PPO": write_ppo(root / "ppo"),
        "MA-PPO": write_ppo(root / "ma", 0.5, config="ppo: {n: 5}\n"),
    }
    table = Table("Final table", ["policy", *[f"metric {place}" for place in range(12)]], [["SFT", *["-0.123"] * 12]])
    return build_report(runs, root / "report.html", title="Demo", tables=[table], notes=["A note."])


def test_every_curve_has_exactly_its_points(browser, demo):
    browser.open(demo)
    charts = {(chart["section"], chart["title"]): chart for chart in browser.run(READ_CHARTS)}
    for title, keys in PPO_CHARTS.items():
        chart = charts["stage-1", title]
        expected = []
        for offset in (0.0, 0.5):
            lines = ppo_metrics(offset)
            expected += [[(line["step"], line[key]) for line in lines if key in line] for key in keys]
        assert [list(zip(t["x"], t["y"], strict=True)) for t in chart["data"]] == expected, title
        drawn = [[value for _, value in curve] for curve in expected]
        assert chart["markers"] == [sum(value is not None for value in values) for values in drawn], title
        assert chart["lines"] == [[n for n in runs_of_values(values) if n > 1] for values in drawn], title


def test_a_curve_of_one_point_is_a_marker_and_one_of_many_a_line(browser, demo):
    browser.open(demo)
    charts = {(chart["section"], chart["title"]): chart for chart in browser.run(READ_CHARTS)}
    one = charts["stage-3", "Loss"]
    assert [trace["y"] for trace in one["data"]] == [[2.5]]
    assert one["markers"] == [1]
    many = charts["stage-2", "Loss"]
    assert [len(trace["y"]) for trace in many["data"]] == [80, 2]
    assert many["lines"] == [[80], [2]]
    assert many["markers"][0] >= 1
    assert many["markers"][1] == 2


def test_every_bar_is_drawn(browser, demo):
    browser.open(demo)
    charts = [chart for chart in browser.run(READ_CHARTS) if chart["data"][0]["type"] == "bar"]
    assert {chart["title"] for chart in charts} == {
        "Time by phase",
        "Accuracy by kind of rejected response",
        "PPO",
        "MA-PPO",
        "Macro-action lengths",
    }
    for chart in charts:
        sideways = chart["title"].startswith(("Time", "Accuracy"))
        expected = [sum(bool(value) for value in trace["x" if sideways else "y"]) for trace in chart["data"]]
        assert chart["bars"] == expected, chart["title"]


def test_folded_charts_are_drawn_when_they_are_opened(browser, demo):
    browser.open(demo)
    assert "score_std" not in {chart["title"] for chart in browser.run(READ_CHARTS)}
    browser.run("document.querySelector('#stage-1 details').open = true")
    browser.driver.implicitly_wait(0)
    for _ in range(50):
        chart = next((c for c in browser.run(READ_CHARTS) if c["title"] == "score_std"), None)
        if chart and chart["markers"] == [6, 6]:
            break
        browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
    assert chart["lines"] == [[6], [6]]
    assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_fetched_and_nothing_complains(browser, demo, width, dark):
    browser.open(demo, width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.run("window.scrollTo(0, document.body.scrollHeight)")
    browser.driver.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.complaints() == []
    asked = browser.requests()
    assert asked[:1] == [demo.as_uri()]
    assert [address for address in asked[1:] if not address.startswith("data:")] == []


@pytest.mark.parametrize("width", [400, 320, 1280])
def test_the_page_is_never_wider_than_its_window(browser, demo, tmp_path, width):
    long = "x" * 4000
    samples = [{**sample, "tokens": [long, "b", "c"], "prompt": long} for sample in ppo_samples("one two")]
    metrics = [{**line, long: 1.0, "time/" + long: 1.0} for line in ppo_metrics()]
    status = {"state": "failed", "stage": "ppo", "step": 1, "message": long}
    folder = write_run(tmp_path / "run", status=status, config=f"a: {long}\n", metrics=metrics, samples=samples)
    table = Table(long, [long, "b"], [[long, "1"]], long)
    other = build_report({long: folder}, tmp_path / "long.html", title=long, tables=[table], notes=[long])
    for page in (demo, other):
        browser.open(page, width=width)
        browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        drawn = (
            "return Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().right))"
        )
        assert browser.run(drawn) <= width


def test_hostile_text_stays_text(browser, tmp_path):
    samples = [
        {**sample, "prompt": HOSTILE, "response": HOSTILE, "reference": HOSTILE, "tokens": [HOSTILE, HOSTILE, "b"]}
        for sample in ppo_samples("one two")
    ]
    folder = write_run(
        tmp_path / "run",
        status={"state": "interrupted", "stage": "ppo", "step": 1, "total_steps": 2, "message": HOSTILE},
        config=json.dumps({"key": HOSTILE}),
        metrics=[{**line, HOSTILE: 1.0, "time/" + HOSTILE: 1.0} for line in ppo_metrics()],
        evaluations=[{"step": 0, "scores": [1.0], "macro_lengths": {"1": 1}}],
        samples=samples,
    )
    table = Table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, HOSTILE]], HOSTILE)
    page = build_report({HOSTILE: folder}, tmp_path / "r.html", title=HOSTILE, tables=[table], notes=[HOSTILE])
    browser.open(page)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    # The hover label is drawn by Plotly, from the run's name.
    browser.run("""
        const chart = document.querySelector("[data-chart]");
        chart.scrollIntoView();
        Plotly.Fx.hover(chart, [{curveNumber: 0, pointNumber: 2}]);
    """)
    browser.driver.execute_async_script("setTimeout(arguments[0], 300)")
    hover = browser.run("return document.querySelector('.hoverlayer').textContent")
    assert "</script><script>" in hover
    assert browser.run("return window.pwned === undefined")
    assert browser.run("return document.querySelectorAll('main img, main script, header img').length") == 0
    assert browser.run("return document.title") == " ".join(SHOWN.split())
    assert browser.run("return document.querySelector('h1').textContent") == SHOWN
    token = browser.run("return document.querySelector('.token').textContent")
    assert token == SHOWN
    bold = "return [...document.querySelectorAll('.main-svg tspan')].some(s => s.style.fontWeight === 'bold')"
    assert browser.run(bold) is False
    assert browser.complaints() == []
    assert [address for address in browser.requests()[1:] if not address.startswith("data:")] == []


def test_the_policy_stops_a_script_that_slipped_through(browser, demo, tmp_path):
    source = demo.read_text(encoding="utf-8")
    hole = '<script>window.pwned=1</script><img src="https://example.invalid/x.png" onerror="window.pwned=2">'
    page = tmp_path / "hole.html"
    page.write_text(source.replace("A note.", hole), encoding="utf-8")
    assert hole in page.read_text(encoding="utf-8")
    browser.open(page)
    assert browser.run("return window.pwned === undefined")
    assert sum("Content Security Policy" in message for message in browser.complaints()) >= 2


def test_dark_and_light_differ_and_text_is_legible_in_both(browser, demo):
    """WCAG AA: 4.5:1 for every piece of text against what is behind it."""
    script = """
    const luminance = rgb => {
      const [r, g, b] = rgb.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = element => {
      for (let e = element; e; e = e.parentElement) {
        const colour = getComputedStyle(e).backgroundColor;
        if (!colour.includes("rgba") && colour !== "transparent") return colour;
      }
      return "rgb(255, 255, 255)";
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const worst = [];
    while (walker.nextNode()) {
      const parent = walker.currentNode.parentElement;
      if (!walker.currentNode.textContent.trim() || parent.closest("script, style, noscript, progress")) continue;
      const svg = parent.closest("svg");
      const front = svg ? getComputedStyle(parent).fill : getComputedStyle(parent).color;
      const [low, high] = [luminance(front), luminance(behind(svg ? svg.parentElement : parent))].sort((a, b) => a - b);
      worst.push([(high + 0.05) / (low + 0.05), walker.currentNode.textContent.trim().slice(0, 40), front]);
    }
    return [worst.length, worst.sort((a, b) => a[0] - b[0])[0], getComputedStyle(document.body).backgroundColor];
    """
    backgrounds = set()
    for dark in (False, True):
        browser.open(demo, dark=dark)
        count, worst, background = browser.run(script)
        assert count > 300
        assert worst[0] >= 4.5, worst
        backgrounds.add(background)
    assert len(backgrounds) == 2


def test_macro_actions_are_told_apart_by_edge_as_well_as_colour(browser, demo):
    browser.open(demo)
    look = browser.run("""
        return ["even", "odd"].map(kind => {
          const style = getComputedStyle(document.querySelector("#samples .answer .macro." + kind));
          return [style.backgroundColor, style.boxShadow];
        })
    """)
    assert look[0][0] != look[1][0]
    assert all("inset" in shadow for _, shadow in look)


def test_headings_nest_and_everything_that_needs_a_name_has_one(browser, demo):
    browser.open(demo)
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))")
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    nameless = browser.run("""
        const name = e => e.getAttribute("aria-label")
          || document.getElementById(e.getAttribute("aria-labelledby") || "")?.textContent;
        return [...document.querySelectorAll("[role=img], [role=region], section, nav, table, progress")]
          .filter(e => !name(e)).map(e => e.outerHTML.slice(0, 80));
    """)
    assert nameless == []


def test_paper_shows_the_charts_within_the_page(browser, demo):
    browser.open(demo)
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    browser.driver.execute_async_script("setTimeout(arguments[0], 500)")
    width = browser.run("return document.querySelector('main').getBoundingClientRect().width")
    # A4 has 210 mm, less 2 x 10 mm of margin, at 96 pixels per inch.
    assert width <= 190 / 25.4 * 96
    fits = """return [...document.querySelectorAll('.plot')].filter(p => p.data).every(p =>
        p.querySelector('.main-svg').getBoundingClientRect().right <= p.getBoundingClientRect().right + 1)"""
    assert browser.run(fits)
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    browser.driver.execute_async_script("setTimeout(arguments[0], 500)")
    assert browser.run("return document.querySelector('main').getBoundingClientRect().width") > width
    assert browser.run(fits)
