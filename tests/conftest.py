"""What every test may ask for: a backend of the kernels, and memory that is not by chance zero."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import marlhf_kernels
from marlhf_kernels.backends import requested, select
from marlhf_kernels.ops import _registry
from tests.cases.precision import widest

NAMES = ("reference", "reference-float32", "cpu", "gpu")


@dataclass(frozen=True)
class Backend:
    """A kernel backend under test: where its tensors live, the widest type, and the grids of sizes it can take."""

    name: str
    device: str
    grids: tuple[str, ...]
    widest: torch.dtype = torch.float32


def known_backend(name: str) -> Backend:
    """The backend called `name`, as this machine can run it."""
    everything = ("interpreter", "edge", "production")
    if name == "reference":
        return Backend("reference", "cpu", everything, torch.float64)
    if name == "reference-float32":
        return Backend("reference", "cpu", everything)
    if name == "gpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return Backend("gpu", "cpu", ("interpreter",))
        return Backend("gpu", "cuda", everything)
    return Backend(name, "cpu", everything)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=NAMES,
        help="kernel backend to test: reference, reference-float32 (the same tests in float32), cpu or gpu; may be "
        "given several times; default: reference. A test that calls an op that the backend has no kernel for is "
        "skipped; `test_backends.py` holds the list of ops that each backend claims",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in config.getoption("--backend") or ():
        status = marlhf_kernels.backends()[known_backend(name).name]
        if not status.available:
            raise pytest.UsageError(f"--backend {name}: {status.reason}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("--backend") or ["reference"]
        metafunc.parametrize("backend", names, indirect=True)


def _select_or_skip(backend: str) -> Callable[[str, Sequence[Any]], Callable[..., Any]]:
    """`backends.select`, but an op that the backend under test does not have ends the test as skipped.

    Raised from inside the op, the skip is no Exception: a test that expects some error is not taken in by it.
    """
    ops = marlhf_kernels.backends()[backend].ops

    def choose(op: str, args: Sequence[Any]) -> Callable[..., Any]:
        if requested() == backend and op not in ops:
            pytest.skip(f"the {backend} backend has no {op} yet")
        return select(op, args)

    return choose


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The test's ops run on this backend, its tensors are made on its device, and `wide()` is its widest type."""
    chosen = known_backend(request.param)
    if request.node.callspec.params.get("dtype") is torch.float64 and chosen.widest != torch.float64:
        pytest.skip("float64 always runs on the reference")
    if chosen.name != "reference":
        monkeypatch.setattr(_registry, "select", _select_or_skip(chosen.name))
    with contextlib.ExitStack() as stack:
        stack.enter_context(marlhf_kernels.use_backend(chosen.name))
        stack.enter_context(widest(chosen.widest))
        if chosen.device != "cpu":
            stack.enter_context(torch.device(chosen.device))
        yield chosen


def _poison(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, FakeTensor) or x.device.type == "meta" or torch.compiler.is_compiling():
        return x
    with torch.no_grad():
        if x.is_floating_point():
            x.detach().fill_(float("nan"))
        elif x.dtype == torch.bool:
            x.detach().fill_(True)
        elif not x.is_complex():
            x.detach().fill_(min(torch.iinfo(x.dtype).max, 0x5A5A5A5A))
    return x


_EMPTY, _EMPTY_LIKE, _NEW_EMPTY = torch.empty, torch.empty_like, torch.Tensor.new_empty


def _poisoned_empty(*args, **kwargs):
    return _poison(_EMPTY(*args, **kwargs))


def _poisoned_empty_like(*args, **kwargs):
    return _poison(_EMPTY_LIKE(*args, **kwargs))


def _poisoned_new_empty(self, *args, **kwargs):
    return _poison(_NEW_EMPTY(self, *args, **kwargs))


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN (or a large integer): code that trusts it to be 0 goes red."""
    monkeypatch.setattr(torch, "empty", _poisoned_empty)
    monkeypatch.setattr(torch, "empty_like", _poisoned_empty_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned_new_empty)
