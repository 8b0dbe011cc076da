"""The widest floating type that the backend under test computes with.

The reference takes float64; the other backends are float32. Hand-computed tests are written once: they build their
tensors in `wide()` and allow `tight()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_wide = torch.float64


def wide() -> torch.dtype:
    """float64, or float32 where the backend under test has no more."""
    return _wide


def tight() -> float:
    """The relative error allowed in `wide()`."""
    return 1e-12 if _wide == torch.float64 else 2e-6


@contextmanager
def widest(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block `wide()` is `dtype`."""
    global _wide
    before, _wide = _wide, dtype
    try:
        yield
    finally:
        _wide = before
