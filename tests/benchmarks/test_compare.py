"""The comparison of two runs: a planted slowdown is found, noise is not."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks import compare, results
from benchmarks.results import Row, with_times
from tests.benchmarks.rows import BLANK, rival, row

SPREAD = 0.03
CASES = 200


def noisy_run(seed: int, factors: dict[int, float] | None = None) -> list[Row]:
    """One op in 200 cases of 100 us, 7 rounds of 20 calls; each call takes up to a few per cent longer at random."""
    rng = random.Random(seed)
    rows = []
    for number in range(CASES):
        time = 1e-4 * (factors or {}).get(number, 1.0)
        rounds = [[time * (1 + rng.expovariate(1 / SPREAD)) for _ in range(20)] for _ in range(7)]
        rows.append(with_times(Row(**{**vars(BLANK), "shape": f"case-{number}"}), rounds))
    return rows


def test_a_planted_slowdown_is_flagged_and_noise_is_not() -> None:
    planted = {3: 1.1, 50: 1.3, 120: 0.8}
    found = compare.compare(noisy_run(0), noisy_run(1, planted))
    assert {c.new.shape for c in found.changes if c.slower} == {"case-3", "case-50"}
    assert {c.new.shape for c in found.changes if c.faster} == {"case-120"}
    assert len(found.changes) == CASES


def test_the_noisier_run_decides_what_counts() -> None:
    old, new = row(100.0, noise=0.01), row(110.0, noise=0.01)
    assert compare.compare([old], [new]).changes[0].slower
    for pair in ((row(100.0, noise=0.2), new), (old, row(110.0, noise=0.2))):
        assert not compare.compare([pair[0]], [pair[1]]).changes[0].slower
    # A run that measured no noise at all is not believed to the last per mille.
    assert not compare.compare([row(100.0, noise=0.0)], [row(101.0, noise=0.0)]).changes[0].slower


def test_only_equal_cases_of_ours_are_compared_and_rivals_tell_the_drift() -> None:
    old = [row(100.0), row(50.0, dtype="bfloat16"), rival("eager", 200.0), rival("trl", 100.0), rival("loop", 10.0)]
    new = [row(100.0), row(80.0, threads=2), rival("eager", 210.0), rival("trl", 120.0), rival("loop", 10.0)]
    found = compare.compare(old, new)
    assert [(c.old.time_us, c.new.time_us) for c in found.changes] == [(100.0, 100.0)]
    assert found.drift == pytest.approx(1.05)
    assert "+5.0%" in compare.report(found)


def test_what_no_longer_runs_is_told() -> None:
    found = compare.compare([row(100.0)], [row(status="wrong", reason="off by 1")])
    assert [lost.status for lost in found.lost] == ["wrong"]
    assert "wrong: off by 1" in compare.report(found)
    # It was not right before either.
    assert not compare.compare([row(status="wrong")], [row(status="wrong")]).lost


@pytest.mark.parametrize(("time", "code"), [(101.0, None), (150.0, 1)])
def test_the_command_fails_on_a_slowdown(
    time: float, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (("old", [row(100.0)]), ("new", [row(time)])):
        results.write(tmp_path / f"{name}.csv", rows)
    monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "old.csv"), str(tmp_path / "new.csv")])
    if code is None:
        compare.main()
        assert "0 slower" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit) as stopped:
            compare.main()
        assert stopped.value.code == code
        assert "+50.0%" in capsys.readouterr().out
