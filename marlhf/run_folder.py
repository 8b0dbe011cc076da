"""A run's folder: what was asked for, how far it came, what was measured, and what came out.

Files are written beside their final name and renamed, or appended one whole line at a time, so that a run
that is killed at any moment leaves none of them broken.
"""

import errno
import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from marlhf.config import to_yaml
from marlhf.errors import ConfigError, UserError
from marlhf.files import discard_unfinished, finite, write_json, write_text_atomically

# Batches kept in skipped/ at most: enough to see what is wrong, not enough to fill a disk.
MOST_SKIPPED_BATCHES = 20


LOGS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")


def check_free(path: str | Path, *, key: str) -> Path:
    """The folder's path, or a ConfigError if it already holds a run: a run never overwrites another."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"`{key}`: {folder} is a file; name a folder for the run")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"`{key}`: {folder} is not empty, and a run does not overwrite another. "
            f"Name another folder ({key}=...), delete this one first, or go on from its last checkpoint with --resume"
        )
    parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            return folder
    except OSError as error:
        raise ConfigError(f"`{key}`: nothing can be written to {parent}: {error.strerror}") from error


@dataclass(frozen=True)
class RunState:
    """How far a run folder had come: its last step, wall time, and the size of each of its logs in bytes."""

    step: int = 0
    seconds: float = 0.0
    sizes: Mapping[str, int] = field(default_factory=dict)


class RunFolder:
    """One stage's folder, used as a context manager around the stage's loop.

    With `back_to` it is a folder that exists already: its logs are cut back to what they were at that state.

    Leaving the block records how the run ended in `status.json`: `finished`, `interrupted` (Ctrl-C or
    SIGTERM) or `failed`, with the step that it had reached. Signals wait while a step is being written, and a
    second one until the end is recorded: Ctrl-C in a terminal reaches a stage and its parent alike, and the parent
    then stops the stage once more.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        config: object,
        stage: str,
        total_steps: int,
        key: str,
        back_to: RunState | None = None,
    ) -> None:
        self.path = check_free(path, key=key) if back_to is None else Path(path)
        self.stage = stage
        self.total_steps = total_steps
        self.step = 0 if back_to is None else back_to.step
        self._back_to = back_to
        self._lock: int | None = None
        self._skipped_batches = 0
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
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if self._back_to is not None:
                self._go_back(self._back_to)
            write_text_atomically(self.path / "config.yaml", to_yaml(self._config))
            self._write_status("running", "")
            purge = None if self._back_to is None else self._back_to.step + 1
            self._tensorboard = SummaryWriter(str(self.path / "tensorboard"), purge_step=purge)
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
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
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

    def skipped(self, step: int, batch: Mapping[str, object]) -> None:
        """Keeps the batch of a step that was skipped because its gradient was not finite."""
        self._skipped_batches += 1
        if self._skipped_batches <= MOST_SKIPPED_BATCHES:
            write_json(self.path / "skipped" / f"step_{step:06d}_{self._skipped_batches}.json", batch)

    def state(self, step: int) -> RunState:
        """The state to go back to later, now that `step` is logged."""
        sizes = {name: (self.path / name).stat().st_size for name in LOGS if (self.path / name).exists()}
        return RunState(step, round(time.monotonic() - self._started, 3), sizes)

    def _take_lock(self) -> None:
        """UserError if another process is writing this folder; the system drops the lock of a process that ends."""
        try:
            import fcntl
        except ImportError:
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise UserError(
                f"{self.path}: another process is writing this run; wait for it, or stop it first"
            ) from None
        except OSError:
            # File systems without locks, as some network ones are.
            pass

    def _go_back(self, state: RunState) -> None:
        """Cuts off what was logged after a state, and what a killed process left half-written."""
        self._started -= state.seconds
        discard_unfinished(self.path)
        discard_unfinished(self.path / "checkpoints")
        for name in LOGS:
            file = self.path / name
            if file.exists():
                os.truncate(file, min(file.stat().st_size, state.sizes.get(name, 0)))

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        file = self.path / name
        line = (json.dumps(finite(record), ensure_ascii=False) + "\n").encode("utf-8", errors="backslashreplace")
        try:
            if name not in self._files:
                self._files[name] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            # One write per line: an interrupt falls between lines.
            written = os.write(self._files[name], line)
            if written < len(line):
                os.ftruncate(self._files[name], os.fstat(self._files[name]).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f"{file}: cannot be written: {error.strerror or error}") from error

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
