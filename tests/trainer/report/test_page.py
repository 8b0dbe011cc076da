"""The page as a file: complete, self-contained, and with nothing in it that was text and became markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

import marlhf.files
from marlhf.errors import UserError
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

VOID = {"meta", "link", "img", "br", "hr", "input", "path", "rect"}


class Page(HTMLParser):
    """The elements and text of a page; fails on tags that do not nest."""

    def __init__(self, file):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self._open = [], [], []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def attributes(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def figures(self):
        return json.loads(re.search(r'id="figures">(.*?)</script>', self.source, re.DOTALL).group(1))


def build(tmp_path, runs, **options):
    return Page(build_report(runs, tmp_path / "out" / "report.html", **{"title": "A title", **options}))


@pytest.fixture
def demo(tmp_path):
    runs = {
        "SFT": write_sft(tmp_path / "sft"),
        "RM": write_reward(tmp_path / "rm"),
        "PPO": write_ppo(tmp_path / "ppo", config="a: 1\nppo: {n: 1}\n"),
        "MA-PPO": write_ppo(tmp_path / "ma", 0.5, config="a: 1\nppo: {n: 5}\n"),
    }
    table = Table("Final table", ["policy", "score"], [["SFT", "-0.1"], ["PPO", "0.9"]], "The caption.")
    return build(tmp_path, runs, tables=[table], notes=["A first note."])


def test_every_section_is_there_in_order(demo):
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", demo.source)
    assert headings == [
        "Runs",
        "Results",
        "PPO",
        "Scores before and after",
        "Macro actions",
        "Samples",
        "Reward model",
        "Supervised fine-tuning",
        "Configuration",
        "Notes",
    ]
    ids = {attrs["id"] for _, attrs in demo.elements if attrs.get("id")}
    links = [attrs["href"] for attrs in demo.attributes("a")]
    assert {link.removeprefix("#") for link in links} <= ids
    for text in ("Final table", "The caption.", "A first note.", "-0.1", "A title"):
        assert text in demo.text


def test_a_run_that_did_not_finish_says_where(demo, tmp_path):
    assert "Interrupted at Supervised fine-tuning, optimiser step 1 of 40. 1 of 40 stopped on request" in demo.text
    status = {"state": "failed", "stage": "ppo", "step": 7, "total_steps": 20, "message": "out of memory"}
    page = build(tmp_path, {"run": write_run(tmp_path / "failed", status=status)})
    assert "Failed at PPO, iteration 7 of 20. 7 of 20 out of memory" in page.text


def test_identifiers_are_unique_and_every_chart_has_its_figure(demo):
    ids = [attrs["id"] for _, attrs in demo.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    charts = [attrs["data-chart"] for attrs in demo.attributes("div") if "data-chart" in attrs]
    assert sorted(charts) == sorted(demo.figures())
    assert len(charts) > 20
    labels = [attrs["aria-label"] for attrs in demo.attributes("div") if "data-chart" in attrs]
    assert all(labels)


def test_nothing_is_fetched(demo):
    without_plotly = demo.source.replace(
        max(re.findall(r"<script>(.*?)</script>", demo.source, re.DOTALL), key=len), ""
    )
    # The namespace of inline SVG is implied in HTML, so no address of any kind is left.
    assert "http:" not in without_plotly
    assert "https:" not in without_plotly
    assert "//" not in re.sub(r"(?m)(?<![:\w])// [^\n]*$", "", without_plotly)
    for _, attrs in demo.elements:
        assert not {"src", "srcset", "data", "action"} & set(attrs)
        assert attrs.get("href", "#").startswith(("#", "data:"))
    style = re.search(r"<style>(.*?)</style>", demo.source, re.DOTALL).group(1)
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_admits_exactly_the_two_scripts(demo):
    (policy,) = [attrs["content"] for attrs in demo.attributes("meta") if "http-equiv" in attrs]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", demo.source, re.DOTALL)
    assert len(scripts) == 2
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert sum("plotly.js v" in script for script in scripts) == 1


def test_hostile_text_in_every_place_stays_text(tmp_path):
    metrics = [{**line, HOSTILE: 1.0, "time/" + HOSTILE: 2.0} for line in ppo_metrics()]
    metrics.append({"stage": HOSTILE, "step": 1, HOSTILE: 1.0})
    samples = [
        {**sample, "prompt": HOSTILE, "response": HOSTILE, "reference": HOSTILE, "tokens": [HOSTILE, "x" * 3000, "b"]}
        for sample in ppo_samples("one two")
    ]
    runs = {
        HOSTILE: write_run(
            tmp_path / "a",
            status={"state": "failed", "stage": "ppo", "step": 1, "message": HOSTILE},
            config=json.dumps({"key": HOSTILE, HOSTILE: 1}),
            metrics=metrics,
            samples=samples,
        ),
        HOSTILE + "2": write_run(tmp_path / "b", status={"state": "running", "stage": "ppo"}, config="key: 1\n"),
    }
    table = Table(HOSTILE, [HOSTILE, "b"], [[HOSTILE, HOSTILE]], HOSTILE)
    hostile = build(tmp_path, runs, title=HOSTILE, tables=[table], notes=[HOSTILE])

    assert len(hostile.attributes("script")) == 3
    assert hostile.attributes("img") == []
    assert not any(name.startswith("on") for _, attrs in hostile.elements for name in attrs)
    shown = " ".join(SHOWN.split())
    assert hostile.text.count(shown) > 20
    assert not set("\0\x1b\u2028\u202e") & set(hostile.source)
    title = re.findall(r"<title>(.*?)</title>", hostile.source)
    assert title[0].startswith("&lt;/script&gt;")
    # Plotly reads tags in what it draws: none may be left in names, ticks or titles but its own line breaks.
    drawn = json.dumps(
        [
            [figure["layout"], [{**trace, "hovertemplate": ""} for trace in figure["data"]]]
            for figure in hostile.figures().values()
        ]
    )
    assert "<" not in drawn


def test_samples_show_macro_actions_token_by_token(tmp_path):
    samples = [
        {
            "step": step,
            "prompt": "the prompt",
            "response": "Join the\npaths",
            "tokens": ["Join", " the", "\n", "paths", "<pad>"],
            "macro_ids": [0, 0, 1, 1, -1],
            "score": 1.234 + step,
            "kl": None,
            "reference": None,
        }
        for step in (0, 5, 9)
    ]
    page = build(tmp_path, {"run": write_run(tmp_path / "run", metrics=ppo_metrics(), samples=samples)})
    (section,) = re.findall(r'<section id="samples".*?</section>', page.source, re.DOTALL)
    responses = re.findall(r'<bdi class="response">(.*?)</bdi>', section, re.DOTALL)
    assert len(responses) == 2  # before and after, not the one between
    assert [re.sub(r"<[^>]*>", "", response) for response in responses] == ["Join the\npaths&lt;pad&gt;"] * 2
    assert re.findall(r'class="macro (\w+)"', responses[0]) == ["even", "odd", "outside"]
    assert re.findall(r'class="token" title="([^"]*)"', responses[0]) == [
        "&#34;Join&#34; \u2013 macro action 0",
        "&#34; the&#34; \u2013 macro action 0",
        "&#34;\\n&#34; \u2013 macro action 1",
        "&#34;paths&#34; \u2013 macro action 1",
        "&#34;&lt;pad&gt;&#34; \u2013 outside any macro action",
    ]
    assert "1.23" in section
    assert "10.23" in section
    assert "6.23" not in section
    assert "before training" in section
    assert "iteration 9" in section


def test_samples_of_several_runs_stand_under_their_prompt(demo):
    (section,) = re.findall(r'<section id="samples".*?</section>', demo.source, re.DOTALL)
    articles = re.findall(r"<article.*?</article>", section, re.DOTALL)
    assert len(articles) == 2
    for article in articles:
        who = re.findall(r'<p class="who">.*?<bdi>(.*?)</bdi><span class="aside">(.*?)</span>', article, re.DOTALL)
        assert who == [(run, when) for run in ("PPO", "MA-PPO") for when in ("before training", "iteration 6")]


def test_configurations_differ_where_they_differ(demo):
    (section,) = re.findall(r'<section id="configuration".*?</section>', demo.source, re.DOTALL)
    rows = re.findall(r"<tr><th scope=\"row\"><code>(.*?)</code></th>(.*?)</tr>", section)
    assert [(key, re.findall(r"<code>(.*?)</code>", cells)) for key, cells in rows] == [("ppo.n", ["1", "5"])]
    assert section.index("what differs") < section.index("<details>")
    assert len(re.findall(r"<details>", section)) == 4


def test_what_is_missing_is_said(tmp_path):
    page = build(
        tmp_path, {"bare": write_run(tmp_path / "a", status={"state": "running", "stage": "ppo"}, config=None)}
    )
    for text in (
        "There is nothing in metrics.jsonl yet of: bare.",
        "There is no evaluation in evaluations.jsonl yet of: bare.",
        "There are no macro-action lengths in evaluations.jsonl yet of: bare.",
        "There are no samples in samples.jsonl yet of: bare.",
        "There is no config.yaml of: bare.",
    ):
        assert text in page.text
    assert page.figures() == {}
    cut = write_run(tmp_path / "b", config=None, metrics=[{"stage": "sft", "step": 1, "loss": 1.0}])
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sf')
    assert "the last line is broken" in build(tmp_path, {"cut": cut}).text


@pytest.mark.parametrize(
    "missing", ["status.json", "config.yaml", "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"]
)
def test_any_file_may_be_missing(tmp_path, missing):
    folder = write_ppo(tmp_path / "run")
    (folder / missing).unlink()
    build(tmp_path, {"run": folder})


def test_the_same_runs_give_the_same_page(tmp_path):
    runs = {"run": write_ppo(tmp_path / "run")}
    assert build(tmp_path, runs).source == build(tmp_path, runs).source


def test_bad_places_are_refused(tmp_path):
    folder = write_ppo(tmp_path / "run")
    with pytest.raises(UserError, match="at least one"):
        build_report({}, tmp_path / "r.html", title="t")
    with pytest.raises(UserError, match="not a run folder"):
        build_report({"run": tmp_path}, tmp_path / "r.html", title="t")
    with pytest.raises(UserError, match="this is a folder"):
        build_report({"run": folder}, tmp_path, title="t")
    with pytest.raises(UserError, match="cannot be written"):
        build_report({"run": folder}, folder / "config.yaml" / "r.html", title="t")
    assert not (tmp_path / "r.html").exists()


def test_a_page_that_cannot_be_completed_leaves_the_old_one(tmp_path, monkeypatch):
    folder = write_ppo(tmp_path / "run")
    output = build_report({"run": folder}, tmp_path / "report.html", title="old")
    before = output.read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(marlhf.files.os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        build_report({"run": folder}, output, title="new")
    assert output.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["report.html", "run"]
