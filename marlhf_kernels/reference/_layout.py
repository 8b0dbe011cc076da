"""Both layouts as one: tokens end to end, the place of each, and slots for what belongs to a macro action.

The id of a token's macro action is at most the token's position in its sequence, so the macro actions of a
sequence fit in a run of slots as long as the sequence: macro action k of the sequence that starts at flat
index s has slot s + k. One more slot at the end takes what belongs to no macro action. No size depends on
data.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where one of the tensors is, else float32."""
    wide = any(x is not None and x.dtype is torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def scalar(coefficient: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-d coefficient in `dtype` on `device`.

    From the CPU it goes to the device as the operand of a product, which, unlike a copy, waits for nothing.
    """
    if coefficient.device == device:
        return coefficient.to(dtype)
    return (torch.ones(1, dtype=dtype, device=device) * coefficient)[0]


class Sequences:
    """Where each of N tokens stands. Padded `[B, T]` is N = B * T tokens in B sequences of length T."""

    def __init__(self, shape: torch.Size, device: torch.device, cu_seqlens: Tensor | None) -> None:
        self.shape = shape
        self.device = device
        self.num_tokens = shape.numel()
        index = torch.arange(self.num_tokens, device=device)
        if cu_seqlens is None:
            self.num_rows, width = shape
            self.offsets = torch.arange(self.num_rows + 1, device=device) * width  # [B + 1]
            self.row = torch.div(index, max(width, 1), rounding_mode="floor")  # [N]
            self.inside = None
        else:
            self.num_rows = cu_seqlens.shape[0] - 1
            if device.type == "cpu":
                _check_cu_seqlens(cu_seqlens, self.num_tokens)
            self.offsets = cu_seqlens.long().clamp(0, self.num_tokens)
            row = torch.searchsorted(self.offsets[1:], index, right=True)
            self.inside = row < self.num_rows  # False past cu_seqlens[-1]
            self.row = row.clamp(max=max(self.num_rows - 1, 0))
        self.index = index
        padded = torch.nn.functional.pad(self.offsets, (0, 1), value=self.num_tokens)
        self.start = padded[self.row]  # [N] flat index of the first token of this token's sequence
        self.end = padded[self.row + 1]  # [N] one past its last

    @property
    def position(self) -> Tensor:
        """[N] index of each token in its own sequence."""
        return self.index - self.start

    def running_count(self, chosen: Tensor) -> Tensor:
        """[N + 1] how many of the chosen tokens stand before each flat index."""
        return torch.nn.functional.pad(chosen.cumsum(0), (1, 0))

    def per_row(self, running: Tensor) -> Tensor:
        """[B] how many chosen tokens each sequence has, from `running_count`."""
        return running[self.offsets[1:]] - running[self.offsets[:-1]]

    def flat(self, x: Tensor) -> Tensor:
        """[N] tokens end to end."""
        return x.reshape(-1)

    def unflat(self, x: Tensor) -> Tensor:
        """Back to the layout that came in."""
        return x.view(self.shape)


class Macros(Sequences):
    """Where each token and each macro action stands."""

    def __init__(self, macro_ids: Tensor, cu_seqlens: Tensor | None = None) -> None:
        super().__init__(macro_ids.shape, macro_ids.device, cu_seqlens)
        ids = macro_ids.reshape(-1).long()
        action = (ids >= 0) & (ids <= self.position)
        self.action = action if self.inside is None else action & self.inside  # [N] is the token an action
        self.ids = torch.where(self.action, ids, -1)
        self.spill = self.num_tokens
        # A broken cu_seqlens on a GPU, where it is not read back, must not lead outside of the slots.
        self.slot = torch.where(self.action, self.start + ids, self.spill).clamp(max=self.spill)

    def clean(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[N] in `dtype`, 0 where the token is no action, whatever stood there."""
        return torch.where(self.action, self.flat(x).to(dtype), 0)

    @cached_property
    def num_before(self) -> Tensor:
        """[N + 1] action tokens before each flat index."""
        return self.running_count(self.action)

    @cached_property
    def lengths(self) -> Tensor:
        """[N + 1] number of action tokens of the macro action in each slot; 0 where there is none."""
        ones = self.action.long()
        return self.sum(ones)

    @cached_property
    def exists(self) -> Tensor:
        """[N] is there a macro action in the slot."""
        return self.lengths[:-1] > 0

    @cached_property
    def macros_before(self) -> Tensor:
        """[N + 1] macro actions in the slots before each."""
        return self.running_count(self.exists)

    @cached_property
    def rank(self) -> Tensor:
        """[N] index of the token among the action tokens of its macro action; only action tokens have one."""
        before = torch.nn.functional.pad(self.lengths[:-1].cumsum(0), (1, 0))
        return self.num_before[:-1] - before[self.slot]

    @cached_property
    def first(self) -> Tensor:
        """[N] is the token the first of its macro action."""
        return self.action & (self.rank == 0)

    @cached_property
    def last_of_row(self) -> Tensor:
        """[N] is the token the last action token of its sequence."""
        return self.action & (self.num_before[1:] == self.num_before[self.end])

    @cached_property
    def rows_with_actions(self) -> Tensor:
        """[B] has the sequence an action token."""
        return self.per_row(self.num_before) > 0

    def max_macros(self) -> int:
        """max(id) + 1, or 0. Reads from the device."""
        return 1 + int(self.ids.max()) if self.num_tokens else 0

    def sum(self, x: Tensor) -> Tensor:
        """[N] -> [N + 1]: sums over the tokens of each slot, in order, the same bits every run."""
        total = x.new_zeros(self.num_tokens + 1)
        if x.is_cuda:
            total.index_put_((self.slot,), x, accumulate=True)  # index_add_ adds in any order there
        else:
            total.index_add_(0, self.slot, x)
        total[self.spill] = 0
        return total

    def at_first(self, x: Tensor) -> Tensor:
        """[N] -> [N + 1]: the entry of each macro action's first token."""
        picked = x.new_zeros(self.num_tokens + 1)
        picked.scatter_(0, torch.where(self.first, self.slot, self.spill), x)
        picked[self.spill] = 0
        return picked

    def to_tokens(self, slots: Tensor) -> Tensor:
        """[N + 1] -> [N]: what stands in each token's slot; the last entry where the token is no action."""
        return slots[self.slot]

    def to_rows(self, slots: Tensor, num_macros: int) -> Tensor:
        """[N + 1] -> [B, K]: the slots of each sequence, padded with 0 or cut."""
        k = torch.arange(num_macros, device=self.device)
        index = self.offsets[:-1, None] + k
        return torch.where(index < self.offsets[1:, None], slots[index.clamp(max=self.spill)], 0)

    def check_num_macros(self, num_macros: int) -> None:
        """On a CPU an id that does not fit is an error; elsewhere reading it would wait: it is dropped."""
        if self.device.type == "cpu" and self.num_tokens:
            largest = int(self.ids.max())
            if largest >= num_macros:
                raise ValueError(f"macro_ids has id {largest}, but there is room for {num_macros} macro actions only")


def _check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    if int(cu_seqlens[0]) != 0:
        raise ValueError(f"cu_seqlens must start with 0, got {int(cu_seqlens[0])}")
    if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
        raise ValueError("cu_seqlens must not decrease: it holds where each sequence starts, and the total at the end")
    if int(cu_seqlens[-1]) > num_tokens:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, but there are only {num_tokens} tokens")
