"""Runs mutants of one module against its tests; started by `tests.mutation` inside the scratch copy.

The tests are collected once. For each mutant a forked child puts the changed code into the functions that are loaded
already (every reference to them sees it) and runs the tests until the first red one. The changed source also lies on
disk meanwhile, for tests that start processes of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests.mutation.mutants import mutants_of

PACKAGE = "marlhf_kernels.reference"
# A mutant may loop for ever; the slowest set of tests takes a part of this.
LIMIT_SECONDS = 240


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
        elif isinstance(new, (int, float, str, tuple)) and not name.startswith("__"):
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

    def __init__(self, name: str, keys: list[str], results: Path, until: float, is_green: bool) -> None:
        self.module = importlib.import_module(f"{PACKAGE}.{name}")
        self.path = Path(str(self.module.__file__))
        self.source = self.path.read_text(encoding="utf-8")
        wanted = set(keys)
        self.mutants = [m for m in mutants_of(name, self.source) if m.key in wanted]
        self.results = results
        self.until = until
        self.is_green = is_green
        self.red = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the first red test."""
        if report.failed and not self.red:
            self.red = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """The original first, which must be green (or was in an earlier call); then every mutant, until time is up."""
        if session.testsfailed:
            self.tell("", "red", "collection", 0.0)
            return True
        if not self.is_green:
            began = time.monotonic()
            result, red = self.run(session, None)
            self.tell("", "green" if result == "survived" else "red", red, time.monotonic() - began)
            if result != "survived":
                return True
        for mutant in self.mutants:
            if time.time() > self.until:
                break
            began = time.monotonic()
            self.path.write_text(mutant.source, encoding="utf-8")
            try:
                result, red = self.run(session, mutant.source)
            finally:
                self.path.write_text(self.source, encoding="utf-8")
            self.tell(mutant.key, result, red, time.monotonic() - began)
        return True

    def tell(self, key: str, result: str, red: str, seconds: float) -> None:
        """One line for the parent."""
        with self.results.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, "result": result, "by": red, "seconds": round(seconds, 2)}) + "\n")

    def run(self, session: pytest.Session, source: str | None) -> tuple[str, str]:
        """("killed" | "survived" | "timeout", first red test), from a forked child."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            status = 2
            try:
                if source is not None:
                    put_in(self.module, source)
                for i, item in enumerate(session.items):
                    following = session.items[i + 1] if i + 1 < len(session.items) else None
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if self.red:
                        break
                status = 1 if self.red else 0
                os.write(writing, self.red.encode())
            finally:
                os._exit(status)
        os.close(writing)
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (done := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                os.close(reading)
                return "timeout", ""
            time.sleep(0.005)
        with os.fdopen(reading, "rb") as pipe:
            red = pipe.read().decode()
        code = os.waitstatus_to_exitcode(done[1])
        return ("survived", "") if code == 0 else ("killed", red or f"the process ended with {code}")


def main() -> int:
    name, todo, results, until, is_green, *files = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    keys = json.loads(Path(todo).read_text(encoding="utf-8"))
    plugin = MutantLoop(name, keys, Path(results), float(until), is_green == "green")
    if Path.cwd() not in plugin.path.parents:
        raise RuntimeError(f"the kernels were imported from {plugin.path}, not from the scratch copy")
    # What these show, the oracle shows too, and sooner.
    chosen = "not opcheck and not compile and not gradcheck and not never_there and not production"
    options = ["-q", "-m", "not slow and not long", "-k", chosen, "-p", "no:cacheprovider", "--tb=no", "--no-header"]
    return int(pytest.main([*files, *options], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
