"""Benchmark rows and their CSV: one schema for every device and every kind of clock."""

from __future__ import annotations

import csv
import dataclasses
import math
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

OK, WRONG, CANNOT_RUN = "ok", "wrong", "cannot run"
BANDWIDTH = "bandwidth"
"""The `op` of the rows that measure the machine itself."""


@dataclass(frozen=True)
class Row:
    """One provider in one mode under one clock. A field that does not apply is empty in the CSV."""

    op: str
    options: str
    mode: str
    """forward, backward, or full: forward and backward under one clock."""
    metric: str
    """call (wall clock, device synchronised), device (device time), or graph (replay of a CUDA graph)."""
    provider: str
    backend: str
    shape: str
    sizes: str
    dtype: str
    threads: int | None
    """`torch.get_num_threads()`; None on a GPU."""
    device: str
    torch: str
    triton: str
    python: str
    commit: str
    """Short hash; `+` at the end where files had changed."""
    calls: int | None = None
    rounds: int | None = None
    min_us: float | None = None
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    noise: float | None = None
    """(max - min) / min over the rounds of each round's own `time_us`."""
    bytes: int | None = None
    """The least that the op must move."""
    gb_s: float | None = None
    bandwidth: str = ""
    """The measured bandwidths that `share` compares with: read, copy_warm, copy_fresh, or a sum of them."""
    share: float | None = None
    """Time for `bytes` at those bandwidths, as a share of the time taken."""
    error: float | None = None
    """Largest error against the float64 reference, relative to each result's largest number."""
    budget: float | None = None
    """What is allowed of it, where `error` comes closest to its limit or passes it."""
    status: str = OK
    reason: str = ""

    @property
    def time_us(self) -> float | None:
        """The time that ratios use: the minimum on a CPU, the median on a GPU."""
        return self.p50_us if self.threads is None else self.min_us

    @property
    def case(self) -> tuple[object, ...]:
        """What rows must have in common for their times to be compared."""
        return (self.op, self.options, self.mode, self.metric, self.shape, self.dtype, self.threads, self.device)

    @property
    def who(self) -> str:
        """Provider and backend in one word."""
        return f"{self.provider}:{self.backend}" if self.backend else self.provider


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))
_TYPES = typing.get_type_hints(Row)


def write(path: Path, rows: Iterable[Row], *, append: bool = False) -> None:
    """Write rows as CSV; `append` continues a file that is there.

    Raises:
        ValueError: the file to continue has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append = append and path.exists()
    if append:
        read(path)
    with path.open("a" if append else "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not append:
            writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([_text(getattr(row, name)) for name in COLUMNS])


def read(path: Path) -> list[Row]:
    """Read what `write` wrote.

    Raises:
        ValueError: the columns are others.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header != COLUMNS:
            raise ValueError(f"{path} is no benchmark CSV: its columns are {', '.join(header)}")
        return [Row(**{name: _value(name, text) for name, text in zip(COLUMNS, line, strict=True)}) for line in reader]


def with_times(row: Row, rounds: Sequence[Sequence[float]]) -> Row:
    """The row with the statistics of its calls, given in seconds, round by round."""
    times = sorted(1e6 * t for calls in rounds for t in calls)
    row = replace(
        row,
        calls=len(times),
        rounds=len(rounds),
        min_us=times[0],
        p20_us=percentile(times, 0.2),
        p50_us=percentile(times, 0.5),
        p80_us=percentile(times, 0.8),
    )
    own = [min(calls) if row.threads is not None else percentile(sorted(calls), 0.5) for calls in rounds]
    assert row.time_us is not None
    moved = None if row.bytes is None else row.bytes / row.time_us / 1e3
    return replace(row, noise=(max(own) - min(own)) / min(own), gb_s=moved)


def percentile(sorted_numbers: Sequence[float], share: float) -> float:
    """The smallest number that at least `share` of them do not exceed."""
    return sorted_numbers[max(0, math.ceil(share * len(sorted_numbers)) - 1)]


def _text(value: object) -> str:
    if value is None:
        return ""
    return format(value, ".6g") if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    kind = _TYPES[name]
    if kind is str:
        return text
    if not text:
        return None
    return int(text) if kind == (int | None) else float(text)
