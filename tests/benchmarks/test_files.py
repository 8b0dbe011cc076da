"""The bench files: every op has one, every floor is measured, and pytest runs them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import marlhf_kernels
from benchmarks import floors, harness, peers, results
from benchmarks.harness import Case, Effort
from marlhf_kernels import segmentation

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))
# Of a different kind: they choose the backend, or check ids on the host.
NO_OPS = {"backends", "use_backend", "segmentation"}
HOST_ONLY = {"validate"}


@cache
def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    return [pair for name in FILES for pair in importlib.import_module(f"benchmarks.{name}").cases(sizes)]


@pytest.mark.parametrize("sizes", ["tiny", "full"])
def test_every_public_op_has_a_bench_file(sizes: str) -> None:
    public = {name for name in marlhf_kernels.__all__ if name.islower()} - NO_OPS
    public |= {f"segmentation.{name}" for name in set(segmentation.__all__) - HOST_ONLY}
    assert {case.op for case, _ in cases(sizes)} == public


@pytest.mark.parametrize("sizes", ["few", "quick", "full"])
def test_a_case_has_one_name_and_its_bytes(sizes: str) -> None:
    names = [str(case) for case, _ in cases(sizes)]
    assert len(set(names)) == len(names)
    for case, modes in cases(sizes):
        assert set(modes) <= set(case.traffic) <= set(harness.MODES)
        assert all(sum(case.traffic[mode].values()) > 0 for mode in modes)


def test_every_floor_is_measured_by_make_bench() -> None:
    measured = {(case.op, mode, case.options, case.shape.name) for case, modes in cases("full") for mode in modes}
    for floor in floors.FLOORS:
        for shape in floor.shapes:
            options = {key[2] for key in measured if (key[0], key[1], key[3]) == (floor.op, floor.mode, shape)}
            assert options, f"{floor} is never measured at {shape}"
            assert floor.options is None or floor.options in options


def test_every_rival_of_a_floor_stands_in_the_case() -> None:
    for floor in floors.FLOORS:
        for case, modes in cases("full"):
            if (case.op, case.shape.name) == (floor.op, floor.shapes[0]) and floor.options in (None, case.options):
                rivals = {f"{p.name}:{p.backend}".rstrip(":") for p in case.peers} | {"marlhf:reference"}
                assert floor.rival in rivals
                assert floor.mode in modes
                assert floor.ours == "marlhf" or case.in_place is not None


@pytest.mark.parametrize("pair", cases("tiny"), ids=lambda pair: str(pair[0]))
def test_every_plain_peer_is_right_and_runs(pair: tuple[Case, tuple[str, ...]]) -> None:
    case, modes = pair
    for mode in modes:
        rows = harness.run_case(
            case,
            mode,
            torch.device("cpu"),
            Effort(rounds=1, burst_seconds=0.0),
            harness.plain_clock,
            chosen=lambda name: name not in ("compile", "liger", "cce"),
        )
        assert any(row.provider == "marlhf" for row in rows)
        for row in rows:
            expected = "cannot run" if row.backend in ("gpu", "cpu") else "ok"
            assert row.status in ("ok", expected), row.reason


def test_libraries_that_are_absent_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("liger_kernel", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, module, None)
    for function, package in ((peers.liger_logprobs, "liger-kernel"), (peers.cce_linear_logprobs, "cut-cross-entropy")):
        with pytest.raises(harness.CannotRunError, match=f"{package} is not installed"):
            function({})


def test_pytest_runs_a_file_and_fills_the_csv(tmp_path: Path) -> None:
    csv = tmp_path / "run.csv"
    command = (
        *(
            sys.executable,
            "-m",
            "pytest",
            "benchmarks/bench_macro.py",
            "-q",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
        ),
        *("--sizes", "tiny", "--providers", "marlhf,eager", "--csv", str(csv)),
    )
    # pytest-benchmark does nothing where it sees that it runs in one of several workers.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results.read(csv)
    assert {row.provider for row in rows if row.op == "bandwidth"} == {"read", "copy_warm", "copy_fresh"}
    assert {row.op for row in rows} == {"bandwidth", "macro_reduce", "macro_broadcast", "macro_lengths"}
    timed = [row for row in rows if row.status == "ok"]
    assert {row.who for row in timed} >= {"marlhf:reference", "eager"}
    assert all(row.rounds and row.calls and row.calls >= row.rounds and row.threads == 1 for row in timed)
