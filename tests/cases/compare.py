"""Comparison of an op's output with exact numbers, under the error budget of the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.cases.precision import wide

FLOAT32_BUDGET = 2e-6
# One unit in the last place, relative to the number.
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def flatten(x: object) -> list[float]:
    """Nested lists, numbers or a tensor as one list of floats."""
    if isinstance(x, Tensor):
        return x.detach().double().flatten().tolist()
    if isinstance(x, (list, tuple)):
        return [v for part in x for v in flatten(part)]
    return [float(x)]  # type: ignore[arg-type]


def largest(x: object) -> float:
    """The largest finite magnitude in nested lists or a tensor; 0 if there is none."""
    return max((abs(v) for v in flatten(x) if math.isfinite(v)), default=0.0)


def assert_close(
    actual: object,
    expected: object,
    dtype: torch.dtype | None = None,
    *,
    eager: object | None = None,
    scale: float | None = None,
    what: str = "",
) -> None:
    """Entry by entry: within the budget of `dtype` relative to the largest number, inf equal to inf, no NaN.

    `dtype` is the computation's, by default the widest of the backend. float64 allows 1e-12; lower precisions allow
    eager PyTorch's own error (`eager`: its result on the inputs
    raised to float32) plus 2e-6, and a 16-bit tensor one unit in the last place more.
    """
    got, want = flatten(actual), flatten(expected)
    assert len(got) == len(want), f"{what}: {len(got)} numbers, {len(want)} expected"
    dtype = wide() if dtype is None else dtype
    budget = (1e-12 if dtype == torch.float64 else FLOAT32_BUDGET) * (largest(want) if scale is None else scale)
    if eager is not None:
        budget += max((abs(a - b) for a, b in zip(flatten(eager), want, strict=True) if math.isfinite(b)), default=0.0)
    stored = actual.dtype if isinstance(actual, Tensor) else None
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if math.isinf(b):
            assert a == b, f"{what}[{i}]: {a}, expected {b}"
            continue
        allowed = budget
        if stored in ULP:
            allowed += ULP[stored] * abs(b) + 2.0**-24
        assert abs(a - b) <= allowed, f"{what}[{i}]: {a!r}, expected {b!r}, allowed {allowed:.3e}"


def assert_same_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    """Equal in every bit, NaN equal to NaN."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape, what
    assert torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)), what
