"""The clipped value loss with its clip fraction, and with the gradient."""

import torch

from benchmarks import inputs, peers
from benchmarks.harness import Bench, Case
from benchmarks.shapes import Shape, token_shape
from marlhf_kernels import macro_value_loss

LEVELS = ("token", "macro")
MACRO_TOKENS = 5
ID_BYTES = 4


def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    if sizes == "tiny":
        return [(case(token_shape(2, 11), torch.float32, level), ("forward", "full")) for level in LEVELS]
    shapes = [token_shape(64, 512), token_shape(16, 4096)]
    if sizes == "few":
        return []
    if sizes == "quick":
        return [(case(shape, torch.float32, "token"), ("full",)) for shape in shapes]
    return [
        (case(shape, dtype, level), ("forward", "backward", "full"))
        for shape in (*shapes, token_shape(256, 1024))
        for dtype in (torch.float32, torch.bfloat16)
        for level in LEVELS
    ]


def case(shape: Shape, dtype: torch.dtype, level: str) -> Case:
    tokens = shape["B"] * shape["T"]
    function, full = peers.reference_value_loss(level)
    rivals = [peers.compiled_reference(function, full)]
    if level == "token":
        rivals += peers.eager_and_compiled(peers.eager_value_loss)
    names = ("values", "old_values", "returns", "macro_ids")
    # The gradient is made in forward, and only scaled in backward.
    forward, backward = tokens * (3 * dtype.itemsize + ID_BYTES + 4), tokens * (4 + dtype.itemsize)
    return Case(
        op="macro_value_loss",
        options=f"level={level}",
        shape=shape,
        dtype=dtype,
        inputs=lambda: inputs.rollout(shape, dtype, MACRO_TOKENS),
        call=lambda x: macro_value_loss(*(x[name] for name in names), level=level),
        names=("loss", "clip fraction"),
        learns=("values",),
        peers=rivals,
        traffic={
            "forward": {"": forward},
            "backward": {"": backward},
            "full": {"": forward + backward},
        },
    )


def bench_value_loss(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
