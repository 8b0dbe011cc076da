"""Breaks the reference kernels one change at a time and runs each op's tests until the first that goes red.

    python -m tests.mutation                     everything (half an hour on one quiet core)
    python -m tests.mutation --module whiten     one module
    python -m tests.mutation --sample 20         a random sample
    python -m tests.mutation --seconds 170       stop in time; the next call goes on from there
    python -m tests.mutation --list              only say what there is

The package and its tests are copied to a scratch folder; nothing here is changed. Results are kept in
build/mutation.jsonl under the hash of the module and are taken from there while the module stays the same. A mutant
that no test kills is a survivor: either `equivalent.py` says why it cannot be told from the original, or a test is
missing, and the exit status is 1. Explained mutants are run only with --again, and named where a test kills them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "marlhf_kernels/reference"
STATE = ROOT / "build" / "mutation.jsonl"
REPORT = Path(__file__).parent / "report.md"

# The tests of each module: those of the op family first, then what else rests on the module.
TESTS = {
    "_layout": ["macro", "segmentation", "errors", "advantages"],
    "units": ["policy_loss", "value_loss"],
    "macro": ["macro"],
    "advantages": ["advantages"],
    "policy_loss": ["policy_loss", "linear"],
    "value_loss": ["value_loss"],
    "whiten": ["whiten"],
    "logprobs": ["token_logprobs", "linear"],
    "linear": ["linear"],
    "segmentation": ["segmentation"],
}
Results = dict[tuple[str, str], dict[str, str]]


def all_mutants(modules: list[str]) -> list[Mutant]:
    """The mutants of these modules of the reference."""
    out = []
    for module in modules:
        out += mutants_of(module, (ROOT / PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return out


def module_hash(module: str) -> str:
    """The hash of a module's source."""
    return hashlib.sha256((ROOT / PACKAGE / f"{module}.py").read_bytes()).hexdigest()[:16]


def fingerprint() -> str:
    """The hash of everything that decides whether the tests are green without any change."""
    folders = ("marlhf_kernels", "tests/cases", "tests/kernels")
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def label_of(mutant: Mutant) -> tuple[str, str]:
    """What a result is kept under."""
    return module_hash(mutant.module), mutant.key


def is_open(mutant: Mutant, results: Results, again: bool) -> bool:
    """Is the mutant to be run: it has no result yet, and no explanation unless those are run again."""
    return label_of(mutant) not in results and (again or mutant.key not in EQUIVALENT)


