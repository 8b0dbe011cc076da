"""A run's folder: what was asked for, how far it came, what was measured, and what came out.

Files are written beside their final name and renamed, or appended one whole line at a time, so that a run
that is killed at any moment leaves none of them broken.
"""

import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from marlhf.config import to_yaml
from marlhf.errors import ConfigError
from marlhf.files import finite, write_json, write_text_atomically


def check_free(path: str | Path, *, key: str) -> Path:
    """The folder's path, or a ConfigError if it already holds a run: a run never overwrites another."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"`{key}`: {folder} is a file; name a folder for the run")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"`{key}`: {folder} is not empty, and a run does not overwrite another. "
            f"Name another folder ({key}=...), or delete this one first"
        )
    parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            return folder
    except OSError as error:
        raise ConfigError(f"`{key}`: nothing can be written to {parent}: {error.strerror}") from error


class RunFolder:
    """One stage's folder, used as a context manager around the stage's loop.

    Leaving the block records how the run ended in `status.json`: `finished`, `interrupted` (Ctrl-C or
    SIGTERM) or `failed`, with the step that it had reached. Signals wait while a step is being written, and a
    second one until the end is recorded: Ctrl-C in a terminal reaches a stage and its parent alike, and the parent
    then stops the stage once more.
    """

    def __init__(self, path: str | Path, *, config: object, stage: str, total_steps: int, key: str) -> None:
        self.path = check_free(path, key=key)
        self.stage = stage
        self.total_steps = total_steps
        self.step = 0
        self._config = config
        self._started = time.monotonic()
        self._status_written = -math.inf
        self._tensorboard: Any = None
        self._files: dict[str, int] = {}
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._writing = False
        self._winding_up = False
        self._interrupted = False

    @property
    def final(self) -> Path:
        """Where the trained weights go."""
        return self.path / "final"

    def __enter__(self) -> "RunFolder":
        from torch.utils.tensorboard import SummaryWriter

        # Only the main thread can handle signals; and who started this with one ignored wants it ignored.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous_handlers[number] = signal.signal(number, self._interrupt)
        try:
            write_text_atomically(self.path / "config.yaml", to_yaml(self._config))
            self._write_status("running", "")
            self._tensorboard = SummaryWriter(str(self.path / "tensorboard"))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._winding_up = True
        where = f"{self.stage}: step {self.step} of {self.total_steps}"
        try:
            if error is None:
                self._write_status("finished", "")
            elif isinstance(error, KeyboardInterrupt):
                self._write_status(
                    "interrupted",
                    f"stopped on request at {where}; metrics up to there are complete, final/ "
                    + ("was written" if self.final.exists() else "was not written"),
                )
            else:
                self._write_status("failed", f"{where}: {type(error).__name__}: {error}")
            if self._tensorboard is not None:
                self._tensorboard.close()
        finally:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)
        if self._interrupted and error is None:
            raise KeyboardInterrupt

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line of metrics and the same numbers to TensorBoard; `step` counts from 1."""
        line = {"stage": self.stage, "step": step, "seconds": round(time.monotonic() - self._started, 3)}
        self._writing = True
        try:
            self._append("metrics.jsonl", {**line, **metrics})
            self.step = step
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name if "/" in name else f"{self.stage}/{name}", value, step)
            if time.monotonic() - self._status_written > 1.0:
                self._write_status("running", "")
        finally:
            self._writing = False
        if self._interrupted:
            raise KeyboardInterrupt

    def sample(self, record: Mapping[str, object]) -> None:
        """Appends one sampled response."""
        self._append("samples.jsonl", record)

    def evaluation(self, record: Mapping[str, object]) -> None:
        """Appends the per-response numbers of one evaluation."""
        self._append("evaluations.jsonl", record)

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if name not in self._files:
            self._files[name] = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # One write per line: an interrupt falls between lines.
        line = json.dumps(finite(record), ensure_ascii=False) + "\n"
        os.write(self._files[name], line.encode("utf-8", errors="backslashreplace"))

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._winding_up or self._writing:
            self._interrupted = True
            return
        self._winding_up = True
        raise KeyboardInterrupt

    def _write_status(self, state: str, message: str) -> None:
        self._status_written = time.monotonic()
        write_json(
            self.path / "status.json",
            {
                "state": state,
                "stage": self.stage,
                "step": self.step,
                "total_steps": self.total_steps,
                "message": message,
            },
        )
