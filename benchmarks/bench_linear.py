"""Log-probabilities and the policy loss straight from hidden states."""

import torch

from benchmarks import inputs, peers
from benchmarks.harness import MODES, Bench, Case, Inputs, Provider, Results
from benchmarks.shapes import Shape, linear_shape, token_shape
from marlhf_kernels import linear_macro_policy_loss, linear_token_logprobs

MACRO_TOKENS = 5


def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    if sizes == "few":
        return []
    if sizes == "tiny":
        tiny = Shape("tiny-22-h8", (("N", 22), ("H", 8), ("V", 33)))
        return [(make(tiny, torch.float32), ("forward", "full")) for make in (logprobs, policy_loss)]
    small = linear_shape("gpt2", 256, hidden=512)
    if sizes == "quick":
        return [(logprobs(small, torch.float32), ("full",)), (policy_loss(small, torch.float32), ("full",))]
    large = linear_shape("gpt2", 4096, hidden=512)
    return [
        *((make(shape, torch.float32), MODES) for make in (logprobs, policy_loss) for shape in (small, large)),
        (logprobs(linear_shape("gemma2", 256), torch.bfloat16), MODES),
    ]


def logprobs(shape: Shape, dtype: torch.dtype) -> Case:
    return Case(
        op="linear_token_logprobs",
        shape=shape,
        dtype=dtype,
        inputs=lambda: inputs.head(shape, dtype),
        call=lambda x: (linear_token_logprobs(x["hidden"], x["weight"], x["labels"]),),
        names=("log-probability",),
        learns=("hidden", "weight"),
        eager=peers.eager_linear_logprobs,
        peers=[
            *peers.eager_and_compiled(peers.eager_linear_logprobs),
            Provider("torch", peers.torch_linear_logprobs),
            Provider("liger", peers.liger_linear_logprobs),
            Provider("cce", peers.cce_linear_logprobs),
        ],
        traffic=_traffic(shape, dtype),
    )


def policy_loss(shape: Shape, dtype: torch.dtype) -> Case:
    """The rows are two responses end to end."""
    tokens = token_shape(2, shape["N"] // 2)

    def make_inputs() -> Inputs:
        fields = inputs.rollout(tokens, dtype, MACRO_TOKENS)
        head = inputs.head(shape, dtype)
        batch = (tokens["B"], tokens["T"])
        return {
            **{name: fields[name] for name in ("advantages", "macro_ids")},
            "hidden": head["hidden"].view(*batch, -1),
            "weight": head["weight"],
            "labels": head["labels"].view(batch),
            # Near those that such a head gives, so that most ratios are not clipped.
            "old_logprobs": (peers.eager_linear_logprobs(head)[0].view(batch) + 0.2 * fields["advantages"]).to(dtype),
        }

    def call(x: Inputs) -> Results:
        names = ("hidden", "weight", "labels", "old_logprobs", "advantages", "macro_ids")
        return linear_macro_policy_loss(*(x[name] for name in names))

    def eager(x: Inputs) -> Results:
        return peers.eager_policy_loss({**x, "logprobs": peers.eager_linear_logprobs(x)[0]})

    return Case(
        op="linear_macro_policy_loss",
        options="ratio_level=token",
        shape=shape,
        dtype=dtype,
        inputs=make_inputs,
        call=call,
        names=("loss", "clip fraction", "approximate KL", "mean ratio", "largest ratio"),
        learns=("hidden", "weight"),
        eager=eager,
        peers=peers.eager_and_compiled(eager),
        traffic=_traffic(shape, dtype),
    )


def _traffic(shape: Shape, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Hidden states and weight once, and their gradients; matrix products, not memory, bound these ops."""
    size = (shape["N"] + shape["V"]) * shape["H"] * dtype.itemsize
    return {"forward": {"": size}, "backward": {"": 2 * size}, "full": {"": 3 * size}}


def bench_linear(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