def make_scratch() -> Path:
    """A copy of the kernels and their tests."""
    scratch = Path(tempfile.mkdtemp(prefix="marlhf-mutation-"))
    for folder in ("marlhf_kernels", "tests/cases", "tests/kernels", "tests/mutation"):
        shutil.copytree(ROOT / folder, scratch / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        shutil.copy(ROOT / name, scratch / name)
    return scratch


def known_results() -> Results:
    """Results of earlier calls."""
    if not STATE.exists():
        return {}
    lines = [json.loads(line) for line in STATE.read_text(encoding="utf-8").splitlines()]
    return {(line["hash"], line["key"]): line for line in lines}


def run_module(module: str, keys: list[str], until: float, results: Results) -> bool:
    """Run mutants of one module in a worker; False where its tests are red without any change."""
    scratch = make_scratch()
    todo, out = scratch / "todo.json", scratch / "results.jsonl"
    todo.write_text(json.dumps(keys), encoding="utf-8")
    out.touch()
    files = [f"tests/kernels/test_{name}.py" for name in TESTS[module]]
    # Bytecode of a mutant could be taken for that of the next one, written in the same second.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(scratch)}
    baseline = (fingerprint(), f"baseline of {module}")
    state_word = results.get(baseline, {}).get("result", "unknown")
    arguments = [module, str(todo), str(out), str(until), state_word, *files]
    command = [sys.executable, "-m", "tests.mutation.worker", *arguments]
    read = 0
    with (scratch / "log.txt").open("wb") as log:
        worker = subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            running = True
            while running:
                running = worker.poll() is None
                lines = out.read_text(encoding="utf-8").splitlines()
                for line in lines[read:]:
                    result = json.loads(line)
                    if result["result"] == "red":
                        print(f"{module}: red without any change: {result['by']}")
                        return False
                    label = baseline if result["result"] == "green" else (module_hash(module), result["key"])
                    results[label] = result
                    with STATE.open("a", encoding="utf-8") as state:
                        state.write(json.dumps({**result, "hash": label[0], "key": label[1]}) + "\n")
                    print(f"{result['result']} in {result['seconds']} s: {result['key']} {result['by']}", flush=True)
                read = len(lines)
                time.sleep(0.2)
            if read == 0:
                print(log_text := (scratch / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:])
                return not log_text and time.time() > until
            return True
        finally:
            # The worker's group holds the child that runs a mutant, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            shutil.rmtree(scratch, ignore_errors=True)


def write_report(mutants: list[Mutant], results: Results, path: Path) -> int:
    """The table of counts and the list of survivors; the number of survivors without an explanation."""
    by_module: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in mutants:
        result = results.get(label_of(mutant), {}).get("result", "not run")
        if result == "survived" or (result == "not run" and mutant.key in EQUIVALENT):
            result = "equivalent" if mutant.key in EQUIVALENT else "SURVIVED"
            survivors.append(mutant)
        by_module.setdefault(mutant.module, Counter())[result] += 1
    columns = ["killed", "timeout", "equivalent", "SURVIVED", "not run"]
    total: Counter[str] = sum(by_module.values(), Counter())
    lines = [
        "# Mutation report of the reference kernels",
        "",
        "Written by `python -m tests.mutation`. A mutant is one mechanical change of the source; it is killed when a",
        "test of its op goes red, and equivalent when no input can tell it from the original, for the reason given.",
        "",
        "| module | mutants | " + " | ".join(columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for module, counts in [*by_module.items(), ("all", total)]:
        lines.append(f"| {module} | {sum(counts.values())} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    kinds = Counter(mutant.kind for mutant in mutants)
    lines += ["", "Kinds: " + ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())) + "."]
    lines += ["", "## Survivors", ""]
    for mutant in survivors:
        reason = EQUIVALENT.get(mutant.key, "NOT EXPLAINED: a test is missing")
        where = f"`{mutant.module}.{mutant.function}`, {mutant.kind}"
        lines.append(f"- {where}: `{mutant.before}` became `{mutant.after}`: {reason}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return sum(mutant.key not in EQUIVALENT for mutant in survivors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", action="append", choices=sorted(TESTS), help="may be given several times")
    parser.add_argument("--sample", type=int, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no mutant after so long")
    parser.add_argument("--list", action="store_true", help="list the mutants and end")
    parser.add_argument("--again", action="store_true", help="run survivors of earlier calls and explained ones again")
    parser.add_argument(
        "--report", type=Path, help=f"default: {REPORT.name} with everything run, else beside the state"
    )
    args = parser.parse_args()

    modules = args.module or list(TESTS)
    mutants = all_mutants(modules)
    if args.sample:
        mutants = random.Random(args.seed).sample(mutants, min(args.sample, len(mutants)))
    if args.list:
        for mutant in mutants:
            print(f"{mutant.module}:{mutant.line}: {mutant.key}")
        print(f"{len(mutants)} mutants")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    until = time.time() + args.seconds
    results = known_results()
    if args.again:
        results = {label: result for label, result in results.items() if result["result"] != "survived"}
    STATE.parent.mkdir(exist_ok=True)
    for module in modules:
        keys = [m.key for m in mutants if m.module == module and is_open(m, results, args.again)]
        if keys and time.time() < until and not run_module(module, keys, until, results):
            return 2

    left = sum(is_open(m, results, False) for m in mutants)
    everything = not args.module and not args.sample and not left
    path = args.report or (REPORT if everything else STATE.with_suffix(".md"))
    unexplained = write_report(mutants, results, path)
    for mutant in mutants:
        if mutant.key in EQUIVALENT and results.get(label_of(mutant), {}).get("result") == "killed":
            print(f"killed, so not equivalent: {mutant.key}")
    print(f"{len(mutants) - left} of {len(mutants)} mutants run; {unexplained} unexplained survivors; report: {path}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
