"""One case: every provider judged, those that are right timed side by side, a row for each.

A round goes once through all providers in a new random order and gives each a burst of calls, so that whatever
drifts (clock frequency, neighbours) meets all of them, and the spread of the rounds is the noise of the run.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import marlhf_kernels
from benchmarks import bandwidth, gate, machine
from benchmarks.results import CANNOT_RUN, OK, WRONG, Row, with_times
from benchmarks.shapes import Shape

Inputs = dict[str, Tensor]
Results = Sequence[Tensor]
Call = Callable[[], Any]
Clock = Callable[[Callable[[Call], object], Callable[[], Call], int], Sequence[float]]
"""`clock(target, setup, calls)`: the seconds that each of `calls` times `target(setup())` took, setup left out."""

Bench = Callable[["Case", str], None]
"""The fixture that the bench files call."""

MODES = ("forward", "backward", "full")


class CannotRunError(Exception):
    """Why a provider has nothing to offer for a case."""


@dataclass(frozen=True)
class Provider:
    """Somebody's way to compute what a case asks for.

    `call` takes the case's inputs and returns its results in order, or the first of them. A provider that
    computes gradients without autograd gives `full`, which returns results and gradients together.
    """

    name: str
    call: Callable[[Inputs], Results]
    full: Callable[[Inputs], Results] | None = None
    backend: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around a burst, outside of the clock."""
    overwrites: tuple[str, ...] = ()
    """Inputs that a call destroys: they are restored before each, outside of the clock."""
    into_warm: bool = False
    """Its results take the place of inputs, so that no memory fresh from the system is written."""
    cannot_run: str = ""


@dataclass(frozen=True)
class Case:
    """What is asked for: one op with its options at one size."""

    op: str
    shape: Shape
    dtype: torch.dtype
    inputs: Callable[[], Inputs]
    """The inputs on the CPU, seeded: the same numbers every time."""
    call: Callable[[Inputs], Results]
    """Our op."""
    names: tuple[str, ...]
    """Of the results."""
    traffic: Mapping[str, Mapping[str, int]]
    """For each mode: the least bytes to move, by the bandwidth that they are compared with (`""` with none)."""
    options: str = ""
    learns: tuple[str, ...] = ()
    """Inputs that get a gradient."""
    upstream: int = 1
    """How many of the first results a gradient comes into."""
    peers: Sequence[Provider] = ()
    eager: Callable[[Inputs], Results] | None = None
    """Plain PyTorch, for the error budget; our reference in float32 where None."""
    widened: bool = True
    """Is the exact answer that of float64 inputs; else that of the reference on the inputs as they are."""
    in_place: Callable[[Inputs], Results] | None = None
    """Our op writing the gradients over the inputs that learn."""

    def __str__(self) -> str:
        words = (self.op, self.options, self.shape.name, dtype_name(self.dtype))
        return "-".join(word.replace(" ", "") for word in words if word)


@dataclass(frozen=True)
class Effort:
    """How long a case may take."""

    rounds: int
    burst_seconds: float
    """Of one provider in one round."""
    most_calls: int = 200
    """In one burst."""
    slow_seconds: float = 2.0
    """Of a provider whose calls take longer than a burst, over all rounds: it is in fewer, in three at least."""


QUICK = Effort(rounds=7, burst_seconds=0.08)
FULL = Effort(rounds=15, burst_seconds=0.2, slow_seconds=10.0)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def our_providers(case: Case, mode: str, device: torch.device) -> list[Provider]:
    """The case's op on each of our backends."""
    providers = []
    for name, status in marlhf_kernels.backends().items():
        reason = "" if status.available else status.reason
        if status.available and (name, device.type) in (("gpu", "cpu"), ("cpu", "cuda")):
            reason = f"not for tensors on {device.type}"
        own = Provider("marlhf", case.call, backend=name, context=_on_backend(name), cannot_run=reason)
        providers.append(own)
        if case.in_place is not None and mode != "forward" and not reason:
            providers.append(
                replace(own, name="marlhf in place", call=case.in_place, overwrites=case.learns, into_warm=True)
            )
    return providers


