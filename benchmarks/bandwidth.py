"""The machine's own bandwidths, measured in the same run as the ops: what their GB/s are compared with."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.results import BANDWIDTH, Row, with_times

READ, COPY_WARM, COPY_FRESH = "read", "copy_warm", "copy_fresh"
MEGABYTES = {"cpu": 256, "cuda": 2048}
"""Far beyond any cache."""


def measure(device: torch.device, *, rounds: int = 7, megabytes: int | None = None) -> list[Row]:
    """Reading; copying into memory that was written before; copying into memory fresh from the system.

    Fresh memory costs a page fault for every page on a CPU, so huge pages are tried too. GPU memory comes from
    PyTorch's cache, so there the last two are one. Bytes are those read plus those written.
    """
    size = (MEGABYTES[device.type] if megabytes is None else megabytes) * 2**20
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source).copy_(source)
    # Which way is the fastest depends on the machine: the best one counts.
    reads: list[Callable[[], Tensor]] = [source.sum, source.amax, lambda: torch.linalg.vector_norm(source)]
    ways: dict[str, tuple[int, list[Callable[[], Tensor]]]] = {
        READ: (size, reads),
        COPY_WARM: (2 * size, [lambda: target.copy_(source)]),
    }
    if device.type == "cpu":
        ways[COPY_FRESH] = (2 * size, [source.clone, lambda: _copy_into_huge_pages(source)])
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (_, calls) in ways.items():
            times[name].append([min(_seconds(call, device) for call in calls)])
    blank = Row(
        op=BANDWIDTH,
        options="",
        mode="",
        metric="call",
        provider="",
        backend="",
        shape=f"{size >> 20}MiB",
        sizes="",
        dtype="float32",
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        **machine.facts(device),
    )
    return [with_times(replace(blank, provider=name, bytes=moved), times[name]) for name, (moved, _) in ways.items()]


def with_share(row: Row, traffic: Mapping[str, int], measured: Sequence[Row]) -> Row:
    """The row with the time that its bytes take at the measured bandwidths, as a share of the time it took.

    `traffic` gives the bytes of each bandwidth. On a GPU all of them are held against the copy bandwidth.
    """
    known = {m.provider: m.gb_s for m in measured if m.threads == row.threads}
    if row.time_us is None or "" in traffic or not known:
        return row
    names = list(traffic) if row.threads is not None else [COPY_WARM]
    amounts = list(traffic.values()) if row.threads is not None else [sum(traffic.values())]
    at_best = 0.0
    for name, amount in zip(names, amounts, strict=True):
        speed = known[name]
        assert speed is not None
        at_best += amount / speed / 1e3  # GB/s are bytes a nanosecond
    return replace(row, bandwidth="+".join(names), share=at_best / row.time_us)


def _copy_into_huge_pages(source: Tensor) -> Tensor:
    memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=source.dtype).copy_(source)


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del result
    return seconds
