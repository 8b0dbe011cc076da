"""Builders of macro-action ids from a mask of response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Macros, Sequences


def fixed_ngram(mask: Tensor, n: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    tokens = Tokens(mask, cu_seqlens)
    return tokens.ids(torch.zeros_like(tokens.rank) if n is None else tokens.rank // n)


def from_ends(mask: Tensor, ends: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    tokens = Tokens(mask, cu_seqlens)
    ended = tokens.running_count(tokens.chosen & tokens.flat(ends))
    return tokens.ids(ended[:-1] - ended[tokens.start])


def from_bounds(mask: Tensor, bounds: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """bounds `[B, L]`, rising in each row: the rank of the first token after each macro action."""
    tokens = Tokens(mask, cu_seqlens)
    if bounds.numel() == 0:
        return tokens.ids(torch.zeros_like(tokens.rank))
    # One sorted list of (row, bound) pairs serves all rows.
    span = tokens.num_tokens + 1
    rows = torch.arange(tokens.num_rows, device=tokens.device).unsqueeze(1)
    keys = (rows * span + bounds.long().clamp(max=tokens.num_tokens)).reshape(-1)
    found = torch.searchsorted(keys, tokens.row * span + tokens.rank, right=True)
    return tokens.ids(found - tokens.row * bounds.shape[1])


def perplexity(
    mask: Tensor, ref_logprobs: Tensor, rule: str, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    tokens = Tokens(mask, cu_seqlens)
    width = tokens.widest()
    place = torch.where(tokens.chosen, tokens.row * width + tokens.rank, tokens.num_rows * width)
    nll = torch.zeros(tokens.num_rows * width + 1, dtype=torch.float32, device=tokens.device)
    nll[place] = -tokens.flat(ref_logprobs).float()
    nll = nll[:-1].view(tokens.num_rows, width)  # [B, width] the chosen tokens of each sequence side by side
    opens = _above_neighbour(nll) if rule == "neighbour" else _above_running_mean(nll)
    index = torch.nn.functional.pad(opens.cumsum(1).reshape(-1), (0, 1))
    return tokens.ids(index[place])


def isolate_last(macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    macros = Macros(macro_ids, cu_seqlens)
    shared = macros.to_tokens(macros.lengths) > 1
    return macros.unflat((macros.ids + (macros.last_of_row & shared)).int())


def _above_neighbour(nll: Tensor) -> Tensor:
    """[B, width] does the token open a macro action: is its nll above that of the token before it."""
    return torch.nn.functional.pad(nll[:, 1:] > nll[:, :-1], (1, 0))


def _above_running_mean(nll: Tensor) -> Tensor:
    """[B, width] does the token open a macro action: would it raise the mean nll of the one before it.

    nll n > sum, in float32 and in order, as every backend computes it: a division would round differently.
    """
    opens = torch.zeros_like(nll, dtype=torch.bool)
    number = torch.ones(nll.shape[0], dtype=nll.dtype, device=nll.device)
    total = nll[:, 0].clone() if nll.shape[1] else number
    for t in range(1, nll.shape[1]):
        token = nll[:, t]
        opens[:, t] = token * number > total
        number = torch.where(opens[:, t], 1, number + 1)
        total = torch.where(opens[:, t], token, total + token)
    return opens


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

    def widest(self) -> int:
        """At least the number of chosen tokens of every sequence: exact on a CPU, else the padded width.

        For packed sequences on a GPU nothing on the host bounds it, and this waits for the device.
        """
        if self.device.type != "cpu" and self.inside is None:
            return self.shape[1]
        return int(self.per_row(self.before).max()) if self.num_rows else 0

    def ids(self, index: Tensor) -> Tensor:
        """The index as int32 macro_ids, -1 where the token is not chosen."""
        return self.unflat(torch.where(self.chosen, index, -1).int())