def _on_backend(name: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: marlhf_kernels.use_backend(name)


def run_case(
    case: Case,
    mode: str,
    device: torch.device,
    effort: Effort,
    clock: Clock,
    *,
    chosen: Callable[[str], bool] = lambda name: True,
    bandwidths: Sequence[Row] = (),
) -> list[Row]:
    """Judge every chosen provider and time those that are right; `bandwidths` are what `share` compares with."""
    torch.compiler.reset()  # a function that was compiled for many shapes is no longer compiled at all
    task = Task(case, mode, device)
    blank = Row(
        op=case.op,
        options=case.options,
        mode=mode,
        metric="call",
        provider="",
        backend="",
        shape=case.shape.name,
        sizes=str(case.shape),
        dtype=dtype_name(case.dtype),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        **machine.facts(device),
        bytes=sum(case.traffic[mode].values()),
    )
    rows: list[Row] = []
    ready: list[tuple[int, Runner]] = []
    for provider in (*our_providers(case, mode, device), *case.peers):
        if not chosen(provider.name.split()[0]):
            continue
        row = replace(blank, provider=provider.name, backend=provider.backend)
        try:
            runner = Runner(task, provider)
            verdict = task.judge(runner)
        except Exception as problem:
            # Whatever a library raises where it does not fit, the table tells and the others are timed.
            rows.append(replace(row, status=CANNOT_RUN, reason=_in_a_line(problem)))
            continue
        row = replace(row, error=verdict.error, budget=verdict.budget)
        if verdict.reason:
            rows.append(replace(row, status=WRONG, reason=verdict.reason))
            continue
        ready.append((len(rows), runner))
        rows.append(replace(row, status=OK))
    task.forget_answers()
    times = alternate([runner for _, runner in ready], effort, clock)
    for (place, runner), rounds in zip(ready, times, strict=True):
        row = with_times(rows[place], rounds)
        rows[place] = bandwidth.with_share(row, _traffic(case, mode, runner.provider), bandwidths)
    return rows


def _traffic(case: Case, mode: str, provider: Provider) -> dict[str, int]:
    traffic = dict(case.traffic[mode])
    if provider.into_warm and bandwidth.COPY_FRESH in traffic:
        traffic[bandwidth.COPY_WARM] = traffic.pop(bandwidth.COPY_FRESH)
    return traffic


class Task:
    """A case in one mode on one device, with its exact answers."""

    def __init__(self, case: Case, mode: str, device: torch.device) -> None:
        self.case, self.mode, self.device = case, mode, device
        self.inputs = {name: x.to(device) for name, x in case.inputs().items()}
        self.differentiated = mode != "forward"
        self.shared = {name: self._leaf(name, x) for name, x in self.inputs.items()}
        wide = torch.float64 if case.widened else None
        with marlhf_kernels.use_backend("reference"):
            outputs = self._outputs(case.call, self.cast(wide))
            generator = torch.Generator().manual_seed(1)
            self.upstream = [
                torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device) if x.dim() else x.new_ones(())
                for x in outputs[: case.upstream]
            ]
            self.exact = self._answers(case.call, wide)
            if case.eager is None:
                self.plain = self._answers(case.call, torch.float32 if case.widened else None)
        if case.eager is not None:
            self.plain = self._answers(case.eager, torch.float32)

    def cast(self, dtype: torch.dtype | None) -> Inputs:
        """The inputs in `dtype`, those with a gradient as leaves of a graph."""
        if dtype is None:
            return self.shared
        cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}
        return {name: self._leaf(name, x) for name, x in cast.items()}

    def own_copies(self, names: Sequence[str]) -> Inputs:
        """The inputs, shared with other providers but for those named."""
        return {**self.shared, **{name: self._leaf(name, self.inputs[name].clone()) for name in names}}

    def judge(self, runner: Runner) -> gate.Verdict:
        """Run once and compare. Gradients are compared where the mode has a backward pass."""
        with runner.provider.context():
            results, gradients = runner.results()
        names = (*self.case.names[: len(results)], *(f"gradient of {name}" for name in self.case.learns))
        count = len(self.case.names)
        exact, plain = (
            [*answers[: min(len(results), count)], *answers[count:]] for answers in (self.exact, self.plain)
        )
        return gate.judge([*results, *gradients], exact, plain, names)

    def forget_answers(self) -> None:
        """Free the memory of the exact answers before anything is timed."""
        self.exact, self.plain = [], []

    def _leaf(self, name: str, x: Tensor) -> Tensor:
        return x.detach().requires_grad_(self.differentiated and name in self.case.learns)

    def _outputs(self, call: Callable[[Inputs], Results], inputs: Inputs) -> Results:
        with contextlib.nullcontext() if self.differentiated else torch.no_grad():
            return call(inputs)

    def _answers(self, call: Callable[[Inputs], Results], dtype: torch.dtype | None) -> list[Tensor]:
        inputs = self.cast(dtype)
        outputs = self._outputs(call, inputs)
        answers = [x.detach() for x in outputs]
        if self.differentiated:
            answers += gradients_of(outputs, [inputs[name] for name in self.case.learns], self.upstream)
        return answers


