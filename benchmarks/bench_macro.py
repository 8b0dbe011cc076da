"""Reductions over macro actions, back to tokens, and their lengths."""

import torch

from benchmarks import inputs, peers
from benchmarks.harness import Bench, Case, Inputs, Provider
from benchmarks.shapes import Shape, token_shape
from marlhf_kernels import macro_broadcast, macro_lengths, macro_reduce

MACRO_TOKENS = 5
ID_BYTES = 4


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
    timed = {"full": ("forward", "backward", "full"), "tiny": ("forward", "full")}.get(sizes, ("full",))
    weights = ("sum", "mean", "position", "position_reversed") if sizes == "full" else ("sum",)
    return [
        *((reduce(shape, dtype, w), timed) for shape in shapes for dtype in dtypes for w in weights),
        *((broadcast(shape, dtype), timed) for shape in shapes for dtype in dtypes),
        *((lengths(shape), ("forward",)) for shape in shapes),
    ]


def _inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    fields = inputs.rollout(shape, dtype, MACRO_TOKENS)
    generator = torch.Generator().manual_seed(2)
    return {
        "x": fields["rewards"],
        "macro_x": torch.randn(fields["lengths"].shape, generator=generator).to(dtype),
        "macro_ids": fields["macro_ids"],
        "lengths": fields["lengths"],
    }


def reduce(shape: Shape, dtype: torch.dtype, weights: str) -> Case:
    tokens, macros = _sizes(shape)
    forward = tokens * (dtype.itemsize + ID_BYTES) + macros * 4
    backward = tokens * (dtype.itemsize + ID_BYTES) + macros * 4
    rivals = []
    if weights == "sum":
        rivals = [*peers.eager_and_compiled(peers.eager_reduce), Provider("loop", peers.loop_reduce)]
    return Case(
        op="macro_reduce",
        options=f"weights={weights}",
        shape=shape,
        dtype=dtype,
        inputs=lambda: _inputs(shape, dtype),
        # The number of macro actions is given to everybody: finding it costs another pass.
        call=lambda x: (macro_reduce(x["x"], x["macro_ids"], weights=weights, num_macros=x["lengths"].shape[1]),),
        names=("macro_x",),
        learns=("x",),
        peers=rivals,
        traffic={"forward": {"": forward}, "backward": {"": backward}, "full": {"": forward + backward}},
    )


def broadcast(shape: Shape, dtype: torch.dtype) -> Case:
    tokens, macros = _sizes(shape)
    forward = tokens * (ID_BYTES + dtype.itemsize) + macros * dtype.itemsize
    return Case(
        op="macro_broadcast",
        shape=shape,
        dtype=dtype,
        inputs=lambda: _inputs(shape, dtype),
        call=lambda x: (macro_broadcast(x["macro_x"], x["macro_ids"]),),
        names=("x",),
        learns=("macro_x",),
        peers=peers.eager_and_compiled(peers.eager_broadcast),
        traffic={"forward": {"": forward}, "backward": {"": forward}, "full": {"": 2 * forward}},
    )


def lengths(shape: Shape) -> Case:
    tokens, macros = _sizes(shape)
    return Case(
        op="macro_lengths",
        shape=shape,
        dtype=torch.int32,
        inputs=lambda: _inputs(shape, torch.float32),
        call=lambda x: (macro_lengths(x["macro_ids"], num_macros=x["lengths"].shape[1]),),
        names=("lengths",),
        peers=peers.eager_and_compiled(peers.eager_lengths),
        traffic={"forward": {"": tokens * ID_BYTES + macros * 4}},
    )


def _sizes(shape: Shape) -> tuple[int, int]:
    """Tokens, and slots for macro actions."""
    return shape["B"] * shape["T"], shape["B"] * -(-shape["T"] // MACRO_TOKENS)


def bench_macro(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
