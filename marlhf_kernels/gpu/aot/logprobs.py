"""Cases of `gpu/logprobs.py`: Llama-3's vocabulary, GPT-2's that 16 does not divide, and a short one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from marlhf_kernels.gpu import logprobs
from marlhf_kernels.gpu.aot.case import Case, hosted, meta

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNED, UNALIGNED, SHORT = 128256, 50257, 1000
MANY, FEW = 4096, 1
"""Rows for one program each, and rows that are split: where there is no device, it has one processor."""

View = Callable[[int, int, torch.dtype], Tensor]


def _plain(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    return meta(rows, vocabulary, dtype=dtype)


def _gaps(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    return meta(rows, 2 * vocabulary, dtype=dtype)[:, ::2]


def _forward(
    name: str,
    rows: int,
    vocabulary: int,
    dtype: torch.dtype,
    entropy: bool,
    softcap: Tensor | None,
    *,
    view: View = _plain,
    temperature: Tensor | None = None,
    labels: torch.dtype = torch.int64,
    quick: bool = False,
    vector: bool = True,
) -> Case:
    return Case(
        "token_logprobs",
        f"{name}, {str(dtype).removeprefix('torch.')}{', entropy' * entropy}{', softcap' * (softcap is not None)}",
        lambda: logprobs.token_logprobs(
            view(rows, vocabulary, dtype),
            meta(rows, dtype=labels),
            hosted(1.0) if temperature is None else temperature,
            softcap,
            entropy,
            False,
        ),
        quick=quick,
        vector=vector,
    )


def _backward(
    name: str,
    vocabulary: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
    softcap: Tensor | None,
    *,
    view: View = _plain,
    temperature: Tensor | None = None,
    inplace: bool = False,
    quick: bool = False,
    vector: bool = True,
) -> Case:
    def run() -> None:
        logits = view(MANY, vocabulary, dtype)
        of_logprob, of_entropy = (meta(MANY) if use else None for use in wanted)
        rest = (
            meta(MANY, dtype=torch.int64),
            hosted(1.0) if temperature is None else temperature,
            softcap,
            meta(MANY),
            meta(MANY),
            meta(MANY),
        )
        if inplace:
            logprobs.token_logprobs_backward_(logits, of_logprob, of_entropy, *rest)
        else:
            logprobs.token_logprobs_backward(of_logprob, of_entropy, logits, *rest)

    of = " and ".join(word for word, use in zip(("log-probability", "entropy"), wanted, strict=True) if use)
    return Case(
        "token_logprobs_backward_" if inplace else "token_logprobs_backward",
        f"{name}, {str(dtype).removeprefix('torch.')}, of {of}{', softcap' * (softcap is not None)}",
        run,
        quick=quick,
        vector=vector,
    )


def _cases() -> Iterator[Case]:
    for dtype, entropy, softcap in product(DTYPES, (False, True), (None, hosted(30.0))):
        busiest = entropy and softcap is not None
        for name, rows in (("a program a row", MANY), ("a row in parts", FEW)):
            quick = busiest and dtype is not torch.float16
            yield _forward(name, rows, ALIGNED, dtype, entropy, softcap, quick=quick)
        yield _forward("short", MANY, SHORT, dtype, entropy, softcap, vector=False)
    for dtype, entropy in product((torch.float32, torch.bfloat16), (False, True)):
        yield _forward("rows unaligned", MANY, UNALIGNED, dtype, entropy, None, vector=False)
        yield _forward("with gaps", MANY, ALIGNED, dtype, entropy, None, view=_gaps, vector=False)
        yield _forward("a row with gaps in parts", FEW, ALIGNED, dtype, entropy, None, view=_gaps, vector=False)
    for name, temperature in (
        ("temperature a row", meta(MANY)),
        ("bfloat16 temperature a row", meta(MANY, dtype=torch.bfloat16)),
        ("temperature on the device", meta()),
    ):
        yield _forward(name, MANY, ALIGNED, torch.bfloat16, True, meta(), temperature=temperature)
        yield _backward(name, ALIGNED, torch.bfloat16, (True, True), meta(), temperature=temperature)
    yield _forward("int32 labels", MANY, ALIGNED, torch.bfloat16, True, None, labels=torch.int32)
    for dtype, wanted, softcap in product(DTYPES, ((True, False), (False, True), (True, True)), (None, hosted(30.0))):
        busiest = all(wanted) and softcap is not None
        yield _backward("aligned", ALIGNED, dtype, wanted, softcap, quick=busiest and dtype is not torch.float16)
        yield _backward("short", SHORT, dtype, wanted, softcap, vector=False)
    for dtype in (torch.float32, torch.bfloat16):
        quick = dtype is torch.bfloat16
        yield _backward("aligned", ALIGNED, dtype, (True, True), None, inplace=True, quick=quick)
        yield _backward("rows unaligned", UNALIGNED, dtype, (True, True), None, vector=False)
        yield _backward("with gaps", ALIGNED, dtype, (True, True), None, view=_gaps, vector=False)


CASES = list(_cases())
