"""Running a function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


def _worker(rank: int, function: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        torch.save(function(rank, world, *args), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """`function(rank, world, *args)` on every rank; the results by rank. A rank that hangs fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (function, world, folder, args), nprocs=world, join=True)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
