"""The demo's plumbing: children side by side, what the tables say, and a tiny demo from end to end."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from marlhf import progress
from marlhf.config import load_config
from marlhf.demo import children, results, run
from marlhf.demo.children import Job, run_side_by_side
from marlhf.demo.results import Interval, policy_table, reward_table, verdicts, wilson_lower
from marlhf.demo.settings import SETTINGS, demo_config
from marlhf.errors import UserError
from marlhf.report.reading import read_run
from tests.trainer.children import Child
from tests.trainer.tiny import leftovers, read_jsonl, status

# Children side by side. The interpreter is replaced by a shell that runs a job's last override.


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run jobs in."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ncd "$(dirname "$0")"\nfor last; do :; done\neval "$last"\n')
    program.chmod(0o755)
    monkeypatch.setattr(children.sys, "executable", str(program))
    return tmp_path


def job(folder: Path, name: str, command: str) -> Job:
    return Job(name, "sft", folder / name, (command,), 10, "loss")


def side_by_side(folder: Path, *jobs: Job, at_once: int = 2) -> None:
    run_side_by_side(jobs, config=folder / "demo.yaml", logs=folder / "logs", at_once=at_once)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def test_jobs_run_in_order_at_most_so_many_at_a_time(shell: Path) -> None:
    command = "echo + >> events; sleep 0.5; echo - >> events; echo $0 is done"
    side_by_side(shell, *(job(shell, name, command) for name in "abc"))
    events = (shell / "events").read_text().split()
    running = [events[: i + 1].count("+") - events[: i + 1].count("-") for i in range(len(events))]
    assert len(events) == 6
    assert max(running) == 2
    assert "is done" in (shell / "logs" / "c.log").read_text()
    (shell / "events").unlink()
    side_by_side(shell, *(job(shell, name, command) for name in "abc"), at_once=1)
    assert (shell / "events").read_text().split() == ["+", "-"] * 3


def test_each_job_gets_one_thread_and_its_own_words(shell: Path) -> None:
    side_by_side(shell, job(shell, "a", 'echo "$@" > words; echo $OMP_NUM_THREADS > threads'))
    words = (shell / "words").read_text()
    assert words.startswith(f"-m marlhf sft --config {shell}/demo.yaml threads=1 ")
    assert (shell / "threads").read_text().strip() == "1"


def test_a_job_that_fails_is_quoted_and_stops_the_others(shell: Path) -> None:
    waiting = job(shell, "patient", "echo $$ > patient.pid; exec sleep 100")
    failing = job(shell, "failing", "while ! test -e patient.pid; do sleep 0.05; done; echo the reason; exit 3")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"failing failed; from .*failing.log:\nthe reason"):
        side_by_side(shell, waiting, failing, job(shell, "later", "touch later"))
    assert time.monotonic() - started < 60
    assert not any(alive(pid) for pid in pids(shell))
    assert not (shell / "later").exists()


def test_an_interruption_stops_all_jobs(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way a stage is told to stop: by a signal that it can answer."""
    answers = "trap 'touch {0}.told; exit 130' TERM; echo $$ > {0}.pid; while :; do sleep 0.05; done"
    jobs = [job(shell, name, answers.format(name)) for name in "ab"]

    def interrupted(self: Any, words: str = "", *, to: int | None = None) -> None:
        if len(pids_written(shell)) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Loop, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(shell, *jobs)
    assert not any(alive(pid) for pid in pids(shell))
    assert (shell / "a.told").exists()
    assert (shell / "b.told").exists()


