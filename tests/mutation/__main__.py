"""Breaks the reference kernels one change at a time and runs each op's tests until the first that goes red.

    python -m tests.mutation                     everything (half an hour on one quiet core)
    python -m tests.mutation --module whiten     one module
    python -m tests.mutation --sample 20         a random sample
    python -m tests.mutation --seconds 170       stop in time; the next call goes on from there
    python -m tests.mutation --list              only say what there is

The package and its tests are copied to a scratch folder; nothing here is changed. Results are kept in
build/mutation.jsonl under the hash of the module and are taken from there while the module stays the same: a killed
mutant's while the test that killed it is there, a survivor's while no test changes. A mutant that no test kills is a
survivor: either `equivalent.py` says why it cannot be told from the original, or a test is missing, and the exit
status is 1. Explained mutants are run only with --again, and named where a test kills them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from typing import Any

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "marlhf_kernels/reference"
STATE = ROOT / "build" / "mutation.jsonl"
REPORT = Path(__file__).parent / "report.md"

# The tests of each module: files of tests/kernels, and which of their tests where not all are needed. What is left out
# shows nothing that the rest does not show sooner.
TESTS = {
    "value_loss": (["value_loss"], "not grids"),
    "units": (["policy_loss", "value_loss"], "not grids and (by_hand or no_action or empty or counts)"),
    "whiten": (["whiten"], "not rank"),
    "segmentation": (
        ["segmentation", "registration"],
        "test_segmentation or (test_registration and (builders_wait or packed_sequences))",
    ),
    "macro": (["macro", "registration"], "(test_macro and not grids) or waits_for_no_gpu"),
    "_layout": (
        ["reference", "macro", "segmentation", "errors", "registration", "advantages", "policy_loss"],
        "test_reference or (test_macro and not grids and not types) or test_segmentation"
        " or (test_errors and (cu_seqlens or num_macros or in_tensors)) or (test_registration and waits)"
        " or (test_advantages and not oracle and not telescopes)"
        " or (test_policy_loss and (normalisers or empty_sequences))",
    ),
    "advantages": (["advantages", "registration"], "(test_advantages and not grids) or (waits and gae)"),
    "policy_loss": (
        ["policy_loss", "linear", "registration"],
        "(test_policy_loss and not grids) or asked_for"
        " or (test_linear and (as_a_loss or bonus or penalties or no_action or microbatches))",
    ),
    "logprobs": (
        ["token_logprobs", "registration", "linear"],
        "test_token_logprobs or logprobs_waits or asked_for or slices",
    ),
    "linear": (["linear", "registration"], "(test_linear and not loss and not ranks) or asked_for"),
}
Result = dict[str, Any]
Results = dict[tuple[str, str], Result]


def all_mutants(modules: list[str]) -> list[Mutant]:
    """The mutants of these modules of the reference."""
    out = []
    for module in modules:
        out += mutants_of(module, (ROOT / PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return out


def module_hash(module: str) -> str:
    """The hash of a module's source."""
    return hashlib.sha256((ROOT / PACKAGE / f"{module}.py").read_bytes()).hexdigest()[:16]


@functools.cache
def fingerprint(root: Path) -> str:
    """The hash of everything that decides what the tests say of a mutant."""
    folders = ("marlhf_kernels", "tests/cases", "tests/kernels")
    files = sorted(path.relative_to(root) for folder in folders for path in (root / folder).rglob("*.py"))
    files = [root / path for path in [*files, Path("tests/conftest.py")]]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def label_of(mutant: Mutant) -> tuple[str, str]:
    """What a result is kept under."""
    return module_hash(mutant.module), mutant.key


def is_open(mutant: Mutant, results: Results, again: bool) -> bool:
    """Is the mutant to be run: it has no result yet, and no explanation unless those are run again."""
    return label_of(mutant) not in results and (again or mutant.key not in EQUIVALENT)


def still_holds(result: Result) -> bool:
    """A mutant stays dead while the test that killed it is there, and alive while no test and no code changed."""
    if result["result"] == "survived":
        return result["tests"] == fingerprint(ROOT)
    if result["result"] == "killed":
        path, _, name = result["by"].partition("::")
        file = ROOT / path
        return file.exists() and f"def {name.partition('[')[0]}(" in file.read_text(encoding="utf-8")
    return result["result"] in ("crashed", "timeout")


