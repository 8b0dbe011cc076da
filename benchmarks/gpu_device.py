"""What only a device can show: that no op waits for it or breaks a CUDA graph, and device times.

`python -m benchmarks.gpu_device check` and `... time --csv FILE --seconds N`; `--dry-run` for a machine without a
GPU. `gpu.sh` runs both.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import marlhf_kernels as mk
from benchmarks import (
    bandwidth,
    bench_advantages,
    bench_policy_loss,
    bench_token_logprobs,
    bench_value_loss,
    results,
    table,
)
from benchmarks.harness import Call, Case, Effort, Provider, run_case
from benchmarks.shapes import logits_shape, token_shape
from tests.cases import calls
from tests.cases.batches import Batch, make_batch
from tests.cases.shapes import random_rows

EFFORT = Effort(rounds=5, burst_seconds=0.05, most_calls=40)
CACHE_BYTES = 2**29
"""Written before each call: more than the L2 cache of any GPU, and long enough that the call is queued meanwhile."""
SAFETY_SECONDS = 45
"""A case is not begun with less time left: compiling its rivals may take so long."""

Run = Callable[[], Sequence[Tensor]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_device")
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.what == "check":
        return check(device)
    if options.csv is None:
        parser.error("time needs --csv")
    return measure(device, options.csv, time.monotonic() + options.seconds)


def check(device: torch.device) -> int:
    """Run each op once as it is, once where a host sync is an error, and once from a graph: equal bits each time."""
    failed = 0
    for name, run in runs(device):
        try:
            with mk.use_backend("gpu"):
                want = run()
                if device.type == "cuda":
                    _same("without a host sync", want, _without_sync(run))
                    _same("from a graph", want, _from_graph(run))
            print(f"ok      {name}")
        except Exception as problem:
            failed = 1
            print(f"FAILED  {name}: {type(problem).__name__}: {' '.join(str(problem).split())[:400]}")
    if device.type != "cuda":
        print("no GPU: neither host syncs nor graphs were looked for")
    return failed


def runs(device: torch.device) -> Iterator[tuple[str, Run]]:
    """Every op with its gradients, by name."""
    vocabulary = 8192 if device.type == "cuda" else 40
    for rows in (2, 1024 if device.type == "cuda" else 4):
        with torch.device(device):
            logits, labels = torch.randn(rows, vocabulary), torch.arange(rows)
        yield f"token_logprobs, {rows} rows", functools.partial(_logprobs, logits, labels)
    with torch.device(device):
        batch = make_batch(random_rows(5, 33), "mixed", torch.float32)
        x, mask = torch.randn(5, 1000), torch.rand(5, 1000) < 0.7
    yield "masked_whiten", functools.partial(_alone, mk.masked_whiten, x, mask)
    # Without num_macros their results have a size that must be read from the device.
    sized = [calls.reduce_call(num_macros=33), calls.lengths_call(num_macros=33)]
    for call in (*(c for c in calls.ONE_EACH if calls.MACRO not in c.outputs), *sized):
        yield str(call), functools.partial(_call, call, batch)
    yield "segmentation.fixed_ngram", functools.partial(_alone, mk.segmentation.fixed_ngram, mask, 3)
    yield "segmentation.perplexity", functools.partial(_alone, mk.segmentation.perplexity, mask, x)


def _alone(function: Callable[..., Tensor], *arguments: object) -> Sequence[Tensor]:
    return (function(*arguments),)


def _logprobs(logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
    return _differentiated(
        lambda x: mk.token_logprobs(x, labels, return_entropy=True, temperature=0.7, logit_softcap=30.0), logits
    )


def _call(call: calls.Call, batch: Batch) -> Sequence[Tensor]:
    learns = call.learns
    if learns is None:
        return call.run(batch)
    return _differentiated(lambda leaf: call.run(batch.with_fields(**{learns: leaf})), batch[learns])


def _differentiated(function: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> Sequence[Tensor]:
    leaf = x.detach().requires_grad_()
    outputs = function(leaf)
    learned = [o for o in outputs if o.requires_grad]
    return *(o.detach() for o in outputs), *torch.autograd.grad([o.sum() for o in learned], leaf)


def _without_sync(run: Run) -> Sequence[Tensor]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _from_graph(run: Run) -> Sequence[Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for x in got:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return got


def _same(what: str, want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    for place, (a, b) in enumerate(zip(want, got, strict=True)):
        if not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            raise AssertionError(f"result {place} is another one {what}")


def cases(tiny: bool) -> list[tuple[Case, tuple[str, ...]]]:
    """The table, the most important first."""
    modules = (bench_token_logprobs, bench_advantages, bench_policy_loss, bench_value_loss)
    if tiny:
        return [case for module in modules for case in module.cases("tiny")]
    both = ("forward", "backward")
    tokens = token_shape(256, 1024)
    logits = [
        bench_token_logprobs.case(logits_shape(model, rows), dtype, entropy=entropy)
        for model, rows, dtype, entropy in (
            ("llama3", 2048, torch.bfloat16, True),
            ("gemma2", 1024, torch.bfloat16, True),
            ("qwen", 2048, torch.bfloat16, True),
            ("llama3", 2048, torch.bfloat16, False),
            ("llama3", 1024, torch.float32, True),
            ("llama3", 8, torch.bfloat16, True),
        )
    ]
    return [
        (logits[0], both),
        (bench_advantages.rollout(tokens, torch.float32, bench_advantages.MACRO_TOKENS), ("forward",)),
        *((bench_policy_loss.case(tokens, torch.float32, level), both) for level in bench_policy_loss.LEVELS),
        (bench_value_loss.case(tokens, torch.float32, "token"), both),
        *((case, both) for case in logits[1:]),
    ]


def measure(device: torch.device, csv: Path, deadline: float) -> int:
    """Rows of every case that there was time for, written as they come; a table beside them."""
    csv.unlink(missing_ok=True)
    on_device = device.type == "cuda"
    bandwidths = bandwidth.measure(device, megabytes=None if on_device else 8)
    results.write(csv, bandwidths)
    rows = list(bandwidths)
    flush = torch.empty(CACHE_BYTES if on_device else 1, dtype=torch.uint8, device=device)
    failed = 0
    for case, modes in cases(tiny=not on_device):
        for mode in modes:
            if time.monotonic() + SAFETY_SECONDS > deadline:
                print(f"not measured, the time is up: {case}, {mode}")
                failed = 1
                continue
            try:
                measured = _measure_case(case, mode, device, flush, bandwidths)
            except Exception as problem:
                # One case that breaks must not cost the others their times.
                print(f"FAILED  {case}, {mode}: {type(problem).__name__}: {' '.join(str(problem).split())[:400]}")
                failed = 1
                continue
            rows += measured
            results.write(csv, measured, append=True)
            for row in measured:
                share = "" if row.share is None else f", {row.share:.0%} of the copy bandwidth"
                time_us = "-" if row.p50_us is None else f"{row.p50_us:.1f} us"
                print(f"{row.status:10} {case} {mode} {row.who}: {time_us}{share} {row.reason}")
                ours = row.provider == "marlhf" and row.backend == "gpu"
                failed |= ours and row.status in (
                    (results.WRONG, results.CANNOT_RUN) if on_device else (results.WRONG,)
                )
    csv.with_suffix(".md").write_text(table.render(rows), encoding="utf-8")
    return int(failed)


def _measure_case(
    case: Case, mode: str, device: torch.device, flush: Tensor, bandwidths: Sequence[results.Row]
) -> list[results.Row]:
    def device_clock(target: Callable[[Call], object], setup: Callable[[], Call], calls: int) -> list[float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        seconds = []
        for _ in range(calls):
            call = setup()
            flush.zero_()

            def timed(call: Call = call) -> object:
                begin.record()
                result = call()
                end.record()
                return result

            target(timed)
            seconds.append(begin.elapsed_time(end) / 1e3)
        return seconds

    def host_clock(target: Callable[[Call], object], setup: Callable[[], Call], calls: int) -> list[float]:
        seconds = []
        for _ in range(calls):
            call = setup()
            start = time.perf_counter()
            target(call)
            seconds.append(time.perf_counter() - start)
        return seconds

    on_device = device.type == "cuda"
    if not on_device:
        # The harness leaves the interpreter out; here it stands for the device, and its rivals for nothing.
        ours = Provider("marlhf", case.call, backend="gpu", context=lambda: mk.use_backend("gpu"))
        case = dataclasses.replace(case, peers=[ours], in_place=None)
    # Python loops over tokens, and code that goes sequence by sequence, take seconds and say little.
    measured = run_case(
        case,
        mode,
        device,
        EFFORT,
        device_clock if on_device else host_clock,
        chosen=lambda name: name not in ("trl", "loop"),
        bandwidths=bandwidths,
    )
    return [dataclasses.replace(row, metric="device" if on_device else "call") for row in measured]


if __name__ == "__main__":
    sys.exit(main())