def pids_written(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.pid") if file.stat().st_size]


def test_an_interruption_between_two_starts_forgets_no_job(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second process is being started: both are stopped."""
    original = children.subprocess.Popen

    def started(*arguments: Any, **settings: Any) -> Any:
        process = original(*arguments, **settings)
        if len(list(shell.glob("logs/*.log"))) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return process

    monkeypatch.setattr(children.subprocess, "Popen", started)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(shell, *(job(shell, name, f"echo $$ > {name}.pid; exec sleep 100") for name in "ab"))
    assert signal.getsignal(signal.SIGINT) == handler
    # They are children of this process: once waited for, they are gone.
    assert len(pids(shell)) == 2
    assert not any(alive(pid) for pid in pids(shell))


def test_a_job_that_does_not_listen_is_killed(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "SECONDS_TO_STOP", 0.5)
    deaf = job(shell, "deaf", "trap '' TERM; echo $$ > deaf.pid; while :; do sleep 0.05; done")
    failing = job(shell, "failing", "while ! test -s deaf.pid; do sleep 0.05; done; exit 1")
    with pytest.raises(UserError, match="failing failed"):
        side_by_side(shell, deaf, failing)
    assert not any(alive(pid) for pid in pids(shell))


def test_progress_is_read_from_the_run_folder(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int | None, str]] = []
    monkeypatch.setattr(progress.Loop, "advance", lambda self, words="", *, to=None: seen.append((to, words)))
    lines = '{"step": 3, "loss": 1.0}\\n{"step": 4, "loss": 0.25}\\n'
    side_by_side(shell, job(shell, "a", f"mkdir a; printf '{lines}' > a/metrics.jsonl; sleep 1"))
    assert seen[-1] == (4, "loss 0.25")
    side_by_side(shell, job(shell, "b", "mkdir b; printf 'not json' > b/metrics.jsonl"))
    assert seen[-1] == (0, "")


# What the tables say


def test_wilson_interval_by_hand() -> None:
    """8 of 10: centre (.8 + .19208) / 1.38416 less .24798; textbook value .4902."""
    assert wilson_lower(8, 10) == pytest.approx(0.4902, abs=1e-4)
    assert wilson_lower(0, 10) == pytest.approx(0.0, abs=1e-9)
    assert wilson_lower(0, 0) == 0.0
    assert wilson_lower(500, 1000) < 0.5 < wilson_lower(540, 1000)


def test_interval_by_hand() -> None:
    """1, 2, 3, 4: mean 2.5, deviation 1.29099, half-width 1.96 * 1.29099 / 2."""
    interval = Interval.of([1.0, 2.0, 3.0, 4.0])
    assert interval.mean == 2.5
    assert interval.half == pytest.approx(1.26517, abs=1e-5)
    assert str(interval) == "2.50 ± 1.27"


def measured(score: float, unseen: float, *, spread: float = 0.1) -> dict[str, Any]:
    around = [-spread, spread] * 50
    return {
        "score": [score + x for x in around],
        "unseen": [unseen + x for x in around],
        "kl": [1.0] * 100,
        "length": [10.0] * 100,
        "stopped": [1.0] * 100,
        "wall": 12.0,
        "rouge_l": [0.25] * 100,
        "distinct_2": 0.5,
        "repeated_3": 0.015,
    }


def test_verdicts_say_what_came_out() -> None:
    """Above only by more than both intervals; what fell is said to have fallen."""
    policies = {
        "SFT": measured(0.0, 0.5),
        "token PPO": measured(1.0, 0.2),
        "macro-action PPO": measured(0.01, 0.5),
        "real summaries": {"score": [1.0] * 100, "unseen": [1.0] * 100},
    }
    token, macro, *_ = verdicts(policies)
    assert token.startswith("token PPO ended above SFT")
    assert "fell under the unseen one (-0.30)" in token
    assert macro.startswith("macro-action PPO ended not clearly above SFT")
    assert "did not fall under the unseen one" in macro
    lower = verdicts({**policies, "token PPO": measured(-1.0, 0.5)})[0]
    assert lower.startswith("token PPO ended below SFT")


def test_tables_print_what_was_measured() -> None:
    policies = {name: measured(0.0, 0.5) for name in results.POLICIES}
    table = policy_table({**policies, "real summaries": {key: [1.0] * 100 for key in ("score", "unseen", "length")}})
    cells = [" | ".join(map(str, row)) for row in table.rows]
    assert any("0.00 ± 0.02" in row and "1.00 ± 0.00" in row for row in cells)
    assert any("0.250" in row and row.endswith("-") for row in cells)
    assert any("1.5%" in row for row in cells)
    counts = {name: {"all": (80, 100), "other": (30, 50), "sample": (50, 50)} for name in results.REWARD_MODELS}
    rows = [list(map(str, row)) for row in reward_table(counts).rows]
    assert [row[0] for row in rows][-1] == "all pairs (100)"
    assert rows[0][1].startswith("60% (> 46%)")


def test_every_scale_is_a_configuration_that_loads(tmp_path: Path) -> None:
    for name, settings in SETTINGS.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(demo_config(str(tmp_path / "demo"), settings, seed=3)))
        config = load_config(file)
        assert config.seed == 3
        assert config.ppo.termination.rule == "fixed"
        assert config.ppo.termination.n == 5
        assert config.ppo.iterations == settings.ppo_iterations
        assert config.ppo.kl_coef > 0


def test_a_scale_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`--scale` is 'tiney'.*Did you mean `tiny`"):
        run.run_demo(tmp_path / "demo", scale="tiney")
    assert list(tmp_path.iterdir()) == []


# From end to end

STAGES = ("sft", "reward", "reward_unseen", "reward_no_prompt", "ppo_token", "ppo_macro")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Docstrings are read once for all demos here, and not into the user's own cache."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_demo(tmp_path: Path, cache: str) -> None:
    folder = tmp_path / "demo"
    arguments = ["-m", "marlhf", "demo", "--folder", str(folder), "--scale", "tiny", "--seed", "1"]
    with Child(arguments, tmp_path / "log", MARLHF_CACHE=cache, COLUMNS="120") as child:
        assert child.process.wait(800) == 0, child.output
        assert not child.group_lives()
        output = child.output
    for stage in STAGES:
        assert status(folder / stage)["state"] == "finished"
        assert (folder / stage / "final" / "model.safetensors").is_file()
        assert read_run(stage, folder / stage).problems == []
    assert leftovers(folder) == []
    found = json.loads((folder / "results.json").read_text())
    assert found["policies"].keys() == {"SFT", "token PPO", "macro-action PPO", "real summaries"}
    assert found["accuracy"].keys() == {"reward model", "unseen", "no prompt"}
    assert found["policies"]["SFT"]["kl"]["mean"] == pytest.approx(0.0, abs=1e-4)
    for name in ("reward model", "unseen reward model", "ROUGE-L", "KL to SFT", "stopped itself", "repeated trigrams"):
        assert name in output
    for note in found["notes"]:
        assert note[:40] in output
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    # The two reward models share no pair, and no test response was trained on.
    pairs = {name: read_jsonl(folder / "data" / f"pairs_{name}.jsonl") for name in ("train", "train_b", "test")}
    assert not {row["chosen"] for row in pairs["train"]} & {row["chosen"] for row in pairs["test"]}
    seen = [{(row["prompt"], row["chosen"]) for row in pairs[name]} for name in ("train", "train_b")]
    assert seen[0]
    assert not seen[0] & seen[1]
    # Side by side with the same seed: the two runs differ in their termination rule alone.
    texts = [(folder / f"ppo_{name}" / "config.yaml").read_text().splitlines() for name in ("token", "macro")]
    differ = {line.split(":")[0].strip() for pair in zip(*texts, strict=True) for line in pair if len(set(pair)) > 1}
    assert differ == {"run_folder", "rule", "path"} or differ == {"run_folder", "rule"}
    again = [*arguments[:-1], "2"]
    with Child(again, tmp_path / "log") as child:
        assert child.returncode() == 2
        assert "is not empty" in child.output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["alone", "group", "terminated"])
@pytest.mark.parametrize("moment", ["sft/metrics.jsonl", "logs/reward.log", "ppo_token/metrics.jsonl"])
def test_a_demo_that_is_interrupted(tmp_path: Path, cache: str, moment: str, how: str) -> None:
    """Exit code 130, every run folder says how it ended, no half-written policy and no process left; whether Ctrl-C
    reached the demo alone or, as from a terminal, its stages too, and also for SIGTERM."""
    folder = tmp_path / "demo"
    arguments = ["-m", "marlhf", "demo", "--folder", str(folder), "--scale", "tiny"]
    with Child(arguments, tmp_path / "log", MARLHF_CACHE=cache) as child:
        child.wait_for((folder / moment).exists)
        child.interrupt(signal.SIGTERM if how == "terminated" else signal.SIGINT, group=how == "group")
        assert child.returncode() == 130, child.output
        assert not child.group_lives()
        assert "Traceback" not in child.output
    assert leftovers(folder) == []
    for stage in STAGES:
        if not (folder / stage).exists():
            continue
        found = status(folder / stage)
        assert found["state"] in ("finished", "interrupted"), (stage, found)
        assert (folder / stage / "final").exists() == (found["state"] == "finished")
        if (folder / stage / "metrics.jsonl").exists():
            read_jsonl(folder / stage / "metrics.jsonl")
