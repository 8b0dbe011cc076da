"""Commands in a process of their own, told to stop in the way that a terminal or a scheduler does it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import marlhf

PATIENCE = 240.0
"""Seconds; a step takes a fraction of one, but the machine may be busy."""


def _heed_interrupts() -> None:
    """A shell starts its background jobs with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Child:
    """A command in a process group of its own, its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path, **environment: str) -> None:
        root = str(Path(marlhf.__file__).parent.parent)
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
                env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment},
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        if self.group_lives():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until something is so; the child must not end before."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def interrupt(self, number: signal.Signals = signal.SIGINT, *, group: bool = False) -> None:
        """A signal to this process alone or, as Ctrl-C in a terminal, to all it started too."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def returncode(self) -> int:
        return self.process.wait(PATIENCE)

    def group_lives(self) -> bool:
        """Whether any process that it started is still there."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True
