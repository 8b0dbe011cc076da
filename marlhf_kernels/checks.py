"""Argument checks of the public functions. Every one raises before any work, in the words of the caller.

Values that live in tensors are checked by the kernels, and only where reading them costs no host sync.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)

Number = float | int | Tensor
"""A coefficient: a Python number or a 0-d tensor."""


def tensor(name: str, x: object, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """`x` is a plain strided tensor of one of `dtypes`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    kind = type(x)
    if kind is not Tensor and kind is not torch.nn.Parameter and any(c.__name__ == "DTensor" for c in kind.__mro__):
        raise TypeError(
            f"{name} is a DTensor, and its local shard alone would give a wrong result: pass {name}.full_tensor(), or "
            f"{name}.to_local() where every rank holds whole rows"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}; call {name}.to_dense()")
    if dtypes is not None and x.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {_name(x.dtype)}")


def floating(name: str, x: object) -> None:
    """`x` is a tensor of a floating-point dtype that the ops compute with."""
    tensor(name, x, FLOATS)


def mask(name: str, x: object) -> None:
    """`x` is a boolean mask, True on a real token."""
    tensor(name, x)
    assert isinstance(x, Tensor)
    if x.dtype is not torch.bool:
        raise TypeError(f"{name} must be bool (True on a real token), got {_name(x.dtype)}; pass e.g. `{name} > 0`")


def same_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """`x` lies on the device of `other`."""
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device}, but {other_name} is on {other.device}; move one of them")


def like(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """`x` has the shape and the device of `other`."""
    if x.shape != other.shape:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but {other_name} has {list(other.shape)}; they must be equal, entry "
            "for entry about the same token"
        )
    same_device(name, x, other_name, other)


def layout(name: str, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> int:
    """`x` is padded `[B, T]`, or packed `[N]` with `cu_seqlens`. Returns the number of sequences B."""
    if max_seqlen is not None:
        _integer("max_seqlen", max_seqlen)
    if cu_seqlens is None:
        if x.dim() != 2:
            hint = "; packed [N] tensors need cu_seqlens" if x.dim() == 1 else ""
            raise ValueError(f"{name} must be [B, T], got shape {list(x.shape)}{hint}")
        return x.shape[0]
    tensor("cu_seqlens", cu_seqlens, (torch.int32,))
    if x.dim() != 1:
        raise ValueError(f"{name} must be packed [N] where cu_seqlens is given, got shape {list(x.shape)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [B + 1], starting with 0, got shape {list(cu_seqlens.shape)}")
    same_device("cu_seqlens", cu_seqlens, name, x)
    return cu_seqlens.shape[0] - 1


def ids(macro_ids: object, cu_seqlens: Tensor | None, max_seqlen: int | None) -> int:
    """`macro_ids` is int32 or int64 in one of the two layouts. Returns the number of sequences B."""
    tensor("macro_ids", macro_ids, INTEGERS)
    assert isinstance(macro_ids, Tensor)
    return layout("macro_ids", macro_ids, cu_seqlens, max_seqlen)


def per_token(name: str, x: object, macro_ids: Tensor) -> None:
    """`x` is a floating tensor aligned with `macro_ids`."""
    floating(name, x)
    assert isinstance(x, Tensor)
    like(name, x, "macro_ids", macro_ids)


def per_sequence(name: str, x: object, rows: int, macro_ids: Tensor) -> None:
    """`x` is a floating tensor `[B]` on the device of `macro_ids`."""
    floating(name, x)
    assert isinstance(x, Tensor)
    if x.dim() != 1 or x.shape[0] != rows:
        raise ValueError(f"{name} must be [B] = [{rows}], one per sequence, got shape {list(x.shape)}")
    same_device(name, x, "macro_ids", macro_ids)


def choice(name: str, value: str, known: Sequence[str]) -> None:
    """`value` is one of the known option names."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def count(name: str, value: int | None) -> None:
    """`value` is None or an int >= 0."""
    if value is not None:
        _integer(name, value)
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def coefficient(
    name: str,
    value: Number,
    data: Tensor,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
) -> Tensor:
    """A coefficient as the 0-d tensor that the ops take: another value never means another compilation.

    A number becomes a float64 tensor on the CPU and is checked against the bounds; a tensor's value is not read.
    """
    if isinstance(value, Tensor):
        tensor(name, value)
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got shape {list(value.shape)}")
        if value.device.type != "cpu" and value.device != data.device:
            raise ValueError(
                f"{name} is on {value.device}, but the data is on {data.device}; move it there or to the CPU"
            )
        return value
    number = _number(name, value)
    if number != number or (finite and number in (math.inf, -math.inf)):
        raise ValueError(f"{name} must be {'finite' if finite else 'a number'}, got {number}")
    if above is not None and not number > above:
        raise ValueError(f"{name} must be greater than {above:g}, got {number}")
    if at_least is not None and not number >= at_least:
        raise ValueError(f"{name} must be at least {at_least:g}, got {number}")
    if at_most is not None and not number <= at_most:
        raise ValueError(f"{name} must be at most {at_most:g}, got {number}")
    if torch.compiler.is_compiling():
        # Of a Python float a graph keeps products symbolic, but fixes what builds a tensor from it: like this it
        # compiles once more when it first changes, and never again.
        return torch.ones((), dtype=torch.float64, device="cpu") * number
    return torch.full((), number, dtype=torch.float64, device="cpu")


def optional_coefficient(
    name: str,
    value: Number | None,
    data: Tensor,
    *,
    at_least: float | None = None,
    above: float | None = None,
    finite: bool = True,
) -> Tensor | None:
    """`coefficient`, or None where the option is off."""
    if value is None:
        return None
    return coefficient(name, value, data, at_least=at_least, above=above, finite=finite)


def _number(name: str, value: object) -> Any:
    """A Python number, or a symbolic one while a graph is compiled."""
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        if not isinstance(value, bool):
            return value
    elif isinstance(value, numbers.Real):
        return float(value)  # NumPy's scalars
    raise TypeError(f"{name} must be a number or a 0-d tensor, got {type(value).__name__}")


def labels_in_vocabulary(labels: Tensor, vocabulary: int) -> None:
    """No label outside of the vocabulary, where reading costs no sync."""
    if labels.device.type == "cpu" and labels.numel():
        largest = int(labels.max())
        if largest >= vocabulary:
            raise ValueError(f"labels has the token id {largest}, but the vocabulary has {vocabulary} tokens")


def temperature_above_zero(temperature: Tensor, labels: Tensor) -> None:
    """A temperature above 0, where reading costs no sync; that of an ignored row is not used."""
    if temperature.device.type == "cpu":
        used = temperature if temperature.dim() == 0 else temperature[labels >= 0]
        if not bool((used > 0).all()):
            raise ValueError(f"temperature must be greater than 0, got {float(used.min()):g}")


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        hint = "; a tensor would have to be read back from its device" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}{hint}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    names = [_name(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
