"""Is a provider right: its results against the exact ones, under the error budget of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases.compare import FLOAT32_BUDGET, ULP


@dataclass(frozen=True)
class Verdict:
    """`error` and `budget` are those of the result that comes closest to its limit, or is furthest beyond."""

    error: float
    budget: float
    reason: str = ""
    """Why it is wrong; empty where it is right."""


def judge(got: Sequence[Tensor], exact: Sequence[Tensor], eager: Sequence[Tensor], names: Sequence[str]) -> Verdict:
    """Compare results entry by entry.

    Args:
        got: what the provider returned. It may return fewer results than there are, never none.
        exact: from float64 inputs.
        eager: from the same inputs in float32, by plain PyTorch: its own error is part of the budget.
        names: of the results, for the reason.

    Integers must be equal. A floating result may differ by eager's largest error plus 2e-6 of the largest exact
    number; one stored in 16 bits by a unit in its last place more.
    """
    if not got:
        raise ValueError("a provider that returns nothing cannot be judged")
    worst = Verdict(0.0, 1.0)
    for name, a, b, plain in zip(names, got, exact, eager, strict=False):
        if a.shape != b.shape:
            return Verdict(math.inf, 0.0, f"{name} has shape {list(a.shape)}, not {list(b.shape)}")
        verdict = _judge_floats(name, a, b, plain) if b.is_floating_point() else _judge_integers(name, a, b)
        if verdict.reason:
            return verdict
        if verdict.error * worst.budget > worst.error * verdict.budget:
            worst = verdict
    return worst


def _judge_integers(name: str, got: Tensor, exact: Tensor) -> Verdict:
    different = int((got != exact).sum())
    return Verdict(float(different), 0.0, f"{name} differs in {different} places" if different else "")


def _judge_floats(name: str, got: Tensor, exact: Tensor, eager: Tensor) -> Verdict:
    if exact.numel() == 0:
        return Verdict(0.0, FLOAT32_BUDGET)
    scale = float(exact.abs().max()) or 1.0
    error = (got.double() - exact).abs()
    excused = ULP.get(got.dtype)
    if excused is not None:
        # Errors within a unit in the last place are none, and larger ones count from there.
        error = (error - excused * exact.abs() - 2.0**-24).clamp_(min=0)
    largest = float(error.max()) / scale if not bool(torch.isnan(error).any()) else math.inf
    budget = FLOAT32_BUDGET + float((eager.double() - exact).abs().max()) / scale
    if largest <= budget:
        return Verdict(largest, budget)
    return Verdict(largest, budget, f"{name} is off by {largest:.1e} of its largest number, allowed are {budget:.1e}")
