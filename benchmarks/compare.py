"""`python -m benchmarks.compare OLD.csv NEW.csv`: what got slower, by more than the noise of the runs.

Exits with 1 if one of our ops did, or no longer gives a right result.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import BANDWIDTH, OK, Row, read
from benchmarks.table import OURS, duration, markdown

LEAST_CHANGE = 0.02
"""What two runs without any noise of their own may still differ by."""


@dataclass(frozen=True)
class Change:
    """One provider in one case, then and now."""

    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """The new time over the old one."""
        assert self.old.time_us is not None
        assert self.new.time_us is not None
        return self.new.time_us / self.old.time_us

    @property
    def noise(self) -> float:
        """By how much the rounds of the noisier of the two runs differed."""
        return max(self.old.noise or 0.0, self.new.noise or 0.0, LEAST_CHANGE)

    @property
    def slower(self) -> bool:
        return self.ratio > 1 + self.noise

    @property
    def faster(self) -> bool:
        return self.ratio < 1 / (1 + self.noise)


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    changes: list[Change]
    """Our ops, timed in both."""
    lost: list[Row]
    """Ours in the new run, not right or not running where they did in the old one."""
    drift: float | None
    """How the rivals' times changed in the middle: nobody touched their code, so it is the machine's doing."""


def compare(old: Sequence[Row], new: Sequence[Row]) -> Comparison:
    """Match the rows of two runs by case and provider."""
    then = {(*row.case, row.who): row for row in old if row.status == OK and row.op != BANDWIDTH}
    changes: list[Change] = []
    lost: list[Row] = []
    rivals: list[float] = []
    for row in new:
        before = then.get((*row.case, row.who))
        if before is None:
            continue
        if row.provider not in OURS:
            if row.status == OK:
                rivals.append(Change(before, row).ratio)
        elif row.status == OK:
            changes.append(Change(before, row))
        else:
            lost.append(row)
    return Comparison(changes, lost, statistics.median(rivals) if rivals else None)


def report(comparison: Comparison) -> str:
    """What to tell about it."""
    slower = sorted((c for c in comparison.changes if c.slower), key=lambda c: -c.ratio)
    faster = sorted((c for c in comparison.changes if c.faster), key=lambda c: c.ratio)
    counts = f"{len(comparison.changes)} compared, {len(slower)} slower, {len(faster)} faster"
    parts = [f"{counts} than their noise explains."]
    if comparison.drift is not None:
        parts.append(f"Rivals, whose code is the same, changed by {comparison.drift - 1:+.1%} in the middle.")
    for title, chosen in (("Slower", slower), ("Faster", faster)):
        if chosen:
            parts.append(f"{title}:\n\n{markdown(_HEAD, [_cells(change) for change in chosen])}")
    parts += [f"{row.op} {row.options} {row.shape} {row.who}: {row.status}: {row.reason}" for row in comparison.lost]
    return "\n\n".join(parts)


_HEAD = ("op", "options", "shape", "dtype", "threads", "mode", "who", "old", "new", "change", "noise")


def _cells(change: Change) -> list[str]:
    row = change.new
    return [
        row.op,
        row.options,
        row.shape,
        row.dtype,
        "" if row.threads is None else str(row.threads),
        row.mode,
        row.who,
        duration(change.old.time_us),
        duration(row.time_us),
        f"{change.ratio - 1:+.1%}",
        f"{change.noise:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What got slower between two benchmark CSVs.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    comparison = compare(read(arguments.old), read(arguments.new))
    print(report(comparison))
    if comparison.lost or any(change.slower for change in comparison.changes):
        sys.exit(1)


if __name__ == "__main__":
    main()