def make_scratch() -> Path:
    """A copy of the kernels and their tests."""
    scratch = Path(tempfile.mkdtemp(prefix="marlhf-mutation-"))
    for folder in ("marlhf_kernels", "tests/cases", "tests/kernels", "tests/mutation"):
        shutil.copytree(ROOT / folder, scratch / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        shutil.copy(ROOT / name, scratch / name)
    return scratch


def known_results() -> Results:
    """Results of earlier calls that still hold."""
    if not STATE.exists():
        return {}
    lines = [json.loads(line) for line in STATE.read_text(encoding="utf-8").splitlines()]
    return {(line["hash"], line["key"]): line for line in lines if still_holds(line)}


def keep(result: Result, results: Results) -> None:
    """Remember a result, on disk too."""
    results[result["hash"], result["key"]] = result
    with STATE.open("a", encoding="utf-8") as state:
        state.write(json.dumps(result) + "\n")


def run_module(module: str, keys: list[str], until: float, results: Results) -> bool:
    """Run mutants of one module in a worker; False, and nothing is kept, where its tests are red without any change."""
    scratch = make_scratch()
    tests = fingerprint(scratch)
    module_label = module_hash(module)
    out = scratch / "results.jsonl"
    out.touch()
    job = {
        "module": module,
        "keys": keys,
        "results": str(out),
        "until": until,
        "kills": Counter(r["by"] for (label, _), r in results.items() if label == module_label and r["by"]),
        "files": [f"tests/kernels/test_{name}.py" for name in TESTS[module][0]],
        "chosen": TESTS[module][1],
    }
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    # Bytecode of a mutant could be taken for that of the next one, written in the same second.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(scratch)}
    command = [sys.executable, "-m", "tests.mutation.worker", str(scratch / "job.json")]
    found = []
    is_green = True
    with (scratch / "log.txt").open("wb") as log:
        worker = subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            running = True
            while running:
                running = worker.poll() is None
                for line in out.read_text(encoding="utf-8").splitlines()[len(found) :]:
                    result = {**json.loads(line), "hash": module_label, "tests": tests}
                    found.append(result)
                    told = f"{result['result']} in {result['cpu']} s: {result['key'] or module}"
                    print(f"{told} | {result['by']} | {result['why']}", flush=True)
                    if result["result"] == "red":
                        print(f"{module}: red without any change: {result['by']}")
                        is_green = False
                    elif result["result"] not in ("green", "error"):
                        keep(result, results)
                time.sleep(0.2)
            if not is_green:
                forget(found, results)
                return False
            if worker.returncode:
                print((scratch / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:])
                return False
            return True
        finally:
            # The worker's group holds the child that runs a mutant, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            shutil.rmtree(scratch, ignore_errors=True)


def forget(found: list[Result], results: Results) -> None:
    """Take results back, on disk too."""
    for result in found:
        results.pop((result["hash"], result["key"]), None)
    STATE.write_text("".join(json.dumps(result) + "\n" for result in results.values()), encoding="utf-8")


def verdict(mutant: Mutant, results: Results) -> str:
    """The column of the report that a mutant belongs to."""
    result = results.get(label_of(mutant), {}).get("result", "not run")
    if result in ("survived", "not run") and mutant.key in EQUIVALENT:
        return "equivalent"
    return "SURVIVED" if result == "survived" else str(result)


def table(title: str, groups: dict[str, Counter[str]]) -> list[str]:
    """Counts of verdicts, a line for each group and one for all."""
    columns = ["killed", "crashed", "timeout", "equivalent", "SURVIVED", "not run"]
    lines = [f"| {title} | mutants | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for name, counts in [*groups.items(), ("all", sum(groups.values(), Counter()))]:
        lines.append(f"| {name} | {counts.total()} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    return lines


def write_report(mutants: list[Mutant], results: Results, path: Path) -> int:
    """The tables of counts and the list of survivors; the number of survivors without an explanation."""
    modules: dict[str, Counter[str]] = {}
    kinds: dict[str, Counter[str]] = {}
    for mutant in mutants:
        result = verdict(mutant, results)
        modules.setdefault(mutant.module, Counter())[result] += 1
        kinds.setdefault(mutant.kind, Counter())[result] += 1
    spent = sum(results[label_of(m)]["cpu"] for m in mutants if label_of(m) in results)
    survivors = [mutant for mutant in mutants if verdict(mutant, results) in ("equivalent", "SURVIVED")]
    killed = [r["why"] for m in mutants if (r := results.get(label_of(m), {})).get("result") == "killed"]
    compared = sum(why.startswith(("call: assert", "call: AssertionError", "call: Failed")) for why in killed)
    tried = sum(mutant.key in EQUIVALENT and label_of(mutant) in results for mutant in survivors)
    left = sum(verdict(mutant, results) == "not run" for mutant in mutants)
    lines = [
        "# Mutation report of the reference kernels",
        "",
        "Written by `python -m tests.mutation`. A mutant is one mechanical change of the source. It is killed when a",
        "test of its op goes red, crashed when it ends the process, timed out when it runs on and on, and equivalent",
        "when no input can tell it from the original, for the reason given.",
        "",
        f"There are {len(mutants)} mutants; {left} of them have neither been run nor explained yet.",
        "",
        f"CPU time of the tests that were run on mutants: {spent / 60:.1f} minutes. Of the killed, {compared} fell to",
        f"a comparison and {len(killed) - compared} to an exception. Of those called equivalent, {tried} have been run",
        "on the tests as they are now, and survived; the others rest on their reason alone (`--again` runs them).",
        "",
        *table("module", modules),
        "",
        *table("kind", dict(sorted(kinds.items()))),
        "",
        "## Survivors",
        "",
    ]
    for module in modules:
        by_reason: dict[str, list[Mutant]] = {}
        for mutant in survivors:
            if mutant.module == module:
                reason = EQUIVALENT.get(mutant.key, "NOT EXPLAINED: a test is missing")
                by_reason.setdefault(reason, []).append(mutant)
        for reason, alike in by_reason.items():
            lines += [f"`{module}`: {reason}", ""]
            lines += [f"- `{m.function}`, {m.kind}: `{m.before}` became `{m.after}`" for m in alike]
            lines.append("")
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
    parser.add_argument("--again", action="store_true", help="run explained mutants too")
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
    done = f"{len(mutants) - left} of {len(mutants)} mutants run or explained"
    print(f"{done}; {unexplained} unexplained survivors; report: {path}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
