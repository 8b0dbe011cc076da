"""Rows: their statistics, and the CSV."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import with_times
from tests.benchmarks.rows import BLANK, rival, row

ROWS = [
    row(12.5, noise=0.25, bytes=51_463_168, bandwidth="read+copy_fresh", share=0.5, error=1e-7, budget=3e-6),
    rival("liger", status="cannot run", reason='no "GPU", says the driver; try\nanother'),
    rival("trl", status="wrong", reason="off", error=0.5, budget=2e-6),
    row(3.0, threads=None, device="NVIDIA H200", backend="gpu"),
]


def test_the_csv_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.csv"
    results.write(path, ROWS[:1])
    results.write(path, ROWS[1:], append=True)
    assert results.read(path) == ROWS
    results.write(path, ROWS[1:2])
    assert results.read(path) == ROWS[1:2]


def test_a_csv_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("op,seconds\nx,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="its columns are op, seconds"):
        results.read(path)


def test_statistics_of_the_calls_by_hand() -> None:
    # Ten calls in two rounds, in microseconds: 10 .. 19 with the slow ones first.
    rounds = [[19e-6, 18e-6, 17e-6, 16e-6, 15e-6], [14e-6, 13e-6, 12e-6, 11e-6, 10e-6]]
    made = with_times(replace(BLANK, bytes=50_000), rounds)
    assert (made.calls, made.rounds) == (10, 2)
    assert [made.min_us, made.p20_us, made.p50_us, made.p80_us] == pytest.approx([10, 11, 14, 17])
    # The rounds' own minima are 15 and 10.
    assert made.noise == pytest.approx(0.5)
    assert made.time_us == made.min_us
    # 50 kB in 10 us.
    assert made.gb_s == pytest.approx(5.0)


def test_on_a_gpu_the_median_counts() -> None:
    rounds = [[1e-6, 20e-6, 30e-6], [40e-6, 25e-6, 25e-6]]
    made = with_times(replace(BLANK, threads=None, bytes=25_000), rounds)
    assert made.time_us == pytest.approx(25)
    assert made.gb_s == pytest.approx(1.0)
    # The rounds' medians are 20 and 25.
    assert made.noise == pytest.approx(0.25)
