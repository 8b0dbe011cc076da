"""Stages side by side: each in a process of its own with one thread, its progress read from its run folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlhf.errors import UserError
from marlhf.progress import Loop, loops

SECONDS_TO_STOP = 30.0


@dataclass(frozen=True)
class Job:
    """One stage with its overrides; `folder` is its run folder."""

    name: str
    stage: str
    folder: Path
    overrides: tuple[str, ...]
    steps: int
    metric: str
    """Shown beside the progress, such as `score`."""


def run_side_by_side(jobs: Sequence[Job], *, config: Path, logs: Path, at_once: int) -> None:
    """Runs the jobs, at most `at_once` at a time, in the order given.

    If one fails, the others are stopped and its last words are raised as a UserError. On Ctrl-C all are
    stopped the way Ctrl-C stops a stage, so that every run folder says where it stood.
    """
    waiting = list(jobs)
    running: list[tuple[Job, subprocess.Popen[bytes], Loop]] = []
    logs.mkdir(parents=True, exist_ok=True)
    with loops() as shown:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    loop = shown.start(job.name, job.steps)
                    with _signals_wait():
                        running.append((job, _start(job, config, logs), loop))
                time.sleep(0.3)
                for entry in list(running):
                    job, process, loop = entry
                    step, words = _progress(job)
                    loop.advance(words, to=step)
                    if process.poll() is None:
                        continue
                    running.remove(entry)
                    if process.returncode != 0:
                        raise UserError(f"{job.name} failed; from {_log(job, logs)}:\n{_last_words(job, logs)}")
        finally:
            _stop([process for _, process, _ in running])


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back inside the block, so that no process is started and then forgotten."""
    received: list[tuple[Any, ...]] = []
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                previous[number] = signal.signal(number, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for number, frame in received[:1]:
        previous[number](number, frame)


def _start(job: Job, config: Path, logs: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "marlhf", job.stage, "--config", str(config), "threads=1", *job.overrides]
    # One thread each: two processes with two threads each on two cores spend their time waiting for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(_log(job, logs), "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _stop(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + SECONDS_TO_STOP
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _progress(job: Job) -> tuple[int, str]:
    try:
        with open(job.folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - 4096))
            line = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return 0, ""
    value = line.get(job.metric)
    return line["step"], "" if value is None else f"{job.metric} {value:.2f}"


def _log(job: Job, logs: Path) -> Path:
    return logs / f"{job.folder.name}.log"


def _last_words(job: Job, logs: Path) -> str:
    text = _log(job, logs).read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-15:])
