"""Small tensors from numbers written in a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cases.precision import wide


def numbers(*rows: Any) -> Tensor:
    """Numbers or rows of numbers in the widest type of the backend under test."""
    return torch.tensor(rows, dtype=wide())


def ids_of(*rows: Any) -> Tensor:
    """Rows of macro ids, int32."""
    return torch.tensor(rows, dtype=torch.int32)
