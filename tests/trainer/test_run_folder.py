"""A run's folder is whole at every moment, and says how the run ended."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from marlhf import files as module
from marlhf.config import load_config
from marlhf.errors import ConfigError, UserError
from marlhf.files import write_folder_atomically, write_json, write_text_atomically
from marlhf.report.reading import read_run
from marlhf.run_folder import RunFolder, check_free
from tests.trainer.tiny import leftovers, read_jsonl, status


def start(path: Path, *, total: int = 10) -> RunFolder:
    return RunFolder(path, config=load_config(None, ["seed=9"]), stage="ppo", total_steps=total, key="ppo.run_folder")


def run(path: Path, *, step: int, work: Callable[[], object]) -> None:
    """A run that logs one step and then does `work`."""
    with start(path) as folder:
        folder.log(step, {"score": 0.5})
        work()


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def interrupting(number: signal.Signals) -> Callable[[Path, str], None]:
    """Writes a file as ever, but a signal arrives at that moment."""

    def write(path: Path, text: str) -> None:
        kill(number)
        write_text_atomically(path, text)

    return write


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "er" / "file.txt"
    write_text_atomically(file, "old")
    assert file.read_text() == "old"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_text_atomically(file, "new")
    assert [path.name for path in file.parent.iterdir()] == ["file.txt"]
    assert file.read_text() == "old"
    write_text_atomically(file, "new")
    assert file.read_text() == "new"
    assert leftovers(tmp_path) == []


def test_what_json_does_not_know_becomes_null(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    write_json(file, {"a": [math.nan, math.inf, 1.5], "b": torch.tensor(-math.inf), "c": (torch.tensor(3), "ü")})
    text = file.read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {"a": [None, None, 1.5], "b": None, "c": [3, "ü"]}


@pytest.mark.parametrize(("failure", "told"), [(KeyboardInterrupt, KeyboardInterrupt), (OSError, UserError)])
def test_a_folder_appears_only_when_it_is_complete(
    tmp_path: Path, failure: type[BaseException], told: type[BaseException]
) -> None:
    folder = tmp_path / "final"

    def broken(path: Path) -> None:
        assert not (folder / "half").exists()
        (path / "half").write_text("half")
        raise failure

    def whole(path: Path) -> None:
        (path / "a").write_text("first")
        (path / "inner").mkdir()

    with pytest.raises(told):
        write_folder_atomically(folder, broken)
    assert list(tmp_path.iterdir()) == []
    write_folder_atomically(folder, whole)
    with pytest.raises(told):
        write_folder_atomically(folder, broken)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "inner"]
    write_folder_atomically(folder, lambda path: (path / "b").write_text("second") and None)
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    assert check_free(tmp_path / "new", key="x") == tmp_path / "new"
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", key="x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"`ppo.run_folder`.* is a file"):
        check_free(tmp_path / "file", key="ppo.run_folder")
    with pytest.raises(ConfigError, match=r"`ppo.run_folder`.* is not empty"):
        check_free(tmp_path, key="ppo.run_folder")
    with pytest.raises(ConfigError, match="is not empty"):
        start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_finished_run(tmp_path: Path) -> None:
    with start(tmp_path / "run", total=2) as folder:
        assert status(folder.path) == {"state": "running", "stage": "ppo", "step": 0, "total_steps": 2, "message": ""}
        folder.log(1, {"score": 0.5, "kl": math.nan})
        folder.log(2, {"score": torch.tensor(0.75), "time/update": 2})  # type: ignore[dict-item]
        folder.sample({"step": 2, "response": "half a pair \ud800, \u2028, \0 and ü"})
        folder.evaluation({"step": 2, "scores": [1.0, math.inf]})
    assert status(folder.path)["state"] == "finished"
    assert status(folder.path)["step"] == 2
    lines = read_jsonl(folder.path / "metrics.jsonl")
    assert [(line["stage"], line["step"], line["score"]) for line in lines] == [("ppo", 1, 0.5), ("ppo", 2, 0.75)]
    assert lines[0]["kl"] is None
    assert 0 <= lines[0]["seconds"] <= lines[1]["seconds"]
    sample = json.loads((folder.path / "samples.jsonl").read_bytes())
    assert sample["response"] == "half a pair \ud800, \u2028, \0 and ü"
    assert read_jsonl(folder.path / "evaluations.jsonl") == [{"step": 2, "scores": [1.0, None]}]
    assert leftovers(tmp_path) == []


def test_the_configuration_lies_beside_the_results(tmp_path: Path) -> None:
    with start(tmp_path / "run") as folder:
        pass
    assert load_config(folder.path / "config.yaml") == load_config(None, ["seed=9"])


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    with start(tmp_path / "run") as folder:
        folder.log(1, {"score": 0.5, "eval/score": 0.25})
        folder.log(2, {"score": 0.75})
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/score", "ppo/score"]
    assert [(event.step, event.value) for event in events.Scalars("ppo/score")] == [(1, 0.5), (2, 0.75)]


def test_the_report_reads_it_without_complaint(tmp_path: Path) -> None:
    with start(tmp_path / "run") as folder:
        folder.log(0, {"eval/score": 0.1})
        folder.log(1, {"score": 0.5})
    found = read_run("a", folder.path)
    assert found.problems == []
    assert (found.state, found.stage, found.step, found.total_steps) == ("finished", "ppo", 1, 10)
    assert found.curves["ppo"]["score"].steps == [1]


def test_a_failure_is_told_with_its_step(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", step=3, work=lambda: 1 / 0)
    found = status(tmp_path / "run")
    assert (found["state"], found["step"]) == ("failed", 3)
    assert "step 3 of 10" in found["message"]
    assert "ZeroDivisionError: division by zero" in found["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("written", [False, True])
def test_an_interruption_is_told_with_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, written: bool
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    if written:
        monkeypatch.setattr(RunFolder, "final", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", step=4, work=lambda: kill(number))
    found = status(tmp_path / "run")
    assert (found["state"], found["step"]) == ("interrupted", 4)
    assert "step 4 of 10" in found["message"]
    assert ("final/ was written" in found["message"]) == written
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_cut_the_winding_up_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, second: signal.Signals
) -> None:
    """Ctrl-C in a terminal reaches a child and its parent, and the parent then stops the child once more."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def work() -> None:
        monkeypatch.setattr(module, "write_text_atomically", interrupting(second))
        kill(first)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", step=4, work=work)
    assert status(tmp_path / "run")["state"] == "interrupted"
    assert leftovers(tmp_path) == []
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_an_interruption_while_a_run_ends_by_itself_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        monkeypatch.setattr(module, "write_text_atomically", interrupting(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", step=10, work=work)
    assert status(tmp_path / "run")["state"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_is_recorded_whole_before_a_signal_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The status names the step of the last line of metrics, at whatever moment of writing it the signal comes."""
    original = os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        kill(number)
        return original(descriptor, data)

    def work() -> None:
        monkeypatch.setattr(os, "write", interrupted)
        folder.log(4, {"score": 0.5})
        pytest.fail("the signal was lost")

    folder = start(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), folder:
        work()
    assert read_jsonl(folder.path / "metrics.jsonl")[-1]["step"] == 4
    assert (status(folder.path)["state"], status(folder.path)["step"]) == ("interrupted", 4)


def test_a_signal_while_the_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module, "write_text_atomically", interrupting(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", step=1, work=lambda: None)
    assert status(tmp_path / "run")["state"] == "interrupted"
    assert leftovers(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_was_ignored_from_the_start_stays_so(tmp_path: Path) -> None:
    """As in the background of a shell without job control, or under nohup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with start(tmp_path / "run") as folder:
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert status(folder.path)["state"] == "finished"


def test_outside_the_main_thread_it_works_without_signals(tmp_path: Path) -> None:
    def work() -> None:
        with start(tmp_path / "run") as folder:
            folder.log(1, {"score": 0.5})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert status(tmp_path / "run")["state"] == "finished"


def test_the_step_in_the_status_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed outright still says about where it was."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with start(tmp_path / "run") as folder:
        folder.log(1, {"score": 0.5})
        now += 5.0
        folder.log(2, {"score": 0.5})
        assert status(folder.path)["state"] == "running"
        assert status(folder.path)["step"] == 2
