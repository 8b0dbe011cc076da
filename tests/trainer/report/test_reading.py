"""Run folders as killed, resumed and edited runs leave them."""

import json

import pytest

from marlhf.errors import UserError
from marlhf.report.reading import Curve, read_run, read_runs
from tests.trainer.report.folders import write_lines, write_ppo, write_run


def test_a_whole_run(tmp_path):
    run = read_run("run", write_ppo(tmp_path / "run", config="a: {b: [1, 2], c: x}\nd:\n"))
    assert (run.stage, run.state, run.step, run.total_steps, run.seconds) == ("ppo", "finished", 6, 6, 12.0)
    assert run.problems == []
    assert run.curves["ppo"]["eval/score"] == Curve([0, 3, 6], pytest.approx([0.0, 0.27, 0.54]))
    assert run.curves["ppo"]["value_loss"].values == [1.0, 1 / 2, 1 / 3, None, 1 / 5, 1 / 6]
    assert not {"stage", "step", "seconds"} & set(run.curves["ppo"])
    assert [evaluation.step for evaluation in run.evaluations] == [0, 3, 6]
    assert run.evaluations[-1].macro_lengths == {1: 20, 5: 60}
    assert len(run.samples) == 6
    assert run.config == {"a.b": "[1, 2]", "a.c": "x", "d": "null"}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_cut_anywhere_is_left_out_and_said(tmp_path, cut):
    whole = '{"stage": "sft", "step": 1, "loss": 2.0}\n'
    broken = '{"stage": "sft", "step": 2, "k\u00e9": 1.5}'.encode()[:cut]
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_bytes(whole.encode() + broken)
    run = read_run("run", folder)
    if cut == 39:  # everything but the line break
        assert run.curves["sft"]["k\u00e9"] == Curve([2], [1.5])
    else:
        assert run.curves["sft"] == {"loss": Curve([1], [2.0])}
        assert any("the last line is broken" in problem for problem in run.problems)


def test_a_broken_line_in_the_middle_is_named_by_its_number(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(
        '{"stage":"sft","step":1,"loss":1}\n\n[3]\n{"stage":"sft","step":2,"loss":2}\n'
    )
    run = read_run("run", folder)
    assert run.curves["sft"]["loss"] == Curve([1, 2], [1.0, 2.0])
    assert any("metrics.jsonl, line 3" in problem for problem in run.problems)


def test_what_is_not_finite_is_a_gap_and_what_is_not_a_number_is_no_metric(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(
        '{"stage":"sft","step":1,"a":NaN,"b":-Infinity,"c":1e999,"d":null,"e":1' + "0" * 400 + ',"f":true,"g":"x"}\n'
    )
    curves = read_run("run", folder).curves["sft"]
    assert {key: curve.values for key, curve in curves.items()} == {key: [None] for key in "abcde"}


def test_after_a_resume_the_later_line_counts(tmp_path):
    steps = [1, 2, 3, 2, 3, 4]
    lines = [{"stage": "sft", "step": step, "loss": float(place)} for place, step in enumerate(steps)]
    run = read_run("run", write_run(tmp_path / "run", metrics=lines))
    assert run.curves["sft"]["loss"] == Curve([1, 2, 3, 4], [0.0, 3.0, 4.0, 5.0])
    assert any("2 lines repeated a step" in problem for problem in run.problems)


def test_lines_of_different_kinds_for_one_step_are_no_repetition(tmp_path):
    lines = [{"stage": "ppo", "step": 1, "score": 1.0}, {"stage": "ppo", "step": 1, "eval/score": 2.0}]
    run = read_run("run", write_run(tmp_path / "run", status={"state": "running"}, metrics=lines))
    assert run.problems == []


def test_scores_that_are_not_finite_are_counted(tmp_path):
    folder = write_run(tmp_path / "run")
    write_lines(folder / "evaluations.jsonl", [{"step": 0, "scores": [1.0, None, 2.0], "macro_lengths": {"x": 1}}])
    (evaluation,) = read_run("run", folder).evaluations
    assert (evaluation.scores, evaluation.left_out, evaluation.macro_lengths) == ([1.0, 2.0], 1, {})


def test_a_sample_with_other_numbers_of_tokens_and_macro_ids_is_plain_text(tmp_path):
    folder = write_run(tmp_path / "run")
    sample = {"step": 0, "prompt": "p", "response": "r s", "tokens": ["r", " s"], "macro_ids": [0]}
    write_lines(folder / "samples.jsonl", [sample, {"step": 0}, {**sample, "macro_ids": [0, None]}])
    run = read_run("run", folder)
    assert [(entry.tokens, entry.macro_ids) for entry in run.samples] == [([], []), (["r", " s"], [0, -1])]
    assert run.stage == "ppo"
    assert sum("samples.jsonl" in problem for problem in run.problems) == 2


@pytest.mark.parametrize("content", ["", "[1]", '{"state": "odd"}', "{", '{"state": ["running"]}'])
def test_a_status_that_says_nothing(tmp_path, content):
    folder = write_run(tmp_path / "run")
    (folder / "status.json").write_text(content)
    run = read_run("run", folder)
    assert run.state == ""
    assert any("status.json" in problem for problem in run.problems)


def test_a_broken_configuration_is_still_shown(tmp_path):
    run = read_run("run", write_run(tmp_path / "run", config="a: [1\n"))
    assert (run.config, run.config_text) == ({}, "a: [1\n")
    assert any("config.yaml" in problem for problem in run.problems)


def test_any_json_value_in_any_place_is_survived(tmp_path):
    values = [None, True, 0, -1.5, "x", [], [1, "a", None], {}, {"a": {"b": []}}]
    keys = ["stage", "step", "seconds", "score", "scores", "macro_lengths", "prompt", "response", "tokens"]
    keys += ["macro_ids", "kl", "reference"]
    good = {"stage": "ppo", "step": 0, "scores": [1.0], "prompt": "p", "response": "r", "tokens": ["r"]}
    lines = [{**good, "macro_ids": [0], key: value} for key in keys for value in values] + values
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run("run", folder)
    assert run.curves
    assert run.evaluations
    assert run.samples


def test_folders_that_are_none(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no such run folder"):
        read_run("run", tmp_path / "missing")
    with pytest.raises(UserError, match="no such run folder"):
        read_run("run", tmp_path / "file")
    with pytest.raises(UserError, match="not a run folder"):
        read_run("run", tmp_path / "other")
    with pytest.raises(UserError, match="at least one"):
        read_runs({})
