"""Who is timed and who is not, and that what is timed is what was judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks import bandwidth, gate, harness
from benchmarks.harness import Call, Case, Effort, Inputs, Provider, Results
from benchmarks.results import Row
from benchmarks.shapes import Shape
from marlhf_kernels import token_logprobs

CPU = torch.device("cpu")
SHORT = Effort(rounds=3, burst_seconds=0.0)


def eager(x: Inputs) -> Results:
    return (torch.log_softmax(x["logits"].float(), -1).gather(-1, x["labels"].unsqueeze(-1)).squeeze(-1),)


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, function: Callable[[Inputs], Results]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, x: Inputs) -> Results:
        self.calls += 1
        return self.function(x)


def case(*peers: Provider, dtype: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator).to(dtype)
    labels = torch.arange(6)
    size = logits.numel() * dtype.itemsize
    return Case(
        op="token_logprobs",
        shape=Shape("tiny-6", (("N", 6), ("V", 40))),
        dtype=dtype,
        inputs=lambda: {"logits": logits, "labels": labels},
        call=lambda x: (token_logprobs(x["logits"], x["labels"]),),
        in_place=lambda x: (token_logprobs(x["logits"], x["labels"], inplace_backward=True),),
        names=("log-probability",),
        learns=("logits",),
        eager=eager,
        peers=peers,
        traffic={
            "forward": {"read": size},
            "backward": {"copy_fresh": 2 * size},
            "full": {"read": size, "copy_fresh": 2 * size},
        },
    )


def run(asked: Case, mode: str, **options: object) -> dict[str, Row]:
    rows = harness.run_case(asked, mode, CPU, SHORT, harness.plain_clock, **options)  # type: ignore[arg-type]
    return {row.who: row for row in rows}


@pytest.mark.parametrize("mode", harness.MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_provider_that_is_right_is_timed(mode: str, dtype: torch.dtype) -> None:
    right = Counted(eager)
    found = run(case(Provider("eager", right), dtype=dtype), mode)
    for who in ("eager", "marlhf:reference"):
        assert found[who].status == "ok"
        assert found[who].rounds == SHORT.rounds
        assert found[who].time_us is not None
        assert found[who].error is not None
        assert found[who].budget is not None
        assert found[who].error <= found[who].budget
    assert right.calls > SHORT.rounds


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda x: (eager(x)[0] * 1.0001,), "log-probability is off by 1.0e-04"),
        (lambda x: (eager(x)[0] * math.nan,), "log-probability is off by inf"),
        (lambda x: (eager(x)[0][:-1],), "log-probability has shape [5], not [6]"),
        (lambda x: (torch.zeros(6),), "log-probability is off by"),
    ],
)
def test_a_wrong_provider_is_shown_and_not_timed(wrong: Callable[[Inputs], Results], told: str) -> None:
    counted = Counted(wrong)
    found = run(case(Provider("wrong one", counted), Provider("eager", eager)), "forward")
    row = found["wrong one"]
    assert row.status == "wrong"
    assert told in row.reason
    assert (row.calls, row.min_us, row.p50_us, row.gb_s) == (None,) * 4
    assert counted.calls == 1  # by the judge
    assert found["eager"].status == "ok"


def test_a_right_result_with_a_wrong_gradient_is_wrong() -> None:
    def detached_upstream(x: Inputs) -> Results:
        # The value is right; the gradient ignores what comes in from above, as if it were all ones.
        result = eager(x)[0]
        return (result.detach() + (result - result.detach()).sum().expand(6) / 6,)

    asked = case(Provider("wrong one", detached_upstream))
    assert run(asked, "forward")["wrong one"].status == "ok"
    found = run(asked, "full")["wrong one"]
    assert found.status == "wrong"
    assert "gradient of logits" in found.reason


def test_a_provider_that_cannot_run_says_why() -> None:
    def breaks(x: Inputs) -> Results:
        raise RuntimeError("no driver\nfound")

    peers = (Provider("absent", eager, cannot_run="not installed"), Provider("broken", breaks))
    found = run(case(*peers, Provider("eager", eager)), "full")
    assert (found["absent"].status, found["absent"].reason) == ("cannot run", "not installed")
    assert (found["broken"].status, found["broken"].reason) == ("cannot run", "RuntimeError: no driver found")
    assert found["broken"].time_us is None
    assert found["eager"].status == "ok"


def test_a_backend_without_the_op_cannot_run() -> None:
    found = run(case(), "forward")
    assert found["marlhf:reference"].status == "ok"
    assert found["marlhf:gpu"].status == "cannot run"
    assert found["marlhf:gpu"].reason


def test_overwritten_inputs_are_restored_and_others_never_see_it() -> None:
    found = run(case(Provider("eager", eager)), "full")
    # Every call overwrites its logits with a gradient; a second one on those would have been refused or wrong.
    assert found["marlhf in place:reference"].status == "ok"
    assert found["eager"].status == "ok"

    seen = []

    def destroys(x: Inputs) -> Results:
        seen.append(x["logits"].sum().item())
        result = (eager(x)[0].clone(),)
        x["logits"].zero_()
        return result

    found = run(case(Provider("destroyer", destroys, overwrites=("logits",)), Provider("eager", eager)), "forward")
    assert found["destroyer"].status == "ok"
    assert len(seen) > SHORT.rounds
    assert len(set(seen)) == 1
    assert found["eager"].status == "ok"


def test_own_gradients_are_judged_and_timed() -> None:
    def full(x: Inputs) -> Results:
        logits = x["logits"].detach().requires_grad_()
        with torch.enable_grad():
            result = eager({**x, "logits": logits})[0]
        return result.detach(), torch.autograd.grad(result, logits, torch.ones(6))[0]

    asked = case(Provider("own", eager, full=full))
    # The upstream gradient of this case is not all ones.
    assert "gradient of logits" in run(asked, "full")["own"].reason
    assert run(asked, "backward")["own"].status == "cannot run"
    assert run(asked, "forward")["own"].status == "ok"


def test_only_the_chosen_ones_run() -> None:
    found = run(case(Provider("eager", eager), Provider("trl", eager)), "full", chosen=lambda name: name != "trl")
    assert "trl" not in found
    assert {"eager", "marlhf in place:reference"} <= set(found)


def test_rounds_alternate_between_all_and_calls_are_told_apart() -> None:
    """A clock that reads 1 s for each call of the first provider and 2 s for each of the second."""
    order: list[str] = []

    def named(name: str) -> Callable[[Inputs], Results]:
        def call(x: Inputs) -> Results:
            order.append(name)
            return eager(x)

        return call

    task = harness.Task(case(), "forward", CPU)
    runners = [harness.Runner(task, Provider(name, named(name))) for name in ("one", "two")]

    def clock(target: Callable[[Call], object], setup: Callable[[], Call], calls: int) -> list[float]:
        order.clear()
        seconds = []
        for _ in range(calls):
            target(setup())
            seconds.append({"one": 1.0, "two": 2.0}[order[-1]])
        return seconds

    times = harness.alternate(runners, Effort(rounds=8, burst_seconds=0.0), clock)
    assert times == [[[1.0]] * 8, [[2.0]] * 8]
    turns = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert {frozenset(turn) for turn in turns} == {frozenset(("one", "two"))}
    assert len(set(turns)) == 2  # neither is always the first


def test_slow_providers_take_part_in_fewer_rounds_spread_over_all() -> None:
    effort = Effort(rounds=7, burst_seconds=0.1, slow_seconds=2.0)
    rounds = harness._rounds([0.01, 0.4, 5.0], effort)
    assert [which for present in rounds for which in present].count(0) == 7
    assert [i for i, present in enumerate(rounds) if 1 in present] == [0, 1, 2, 4, 5]
    assert [i for i, present in enumerate(rounds) if 2 in present] == [0, 2, 4]


def test_what_is_timed_is_the_call_alone() -> None:
    """Restoring and building the graph happen in setup, the context is entered around it."""
    log: list[str] = []
    inside = []

    class Context:
        def __enter__(self) -> None:
            log.append("enter")

        def __exit__(self, *problem: object) -> None:
            log.append("exit")

    def call(x: Inputs) -> Results:
        inside.append(log.count("enter") - log.count("exit"))
        return eager(x)

    def clock(target: Callable[[Call], object], setup: Callable[[], Call], calls: int) -> list[float]:
        for _ in range(calls):
            ready = setup()
            before = len(inside)
            target(ready)
            # Backward alone: its forward ran in setup.
            assert len(inside) == before
        return [1.0] * calls

    task = harness.Task(case(), "backward", CPU)
    runner = harness.Runner(task, Provider("x", call, context=Context))  # type: ignore[arg-type]
    assert not task.judge(runner).reason
    harness.alternate([runner], SHORT, clock)
    assert set(inside) == {1}
    assert log.count("enter") == log.count("exit")


def test_shares_are_times_at_the_measured_bandwidth() -> None:
    measured = [
        replace(row, gb_s=speed)
        for row, speed in zip(bandwidth.measure(CPU, rounds=1, megabytes=1), (10.0, 8.0, 2.0), strict=True)
    ]
    assert [row.provider for row in measured] == ["read", "copy_warm", "copy_fresh"]
    row = replace(measured[0], op="x", min_us=100.0)
    # 0.2 MB at 10 GB/s are 20 us, 0.1 MB at 2 GB/s are 50.
    shared = bandwidth.with_share(row, {"read": 200_000, "copy_fresh": 100_000}, measured)
    assert shared.share == pytest.approx(0.7)
    assert shared.bandwidth == "read+copy_fresh"
    assert bandwidth.with_share(row, {"": 200_000}, measured).share is None
    # On a GPU everything is held against the copy bandwidth, and the median counts.
    on_gpu = [replace(m, threads=None) for m in measured]
    shared = bandwidth.with_share(
        replace(row, threads=None, p50_us=100.0), {"read": 200_000, "copy_fresh": 200_000}, on_gpu
    )
    assert shared.share == pytest.approx(0.5)
    assert shared.bandwidth == "copy_warm"


def test_in_place_results_are_held_against_warm_memory() -> None:
    measured = bandwidth.measure(CPU, rounds=1, megabytes=1)
    found = run(case(), "full", bandwidths=measured)
    assert found["marlhf:reference"].bandwidth == "read+copy_fresh"
    assert found["marlhf in place:reference"].bandwidth == "read+copy_warm"


def judge_one(got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> gate.Verdict:
    return gate.judge([got], [exact], [eager], ["x"])


def test_the_error_budget_by_hand() -> None:
    exact = torch.tensor([1.0, -4.0], dtype=torch.float64)
    # 2e-6 of the largest, 4, is 8e-6.
    near, far = exact + torch.tensor([7e-6, 0]), exact + torch.tensor([9e-6, 0])
    assert not judge_one(near, exact, exact).reason
    assert judge_one(far, exact, exact).reason
    # Eager errs by 2e-6 itself.
    assert not judge_one(far, exact, exact + torch.tensor([0, 2e-6])).reason
    verdict = judge_one(near, exact, exact)
    assert (verdict.error, verdict.budget) == pytest.approx((7e-6 / 4, 2e-6))


def test_results_in_16_bits_may_be_a_unit_in_the_last_place_off() -> None:
    exact = torch.tensor([1.0, 100.0], dtype=torch.float64)
    assert not judge_one(torch.tensor([1.0078125, 100.0]).bfloat16(), exact, exact).reason
    assert judge_one(torch.tensor([1.015625, 100.0]).bfloat16(), exact, exact).reason
    # The same numbers in float32 have no such excuse.
    assert judge_one(torch.tensor([1.0078125, 100.0]), exact, exact).reason


def test_integers_must_be_equal() -> None:
    exact = torch.tensor([0, 1, 1])
    assert not judge_one(exact.int(), exact, exact).reason
    assert judge_one(torch.tensor([0, 1, 2]), exact, exact).reason == "x differs in 1 places"
