"""Long loops say how fast they are and how long they still take, on a terminal and in a file."""

import io

import pytest
import torch
from rich.console import Console

from marlhf import progress
from marlhf.progress import Clock, Profile, loops


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that progress sees, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def written(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=terminal, width=120))
    return file


def test_in_a_file_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    """Ten seconds apart and at the end, with rate and seconds left."""
    file = written(monkeypatch, terminal=False)
    with loops() as shown:
        loop = shown.start("SFT", 40)
        for _ in range(40):
            clock[0] += 0.5
            loop.advance("loss 1.5 [not markup]")
    lines = file.getvalue().splitlines()
    assert lines == [
        "SFT: 20/40 steps, 2.0 steps/s, 10 s left  loss 1.5 [not markup]",
        "SFT: 40/40 steps, 2.0 steps/s, 0 s left  loss 1.5 [not markup]",
    ]


def test_slow_steps_are_told_in_seconds_each(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    file = written(monkeypatch, terminal=False)
    with loops() as shown:
        loop = shown.start("PPO", 3, "iterations")
        clock[0] += 12
        loop.advance()
    assert file.getvalue().rstrip() == "PPO: 1/3 iterations, 12.0 s/iteration, 24 s left"


def test_a_count_that_does_not_move_is_no_news(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    file = written(monkeypatch, terminal=False)
    with loops() as shown:
        loop = shown.start("PPO", 3)
        for _ in range(5):
            clock[0] += 30
            loop.advance(to=0)
        assert loop.done == 0
        loop.advance(to=2)
        assert loop.done == 2
    assert file.getvalue().count("PPO: ") == 1


def test_on_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(monkeypatch, terminal=True)
    with loops() as shown:
        first, second = shown.start("token PPO", 4), shown.start("macro-action PPO", 4)
        for _ in range(4):
            first.advance("score 0.50")
        second.advance(to=2)
    shown_text = file.getvalue()
    for words in ("token PPO", "macro-action PPO", "4/4", "2/4", "score 0.50", "left"):
        assert words in shown_text


def test_phases_of_an_iteration(clock: list[float]) -> None:
    """Tokens per second leave the evaluation out."""
    found = Clock(torch.device("cpu"))
    for phase, seconds in (("generate", 1.0), ("update", 2.0), ("evaluate", 5.0), ("generate", 1.0)):
        clock[0] += seconds
        found.lap(phase)
    metrics = found.metrics(tokens=100)
    assert metrics == {"time/generate": 2.0, "time/update": 2.0, "time/evaluate": 5.0, "tokens_per_second": 25.0}


def test_a_profile_adds_the_phases_up_and_names_the_rest(clock: list[float]) -> None:
    profile = Profile()
    for _ in range(2):
        profile.add({"time/generate": 1.0, "time/update": 3.5, "score": 7.0})
    clock[0] += 10.0
    assert str(profile) == "10 s: generate 20%, update 70%, logs and checkpoints 10%"
