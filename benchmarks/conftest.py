"""pytest-benchmark runs the cases of the `bench_*.py` files; the rows go into one CSV."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bandwidth, harness, results
from benchmarks.harness import Call, Case
from benchmarks.results import OK, Row

SIZES = ("tiny", "few", "quick", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("marlhf benchmarks")
    group.addoption("--sizes", choices=SIZES, default="quick", help="which cases: few are the most important ones")
    group.addoption("--threads", type=int, default=1, help="of PyTorch and of our CPU backend")
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption("--providers", default="", help="only these, with commas between: marlhf,eager,compile,trl,...")
    group.addoption("--csv", type=Path, help="where the rows go; they are added to a file that is there")


def pytest_configure(config: pytest.Config) -> None:
    for harmless in ("Benchmark fixture was not used", ".*torch.jit.script_method.*"):
        config.addinivalue_line("filterwarnings", f"ignore:{harmless}")
    torch.set_num_threads(config.getoption("--threads"))
    # Inductor writes the number of threads into its code but not into the key of its cache.
    importlib.import_module("torch._inductor.config").cpp.threads = config.getoption("--threads")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = metafunc.module.cases(metafunc.config.getoption("--sizes"))
        metafunc.parametrize(
            ("case", "mode"),
            [pytest.param(case, mode, id=f"{case}-{mode}") for case, modes in pairs for mode in modes],
        )


class Session:
    """What the cases of a pytest session share."""

    def __init__(self, config: pytest.Config) -> None:
        self.device = torch.device(config.getoption("--device"))
        self.sizes: str = config.getoption("--sizes")
        chosen = {name for name in config.getoption("--providers").split(",") if name}
        self.chosen: Callable[[str], bool] = (lambda name: name in chosen) if chosen else (lambda name: True)
        self.effort = harness.FULL if self.sizes == "full" else harness.QUICK
        if self.sizes == "tiny":
            self.effort = harness.Effort(rounds=2, burst_seconds=0.001)
        self.csv: Path | None = config.getoption("--csv")
        self.bandwidths = bandwidth.measure(self.device, megabytes=4 if self.sizes == "tiny" else None)
        self._write(self.bandwidths)

    def run(self, case: Case, mode: str, clock: harness.Clock) -> list[Row]:
        found = harness.run_case(
            case, mode, self.device, self.effort, clock, chosen=self.chosen, bandwidths=self.bandwidths
        )
        self._write(found)
        return found

    def _write(self, rows: Sequence[Row]) -> None:
        # At once: a run that is stopped keeps what it has.
        if self.csv is not None:
            results.write(self.csv, rows, append=True)


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Session:
    return Session(request.config)


@pytest.fixture
def bench(session: Session, benchmark: Any) -> Callable[[Case, str], None]:
    """Run a case in a mode: rows for the CSV and lines on the terminal."""

    if benchmark.disabled:
        pytest.skip("pytest-benchmark is switched off")

    def run(case: Case, mode: str) -> None:
        def clock(target: Callable[[Call], object], setup: Callable[[], Call], calls: int) -> Sequence[float]:
            benchmark.pedantic(target, setup=lambda: ((setup(),), {}), rounds=calls)
            return benchmark.stats.stats.data

        found = session.run(case, mode, clock)
        benchmark.extra_info["providers"] = {row.who: row.time_us for row in found}
        print(f"\n{case}, {mode}", *map(_line, found), sep="\n")
        ours = [row for row in found if row.provider.startswith("marlhf") and row.status == results.WRONG]
        assert not ours, f"our own results are wrong: {ours[0].who}: {ours[0].reason}"

    return run


def _line(row: Row) -> str:
    if row.status != OK:
        return f"  {row.who:28} {row.status}: {row.reason}"
    share = "" if row.share is None else f"  {row.share:4.0%} of {row.bandwidth}"
    return f"  {row.who:28} {row.time_us:12,.1f} us  {row.gb_s:7.2f} GB/s  noise {row.noise:4.0%}{share}"