def gradients_of(outputs: Results, leaves: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of sum(output * upstream) in each leaf."""
    pairs = [(x, g) for x, g in zip(outputs, upstream, strict=False) if x.requires_grad]
    return list(torch.autograd.grad([x for x, _ in pairs], leaves, [g.to(x.dtype) for x, g in pairs]))


class Runner:
    """A provider made ready for a task: what is timed, and what is restored in between."""

    def __init__(self, task: Task, provider: Provider) -> None:
        if provider.cannot_run:
            raise CannotRunError(provider.cannot_run)
        self.task, self.provider = task, provider
        self.inputs = task.own_copies(provider.overwrites)
        self.leaves = [self.inputs[name] for name in task.case.learns]
        self.upstream: list[Tensor] | None = None
        self.own_gradient = task.mode == "full" and provider.full is not None
        if task.mode == "backward" and provider.full is not None:
            raise CannotRunError("has its gradient from forward already")

    def results(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients of one call."""
        self.restore()
        if self.own_gradient:
            assert self.provider.full is not None
            with torch.no_grad():
                everything = list(self.provider.full(self.inputs))
            count = len(everything) - len(self.leaves)
            return everything[:count], everything[count:]
        outputs_and_graph = self._forward()
        outputs = [x.detach() for x in outputs_and_graph]
        # Cast before the clock runs.
        self.upstream = [g.to(x.dtype) for x, g in zip(outputs, self.task.upstream, strict=False)]
        if not self.task.differentiated:
            return outputs, []
        return outputs, [x.clone() for x in gradients_of(outputs_and_graph, self.leaves, self.upstream)]

    def prepared(self) -> Call:
        """Restore what a call destroys and return the call to time."""
        self.restore()
        if self.own_gradient:
            assert self.provider.full is not None
            full, inputs = self.provider.full, self.inputs
            return lambda: _no_grad(full, inputs)
        if self.task.mode == "forward":
            return self._forward
        assert self.upstream is not None
        leaves, upstream = self.leaves, self.upstream
        if self.task.mode == "backward":
            outputs = self._forward()
            return lambda: gradients_of(outputs, leaves, upstream)
        return lambda: gradients_of(self._forward(), leaves, upstream)

    def restore(self) -> None:
        with torch.no_grad():
            for name in self.provider.overwrites:
                self.inputs[name].copy_(self.task.inputs[name])

    def _forward(self) -> Results:
        if self.task.differentiated:
            return self.provider.call(self.inputs)
        return _no_grad(self.provider.call, self.inputs)


def _no_grad(call: Callable[[Inputs], Results], inputs: Inputs) -> Results:
    with torch.no_grad():
        return call(inputs)


def alternate(runners: Sequence[Runner], effort: Effort, clock: Clock, seed: int = 0) -> list[list[list[float]]]:
    """For each runner the seconds of its calls, round by round."""
    if not runners:
        return []
    order = random.Random(seed)
    seconds = [_seconds_of_a_call(runner) for runner in runners]
    bursts = [max(1, min(effort.most_calls, int(effort.burst_seconds / t))) for t in seconds]
    turns = []
    for present in _rounds(seconds, effort):
        turns += order.sample(present, len(present))
    schedule = [i for i in turns for _ in range(bursts[i])]
    synchronize = torch.cuda.synchronize if runners[0].task.device.type == "cuda" else None
    held: list[object] = []

    with contextlib.ExitStack() as inside:
        steps = _steps(turns, bursts)

        def setup() -> Call:
            held.clear()
            which, opens = next(steps)
            runner = runners[which]
            if opens:
                inside.close()
                inside.enter_context(runner.provider.context())
                if bursts[which] > 1:
                    runner.prepared()()  # what ran before has emptied the caches
            call = runner.prepared()
            if synchronize is not None:
                synchronize()
            return call

        def target(call: Call) -> None:
            # Freeing the results belongs to whoever uses them: it is left out of the time.
            held.append(call())
            if synchronize is not None:
                synchronize()

        flat = iter(clock(target, setup, len(schedule)))
    times: list[list[list[float]]] = [[] for _ in runners]
    for which in turns:
        times[which].append(list(itertools.islice(flat, bursts[which])))
    return times


def _steps(turns: Sequence[int], bursts: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Which runner is next, and whether that opens its burst."""
    for which in turns:
        for call in range(bursts[which]):
            yield which, call == 0


def _rounds(seconds: Sequence[float], effort: Effort) -> list[list[int]]:
    """Who takes part in each round: a slow one in fewer, spread over all."""
    rounds: list[list[int]] = [[] for _ in range(effort.rounds)]
    for which, call in enumerate(seconds):
        own = effort.rounds
        if call > effort.burst_seconds:
            own = min(effort.rounds, max(3, int(effort.slow_seconds / call)))
        for place in range(own):
            rounds[place * effort.rounds // own].append(which)
    return rounds


def _seconds_of_a_call(runner: Runner) -> float:
    """Roughly: the judge has run it once, so nothing compiles here."""
    with runner.provider.context():
        call = runner.prepared()
        start = time.perf_counter()
        result = call()
        if runner.task.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del result
    return seconds


def plain_clock(target: Callable[[Call], object], setup: Callable[[], Call], calls: int) -> list[float]:
    """A `Clock` without pytest."""
    seconds = []
    for _ in range(calls):
        call = setup()
        start = time.perf_counter()
        target(call)
        seconds.append(time.perf_counter() - start)
    return seconds


def _in_a_line(problem: Exception) -> str:
    text = " ".join(str(problem).split())
    if not isinstance(problem, (CannotRunError, marlhf_kernels.BackendUnavailableError)):
        text = f"{type(problem).__name__}: {text}" if text else type(problem).__name__
    return text if len(text) <= 200 else text[:197] + "..."
