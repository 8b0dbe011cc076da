"""Progress of long loops: a bar with rate and time left on a terminal, a line every few seconds elsewhere."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console()

SECONDS_BETWEEN_LINES = 10.0


class Loop:
    """One loop's progress; `advance` once per step, with a few words on how it goes."""

    def __init__(self, progress: Progress | None, name: str, total: int, unit: str, done: int) -> None:
        self._progress = progress
        self._task = (
            None if progress is None else progress.add_task(name, total=total, completed=done, rate="", words="")
        )
        self._name, self._total, self._unit = name, total, unit
        self._done = self._begun = done
        self._started = self._printed = time.monotonic()

    @property
    def done(self) -> int:
        """Steps counted so far."""
        return self._done

    def advance(self, words: str = "", *, to: int | None = None) -> None:
        """Counts one step, or sets the count to `to`."""
        done = self._done + 1 if to is None else to
        moved, self._done = done != self._done, done
        now = time.monotonic()
        rate = (self._done - self._begun) / max(now - self._started, 1e-9)
        shown = (
            f"{rate:.1f} {self._unit}/s" if rate >= 1 else f"{1 / max(rate, 1e-9):.1f} s/{self._unit.removesuffix('s')}"
        )
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done, rate=shown, words=words)
        elif moved and (now - self._printed >= SECONDS_BETWEEN_LINES or self._done == self._total):
            self._printed = now
            left = (self._total - self._done) / rate if rate else 0.0
            console.print(
                f"{self._name}: {self._done}/{self._total} {self._unit}, {shown}, {left:.0f} s left  {words}",
                highlight=False,
                markup=False,
            )


@contextmanager
def loops() -> Iterator["Loops"]:
    """Shows the progress of the loops that are started inside the block."""
    if not console.is_terminal:
        yield Loops(None)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
        console=console,
    ) as progress:
        yield Loops(progress)


class Loops:
    """Starts loops whose progress is shown together."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def start(self, name: str, total: int, unit: str = "steps", *, done: int = 0) -> Loop:
        """A new loop of `total` steps, of which `done` were done before."""
        return Loop(self._progress, name, total, unit, done)


class Clock:
    """Wall time of the phases of one iteration; on a GPU each lap waits for the work that was queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Books the time since the last lap under a phase."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._last
        self._last = now

    def metrics(self, *, tokens: int) -> dict[str, float]:
        """Seconds per phase as `time/<phase>`, and response tokens per second without the evaluation."""
        seconds = sum(value for phase, value in self._laps.items() if phase != "evaluate")
        return {
            **{f"time/{phase}": value for phase, value in self._laps.items()},
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }


class Profile:
    """Where the wall time of a whole loop went, from the `time/<phase>` metrics of its iterations."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._started = time.perf_counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Books one iteration."""
        for name, value in metrics.items():
            if name.startswith("time/"):
                self._seconds[name.removeprefix("time/")] += value

    def __str__(self) -> str:
        whole = time.perf_counter() - self._started
        rest = whole - sum(self._seconds.values())
        shares = {**self._seconds, "logs and checkpoints": rest}
        return f"{whole:.0f} s: " + ", ".join(
            f"{name} {value / max(whole, 1e-9):.0%}" for name, value in shares.items()
        )
