"""Rows with made-up times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.results import Row

BLANK = Row(
    op="token_logprobs",
    options="entropy",
    mode="forward",
    metric="call",
    provider="marlhf",
    backend="cpu",
    shape="gpt2-256",
    sizes="N=256 V=50257",
    dtype="float32",
    threads=1,
    device="some CPU",
    torch="2.13.0",
    triton="",
    python="3.11.0",
    commit="abc",
)


def row(time_us: float | None = None, noise: float = 0.01, **fields: Any) -> Row:
    """A row whose minimum and median are `time_us`; none with status `ok` is without one."""
    made = replace(BLANK, **fields)
    if time_us is None:
        return made
    return replace(
        made, calls=10, rounds=5, min_us=time_us, p20_us=time_us, p50_us=time_us, p80_us=time_us, noise=noise, gb_s=1.0
    )


def rival(name: str, time_us: float | None = None, **fields: Any) -> Row:
    """A row of somebody else."""
    return row(time_us, provider=name, **{"backend": "", **fields})
