"""`python -m benchmarks`: run the benchmarks; CSV, markdown, PNG and HTML go under `benchmarks/results/`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import plot, results, table
from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results"
NO_TESTS = 5
"""pytest's exit code for it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks.")
    parser.add_argument("--sizes", choices=("tiny", "few", "quick", "full"), default="quick")
    parser.add_argument(
        "--threads",
        default="1,2",
        help="with commas between; after the first number the quick sizes are reduced to the most important ones",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--providers", default="", help="only these: marlhf,eager,compile,trl,loop,torch,liger,cce")
    parser.add_argument("--only", default="", help="of which files: a pytest -k expression")
    parser.add_argument("--name", help="of the files; default: device and sizes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder")
    arguments = parser.parse_args()
    csv = arguments.output / f"{arguments.name or f'{arguments.device}-{arguments.sizes}'}.csv"
    csv.unlink(missing_ok=True)

    threads = [int(number) for number in arguments.threads.split(",")] if arguments.device == "cpu" else [1]
    failed = False
    for number in threads:
        sizes = "few" if number != threads[0] and arguments.sizes == "quick" else arguments.sizes
        # With `--only`, the reduced sizes may hold none of the cases.
        failed |= _run_pytest(arguments, csv, sizes, number) not in (0, NO_TESTS)
        if not arguments.only and arguments.device == "cpu" and number == threads[0]:
            failed |= _run_update(csv, number, "tiny" if sizes == "tiny" else "full") != 0

    if not csv.exists():
        print("nothing was timed", file=sys.stderr)
        return 1
    rows = results.read(csv)
    csv.with_suffix(".md").write_text(table.render(rows), encoding="utf-8")
    plot.draw(rows, csv.with_suffix(".png"), csv.with_suffix(".html"))
    print(f"\n{csv} and beside it .md, .png and .html")
    for line in table.missed(rows):
        print("below its floor:", line)
    return int(failed)


def _run_pytest(arguments: argparse.Namespace, csv: Path, sizes: str, threads: int) -> int:
    files = sorted(str(path) for path in (ROOT / "benchmarks").glob("bench_*.py"))
    command = [
        *(sys.executable, "-m", "pytest", *files, "-s", "-q", "-p", "no:xdist", "--timeout=0"),
        *("--benchmark-quiet", "--benchmark-disable-gc", "-k", arguments.only),
        *("--sizes", sizes, "--threads", str(threads), "--device", arguments.device),
        *("--providers", arguments.providers, "--csv", str(csv)),
    ]
    return subprocess.run(command, cwd=ROOT, env=_environment(threads), check=False).returncode


def _run_update(csv: Path, threads: int, sizes: str) -> int:
    words = ("--csv", str(csv), "--threads", str(threads), "--sizes", sizes)
    command = [sys.executable, "-m", "benchmarks.ppo_update", *words]
    return subprocess.run(command, cwd=ROOT, env=_environment(threads), check=False).returncode


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


if __name__ == "__main__":
    sys.exit(main())
