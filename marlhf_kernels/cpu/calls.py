"""How a batch of sequences is handed to the native functions that take one: the Python side of `rows.h`.

Such a function takes the address of a struct whose fields have 8 bytes each: `struct.pack` makes it. Names of fields
here are those of the structs there.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from marlhf_kernels.cpu.loader import TYPES, Function, num_threads

TENSOR = "Pqq"
SEQUENCES = "Pqqqq"
NO_TENSOR = (0, 0, 0)


class BatchFunction:
    """A native function over sequences.

    Args:
        name: as `MARLHF_FUNCTION` names it.
        layout: the fields of its struct after `Sequences` and the tensor of ids (or the mask), as `struct` spells
            them: `P` pointer, `q` integer, `d` double.
    """

    def __init__(self, name: str, layout: str) -> None:
        self._function = Function(name, "p")
        self._pack = struct.Struct("=" + (SEQUENCES + TENSOR + layout).replace("P", "Q")).pack

    def __call__(self, batch: Batch, *fields: Any) -> None:
        """Call it.

        Raises:
            ValueError: broken cu_seqlens.
            MemoryError: no room for a sequence's intermediate numbers.
        """
        status = self._function.call(self._pack(*batch.fields, *fields))
        if status:
            batch.refuse(status)


class Batch:
    """Sequences in one of the two layouts, told by `ids`: the macro ids, or the mask that a builder takes."""

    __slots__ = ("cu_seqlens", "fields", "ids", "rows")

    def __init__(self, ids: Tensor, cu_seqlens: Tensor | None) -> None:
        self.ids = ids = with_unit_stride(ids)
        self.cu_seqlens = None
        if cu_seqlens is None:
            self.rows, width = ids.shape
            sequences = (0, self.rows, width, self.rows * width, num_threads())
        else:
            self.cu_seqlens = cu_seqlens = cu_seqlens.contiguous()
            self.rows = cu_seqlens.shape[0] - 1
            sequences = (cu_seqlens.data_ptr(), self.rows, 0, ids.shape[0], num_threads())
        self.fields = (*sequences, *tensor_fields(ids))

    def empty(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor like `ids`."""
        return self.ids.new_empty(self.ids.shape, dtype=dtype)

    def refuse(self, status: int) -> None:
        """Raise what the status of a native function means."""
        if status == 2:
            raise ValueError(f"a sequence has fewer than 2^31 - 1 tokens, got rows of {self.ids.shape[1]}")
        if status == 3:
            raise MemoryError("no memory for the intermediate numbers of a sequence")
        assert self.cu_seqlens is not None
        bounds, num_tokens = self.cu_seqlens.tolist(), self.ids.shape[0]
        if bounds[0] != 0:
            raise ValueError(f"cu_seqlens must start with 0, got {bounds[0]}")
        if bounds != sorted(bounds):
            raise ValueError(
                "cu_seqlens must not decrease: it holds where each sequence starts, and the total at the end"
            )
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}, but there are only {num_tokens} tokens")


def with_unit_stride(x: Tensor) -> Tensor:
    """`x`, or a copy of it where the last axis is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def tensor_fields(x: Tensor) -> tuple[int, int, int]:
    """A tensor as the struct has it: address, type, elements from one row to the next. `x` must outlive the call."""
    return x.data_ptr(), TYPES.get(x.dtype, 0), x.stride(0)


def optional_fields(x: Tensor | None) -> tuple[int, int, int]:
    """`tensor_fields`, or a null address."""
    return NO_TENSOR if x is None else tensor_fields(x)


def number(coefficient: Tensor | None, missing: float) -> float:
    """The value of a 0-d coefficient."""
    return missing if coefficient is None else coefficient.item()
