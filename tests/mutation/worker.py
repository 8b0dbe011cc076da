"""Runs mutants of one module against its tests; started by `tests.mutation` inside the scratch copy.

The tests are collected once. For each mutant a forked child puts the changed code into the functions that are loaded
already (every reference to them sees it) and runs the tests, those first that have killed most so far, until the first
red one. The changed source also lies on disk meanwhile, for tests that start processes of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests.mutation.mutants import mutants_of

PACKAGE = "marlhf_kernels.reference"
# A mutant may loop for ever. The slowest set of tests takes a part of the first; the second ends one that waits.
LIMIT_CPU_SECONDS = 45
LIMIT_SECONDS = 400
# Exit status of the child: neither green (0) nor a red test (1).
FAILED_TO_RUN = 2


def put_in(module: ModuleType, source: str) -> None:
    """Give the functions, methods and constants of a loaded module the code of `source`."""
    fresh: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(source, str(module.__file__), "exec"), fresh)
    for name, new in fresh.items():
        old = getattr(module, name, None)
        if isinstance(new, type) and new.__module__ == module.__name__:
            for attribute, member in vars(new).items():
                _swap(vars(old).get(attribute), member)
        elif isinstance(new, FunctionType) and new.__module__ == module.__name__:
            _swap(old, new)
        elif isinstance(new, (int, float, str, tuple, dict)) and not name.startswith("__"):
            setattr(module, name, new)


def _swap(old: Any, new: Any) -> None:
    if isinstance(new, property):
        old, new = old.fget, new.fget
    elif isinstance(new, cached_property):
        old, new = old.func, new.func
    elif isinstance(new, (staticmethod, classmethod)):
        old, new = old.__func__, new.__func__
    if isinstance(new, FunctionType):
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


class MutantLoop:
    """A pytest plugin that runs the collected tests once for each mutant instead of once."""

    def __init__(self, job: dict[str, Any]) -> None:
        name = job["module"]
        self.module = importlib.import_module(f"{PACKAGE}.{name}")
        self.path = Path(str(self.module.__file__))
        self.source = self.path.read_text(encoding="utf-8")
        wanted = set(job["keys"])
        self.mutants = [m for m in mutants_of(name, self.source) if m.key in wanted]
        self.results = Path(job["results"])
        self.until = job["until"]
        self.kills = Counter(job["kills"])
        self.parent = os.getppid()
        self.red = ""
        self.why = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the first red test and what it said."""
        if report.failed and not self.red:
            self.red = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.why = f"{report.when}: {message}".splitlines()[0][:120]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Every mutant until time is up, then the original, in the order of tests that the kills have led to.

        Where that is red the kills mean nothing: a test is red without any change, or because of the order alone.
        """
        if session.testsfailed:
            self.tell("", {"result": "red", "by": "collection", "why": "", "cpu": 0.0})
            return True
        for mutant in self.mutants:
            if time.time() > self.until or os.getppid() != self.parent:
                break
            self.path.write_text(mutant.source, encoding="utf-8")
            try:
                outcome = self.run(session, mutant.source)
            finally:
                self.path.write_text(self.source, encoding="utf-8")
            self.tell(mutant.key, outcome)
            self.kills[outcome["by"]] += 1
        outcome = self.run(session, None)
        self.tell("", {**outcome, "result": "green" if outcome["result"] == "survived" else "red"})
        return True

    def tell(self, key: str, outcome: dict[str, Any]) -> None:
        """One line for the parent."""
        with self.results.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, **outcome}) + "\n")

    def run(self, session: pytest.Session, source: str | None) -> dict[str, Any]:
        """What the tests say in a forked child, which one went red and why, and the CPU time of the child.

        The result is "survived", "killed" (a test went red), "crashed" (the process died of a signal), "timeout", or
        "error": not a word about the mutant, since the child could not run the tests.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self.run_child(session, source, writing)
        os.close(writing)
        deadline = time.monotonic() + LIMIT_SECONDS
        is_late = False
        while not (done := os.wait4(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline and not is_late:
                is_late = True
                os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        with os.fdopen(reading, encoding="utf-8") as pipe:
            red, why = json.loads(pipe.read() or '["", ""]')
        code = os.waitstatus_to_exitcode(done[1])
        if is_late or code == -signal.SIGXCPU:
            result = "timeout"
        elif code < 0:
            result, why = "crashed", signal.Signals(-code).name
        else:
            result = {0: "survived", 1: "killed"}.get(code, "error")
        usage = done[2]
        return {"result": result, "by": red, "why": why, "cpu": round(usage.ru_utime + usage.ru_stime, 2)}

    def run_child(self, session: pytest.Session, source: str | None, writing: int) -> None:
        """The tests until the first red one; never returns."""
        status, said = FAILED_TO_RUN, ("", "")
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_SECONDS, LIMIT_CPU_SECONDS + 5))
            if source is not None:
                put_in(self.module, source)
            items = sorted(session.items, key=lambda item: -self.kills[item.nodeid])
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.red:
                    break
            status, said = int(bool(self.red)), (self.red, self.why)
        except BaseException:
            said = ("", traceback.format_exc(limit=-1)[-120:])
        finally:
            os.write(writing, json.dumps(said).encode())
            os._exit(status)


def main() -> int:
    import torch

    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plugin = MutantLoop(job)
    if Path.cwd() not in plugin.path.parents:
        raise RuntimeError(f"the kernels were imported from {plugin.path}, not from the scratch copy")
    # What these show, the oracle shows too, and sooner.
    left_out = ("opcheck", "compile", "gradcheck", "never_there", "production", "of_a_process")
    chosen = " and ".join([f"not {name}" for name in left_out] + [f"({job['chosen']})"] * bool(job["chosen"]))
    options = ["-q", "-m", "not slow and not long", "-k", chosen, "-p", "no:cacheprovider", "--tb=short", "--no-header"]
    return int(pytest.main([*job["files"], *options], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
