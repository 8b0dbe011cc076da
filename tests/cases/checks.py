"""Running a `Call` on a batch and holding it against the oracle."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tests.cases import shapes
from tests.cases.batches import Batch, make_batch, upstream
from tests.cases.calls import SCALAR, TOKEN, Call
from tests.cases.compare import assert_close, largest
from tests.cases.layouts import LAYOUTS


def output_dtype(call: Call, dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else becomes float32; a broadcast keeps its dtype and lengths are int32."""
    if call.op == "macro_broadcast":
        return dtype
    if call.op == "macro_lengths":
        return torch.int32
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_with_gradient(call: Call, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The outputs, and the gradient of sum(upstream * first output) in the field that learns."""
    if call.learns is None:
        return call.run(batch), None
    leaf = batch[call.learns].clone().requires_grad_()
    outputs = call.run(batch.with_fields(**{call.learns: leaf}))
    outputs[0].backward(upstream(outputs[0]))
    return outputs, leaf.grad


def check_call(call: Call, batch: Batch, what: str = "") -> None:
    """Outputs, their dtypes and places outside every row, and the gradient, against the oracle."""
    dtype = batch["values"].dtype
    what = f"{call} {batch.layout.kind} {what}"
    outputs, gradient = run_with_gradient(call, batch)
    expected = call.exact(batch)
    for kind, got, want in zip(call.outputs, outputs, expected, strict=True):
        assert got.dtype == output_dtype(call, dtype), what
        if kind == TOKEN:
            assert got.shape == batch.macro_ids.shape, what
            assert not batch.layout.outside(got).any(), f"{what}: not 0 outside the rows"
            got = batch.layout.rows(got) if got.dtype not in (torch.bfloat16, torch.float16) else got
            if isinstance(got, Tensor):
                want = batch.layout.lay(want, 0.0)
        elif kind == SCALAR:
            assert got.shape == (), what
        assert_close(got, want, dtype, scale=max(1.0, largest(want)), what=what)
    if gradient is None or call.exact_gradient is None:
        return
    leaf = batch[call.learns]
    assert gradient.dtype == leaf.dtype, what
    assert gradient.shape == leaf.shape, what
    sent = upstream(outputs[0]).double()
    sent_lists = (
        sent.item() if call.outputs[0] == SCALAR
        else batch.layout.rows(sent) if call.outputs[0] == TOKEN
        else sent.tolist()
    )  # fmt: skip
    want = call.exact_gradient(batch, sent_lists)
    if call.learns != "macro_x":
        want = batch.layout.lay(want, 0.0)
    assert_close(gradient, want, dtype, what=f"{what} gradient")


def check_everywhere(call: Call) -> None:
    """`check_call` on every hand-made shape alone and on all of them as one batch, in every layout.

    Triton's interpreter, where every call takes its time, gets what is one batch, once in each layout.
    """
    together = [row for ids in shapes.BY_HAND.values() for row in ids]
    for layout in shapes.FROM_THE_START:
        check_call(call, make_batch(shapes.ABOVE_POSITION, layout), "id above position")
    if os.environ.get("TRITON_INTERPRET") == "1":
        for layout in LAYOUTS:
            check_call(call, make_batch(together, layout), "all shapes")
        return
    for name, ids in shapes.BY_HAND.items():
        for layout in ("mixed", "packed with a tail"):
            check_call(call, make_batch(ids, layout), name)
    for layout in LAYOUTS:
        check_call(call, make_batch(together, layout), "all shapes")
        check_call(call, make_batch(together, layout, torch.float32, seed=1), "all shapes")
