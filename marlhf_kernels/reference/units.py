"""What a loss counts: tokens or macro actions, and what their sum is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Macros, scalar


class Units:
    """The units of a loss: action tokens, or macro actions in their slots."""

    def __init__(self, macros: Macros, *, of_macros: bool) -> None:
        self.macros = macros
        self.chosen = macros.exists if of_macros else macros.action  # [N]
        self.running = macros.macros_before if of_macros else macros.num_before  # [N + 1]

    @property
    def number(self) -> Tensor:
        """0-d: how many units there are."""
        return self.running[-1]

    def row_weight(self, dtype: torch.dtype) -> Tensor:
        """[N] 1 / (units of the sequence), for the mean inside each sequence."""
        in_row = self.running[self.macros.end] - self.running[self.macros.start]
        return 1 / in_row.clamp(min=1).to(dtype)

    def effective_count(self, normalize_by: str, normalizer: Tensor | None, dtype: torch.dtype) -> Tensor:
        """0-d: what the sum over units is divided by; 1 where there is no action token, against 0 / 0."""
        num_tokens = self.macros.num_before[-1]
        if normalizer is not None:
            given = scalar(normalizer, dtype, num_tokens.device)
            return torch.where(num_tokens > 0, given, torch.ones_like(given))
        if normalize_by == "tokens":
            number = num_tokens
        elif normalize_by == "macros":
            number = self.macros.macros_before[-1]
        else:
            number = self.macros.rows_with_actions.sum()
        return number.clamp(min=1).to(dtype)
