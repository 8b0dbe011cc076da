"""Triton's interpreter in less time: scans over whole slices, and no patching of Triton's names at every inner call.

The operators and their order stay the same.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ScanOps


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret quickly until the patch is undone."""
    monkeypatch.setattr(ScanOps, "generic_scan", _scan)
    monkeypatch.setattr(InterpretedFunction, "__call__", _call)


_call_and_patch = InterpretedFunction.__call__


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function called by a kernel: where it is Triton's own, its module's names may not be patched yet."""
    if self.fn.__module__.startswith("triton."):
        return _call_and_patch(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


def _scan(self: Any, operands: Any) -> list[Any]:
    """Combines all rows of a tile at once, step by step along the axis."""
    entries = [numpy.moveaxis(x.handle.data, self.axis, 0) for x in operands]
    scanned = [x.copy() for x in entries]
    for i in range(1, len(entries[0])):
        last = [self.to_tensor(x[i - 1], operand.dtype) for x, operand in zip(scanned, operands, strict=True)]
        next_ = [self.to_tensor(x[i], operand.dtype) for x, operand in zip(entries, operands, strict=True)]
        combined = self.combine_fn.fn(*last, *next_)
        for x, result in zip(scanned, combined if isinstance(combined, tuple) else (combined,), strict=True):
            x[i] = result.handle.data
    return [
        self.to_tensor(numpy.moveaxis(x, 0, self.axis), operand.dtype)
        for x, operand in zip(scanned, operands, strict=True)
    ]


class Traffic:
    """Bytes that kernels move between memory and a cache that keeps everything: each place is moved once a direction.

    What a kernel wrote itself it reads from the cache.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[int, int] = {}
        self.written: dict[int, int] = {}
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def noting_load(builder: Any, places: Any, mask: Any, *rest: Any) -> Any:
            for place, size in _places(places, mask):
                if place not in self.written:
                    self.read[place] = size
            return load(builder, places, mask, *rest)

        def noting_store(builder: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.written.update(_places(places, mask))
            return store(builder, places, value, mask, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", noting_store)

    @property
    def bytes(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())


def _places(pointers: Any, mask: Any) -> list[tuple[int, int]]:
    """Address and size of what is touched."""
    size = max(pointers.get_element_ty().primitive_bitwidth, 8) // 8
    chosen = numpy.broadcast_to(mask.data, pointers.data.shape)
    return [(int(place), size) for place in pointers.data[chosen]]
