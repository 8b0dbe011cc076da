"""Whitening of masked tokens in one process."""

import torch

from benchmarks import inputs, peers
from benchmarks.harness import Bench, Case, Inputs
from benchmarks.shapes import Shape, token_shape
from marlhf_kernels import masked_whiten


def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    if sizes == "few":
        return []
    if sizes == "tiny":
        shapes = [token_shape(2, 11)]
    elif sizes == "quick":
        shapes = [token_shape(64, 512)]
    else:
        shapes = [token_shape(64, 512), token_shape(16, 4096), token_shape(256, 1024)]
    dtypes = (torch.float32, torch.bfloat16) if sizes == "full" else (torch.float32,)
    return [(case(shape, dtype), ("forward",)) for shape in shapes for dtype in dtypes]


def _inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape["B"], shape["T"], generator=generator)
    return {"x": x.to(dtype), "mask": inputs.response_mask(shape)}


def case(shape: Shape, dtype: torch.dtype) -> Case:
    return Case(
        op="masked_whiten",
        shape=shape,
        dtype=dtype,
        inputs=lambda: _inputs(shape, dtype),
        call=lambda x: (masked_whiten(x["x"], x["mask"]),),
        names=("whitened",),
        peers=peers.eager_and_compiled(peers.eager_whiten),
        # Twice through the input: the mean must be known before a token can be written.
        traffic={"forward": {"": shape["B"] * shape["T"] * (2 * (dtype.itemsize + 1) + 4)}},
    )


def bench_whiten(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
