"""Builders of macro-action ids from a mask of response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Sequences


def fixed_ngram(mask: Tensor, n: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    tokens = Tokens(mask, cu_seqlens)
    return tokens.ids(torch.zeros_like(tokens.rank) if n is None else tokens.rank // n)


class Tokens(Sequences):
    """The chosen tokens of each sequence and their rank among them."""

    def __init__(self, mask: Tensor, cu_seqlens: Tensor | None) -> None:
        super().__init__(mask.shape, mask.device, cu_seqlens)
        flat = self.flat(mask)
        self.chosen = flat if self.inside is None else flat & self.inside  # [N]
        self.before = self.running_count(self.chosen)  # [N + 1]

    @property
    def rank(self) -> Tensor:
        """[N] how many chosen tokens of the sequence stand before each token."""
        return self.before[:-1] - self.before[self.start]

    def ids(self, index: Tensor) -> Tensor:
        """The index as int32 macro_ids, -1 where the token is not chosen."""
        return self.unflat(torch.where(self.chosen, index, -1).int())
