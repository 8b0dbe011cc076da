"""Which implementation of an op runs: the rule, the two overrides, and the report of what is there.

Three backends exist by name: `reference` (plain PyTorch, the definition), `cpu` (native C++) and `gpu`
(Triton). Each one registers itself here; this module knows none of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

NAMES = ("reference", "cpu", "gpu")
VARIABLE = "MARLHF_BACKEND"

_requested: contextvars.ContextVar[str | None] = contextvars.ContextVar("marlhf_backend", default=None)


class BackendUnavailableError(RuntimeError):
    """The backend that was asked for cannot run; the message says why and what to do."""


class BackendStatus(NamedTuple):
    """One line of `backends()`."""

    available: bool
    reason: str
    """Why it cannot run, or where it runs."""
    ops: tuple[str, ...]
    """The ops it has, by their name in `torch.ops.marlhf`."""


@dataclass(frozen=True)
class Backend:
    """What a backend tells this module about itself.

    `missing` gives the reason why the backend cannot run, or None; `worth_a_warning` says whether a person
    expected it to be there, so that its absence is worth telling once.
    """

    name: str
    where: str
    implementations: dict[str, Callable[..., Any]]
    missing: Callable[[], str | None]
    worth_a_warning: Callable[[], bool]


_backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Make a backend known. Called once by each backend's package when it is imported."""
    _backends[backend.name] = backend


def backends() -> dict[str, BackendStatus]:
    """Report every backend: whether it can run here, why not, and which ops it has.

    Returns:
        `{"reference" | "cpu" | "gpu": BackendStatus(available, reason, ops)}`.
    """
    report = {}
    for name in NAMES:
        reason = _why_not(name)
        backend = _backends.get(name)
        ops = tuple(sorted(backend.implementations)) if backend else ()
        report[name] = BackendStatus(reason is None, reason or (backend.where if backend else ""), ops)
    return report


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops inside the `with` block on one backend, whatever the tensors' device.

    It wins over the environment variable `MARLHF_BACKEND` and holds for the current thread (context) only.
    A backward pass follows the block that it runs in; outside of any, the one its forward pass ran in.

    Args:
        name: `"reference"`, `"cpu"` or `"gpu"`.

    Raises:
        ValueError: `name` is none of them.
        BackendUnavailableError: the backend cannot run here; the message says why.
    """
    token = _requested.set(_check_runnable(name, "use_backend"))
    try:
        yield
    finally:
        _requested.reset(token)


def requested() -> str | None:
    """The backend asked for in the current context (`use_backend`, else `MARLHF_BACKEND`), or None."""
    return _requested.get() or os.environ.get(VARIABLE) or None


@contextlib.contextmanager
def resume(name: str | None) -> Iterator[None]:
    """Ask for `name` again, as a backward pass does for its forward pass, unless another is asked for."""
    if name is None or requested() is not None:
        yield
        return
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def select(op: str, args: Sequence[Any]) -> Callable[..., Any]:
    """The implementation of `op` that runs for these arguments.

    Raises:
        ValueError: the environment variable names an unknown backend.
        BackendUnavailableError: the backend that was asked for cannot run this call.
    """
    name = requested()
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    device = tensors[0].device.type
    # Coefficients are 0-d, and float64 whatever the data is.
    wide = any(x.dtype is torch.float64 and x.dim() > 0 for x in tensors)
    if name is None:
        return _automatic(op, device, wide)
    _check_runnable(name, VARIABLE)
    implementation = _backends[name].implementations.get(op)
    if implementation is None:
        known = ", ".join(sorted(_backends[name].implementations)) or "none"
        raise BackendUnavailableError(
            f"the {name!r} backend was asked for, but it has no kernel for {op!r} (it has: {known}). Use 'reference', "
            "or ask for no backend and the fastest one that has the op is taken."
        )
    if wide and name != "reference":
        raise BackendUnavailableError(
            f"the {name!r} backend was asked for, but {op!r} got float64 tensors, which only 'reference' computes."
        )
    if name == "cpu" and device != "cpu":
        raise BackendUnavailableError(
            f"the 'cpu' backend was asked for, but {op!r} got tensors on {device}; move them to the CPU."
        )
    return implementation


def _automatic(op: str, device: str, wide: bool) -> Callable[..., Any]:
    reference = _backends["reference"].implementations[op]
    name = {"cpu": "cpu", "cuda": "gpu"}.get(device)
    backend = _backends.get(name) if name else None
    if wide or backend is None or op not in backend.implementations:
        return reference
    reason = backend.missing()
    if reason is None:
        return backend.implementations[op]
    if backend.worth_a_warning():
        _warn_once(backend.name, reason)
    return reference


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    warnings.warn(
        f"marlhf_kernels: the {name!r} backend cannot run ({reason}); the PyTorch reference runs instead.",
        RuntimeWarning,
        stacklevel=3,
    )


def _why_not(name: str) -> str | None:
    backend = _backends.get(name)
    if backend is None:
        return f"this version of marlhf_kernels has no {name} kernels"
    return backend.missing()


def _check_runnable(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source}: unknown backend {name!r}; known backends: {', '.join(NAMES)}")
    reason = _why_not(name)
    if reason is not None:
        raise BackendUnavailableError(f"{source}: the {name!r} backend cannot run: {reason}")
    return name
