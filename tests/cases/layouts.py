"""Laying rows of Python numbers out as tensors, padded or packed, and reading them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PADDED = ("right", "left", "mixed")
PACKED = ("packed", "packed with a tail")
LAYOUTS = PADDED + PACKED
TAIL = 3  # places after the last sequence of a pack that belong to none


@dataclass
class Layout:
    """Where each row of a batch stands in the tensors of one layout.

    `right`, `left`, `mixed` are the sides on which a `[B, T]` batch is padded; `packed` is one `[N]` axis with
    `cu_seqlens`; the tail is what may follow the last sequence there.
    """

    kind: str
    ids: Sequence[Sequence[int]]
    keywords: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [len(row) for row in self.ids]
        # Padding is added everywhere, so that the longest row is padded too.
        self.width = max(self.lengths, default=0) + 2
        self.keywords = {}
        if self.is_packed:
            ends = [0]
            for n in self.lengths:
                ends.append(ends[-1] + n)
            self.keywords["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32)

    @property
    def is_packed(self) -> bool:
        return self.kind in PACKED

    def _start(self, row: int) -> int:
        if self.kind == "right":
            return 0
        spare = self.width - self.lengths[row]
        return spare if self.kind == "left" else (0, spare, spare // 2)[row % 3]

    def lay(self, rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype = torch.float64) -> Tensor:
        """The rows as one tensor, `fill` where no row stands."""
        if self.is_packed:
            flat = [x for row in rows for x in row]
            if self.kind == "packed with a tail":
                flat += [fill] * TAIL
            return torch.tensor(flat, dtype=dtype)
        out = torch.full((len(rows), self.width), fill, dtype=dtype)
        for b, row in enumerate(rows):
            start = self._start(b)
            out[b, start : start + len(row)] = torch.tensor(row, dtype=dtype)
        return out

    def macro_ids(self, dtype: torch.dtype = torch.int32) -> Tensor:
        """The ids; a tail is given ids that look like actions, because nothing says what stands there."""
        return self.lay(self.ids, 0 if self.is_packed else -1, dtype)

    def rows(self, x: Tensor) -> list[list[float]]:
        """Read a token-aligned tensor back into rows."""
        x = x.detach().double()
        out, at = [], 0
        for b, n in enumerate(self.lengths):
            if self.is_packed:
                out.append(x[at : at + n].tolist())
                at += n
            else:
                start = self._start(b)
                out.append(x[b, start : start + n].tolist())
        return out

    def outside(self, x: Tensor) -> Tensor:
        """The entries of a token-aligned tensor at which no row stands: outputs must be 0 there."""
        inside = self.lay([[1.0] * n for n in self.lengths], 0.0).bool()
        return x.detach()[~inside]
