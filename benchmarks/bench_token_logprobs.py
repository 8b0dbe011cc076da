"""Log-probabilities of labels under logits, with and without the entropy of each row."""

import torch

from benchmarks import inputs, peers
from benchmarks.harness import MODES, Bench, Case, Inputs, Provider, Results
from benchmarks.shapes import Shape, logits_shape
from marlhf_kernels import token_logprobs

MODELS = ("gpt2", "llama3", "gemma2", "qwen")


def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    both = (torch.float32, torch.bfloat16)
    timed = ("forward", "full")
    if sizes == "tiny":
        tiny = Shape("tiny-4", (("N", 4), ("V", 33)))
        return [(case(tiny, torch.float32, entropy=True), MODES)]
    if sizes == "few":
        return [(case(logits_shape("gpt2", 256), dtype, entropy=True), timed) for dtype in both]
    if sizes == "quick":
        shapes = [logits_shape(model, 256) for model in ("gpt2", "qwen")]
        return [
            *((case(shape, dtype, entropy=True), timed) for shape in shapes for dtype in both),
            (case(shapes[0], torch.float32, entropy=False), ("forward",)),
        ]
    shapes = [logits_shape(model, 256) for model in MODELS]
    return [
        *(
            (case(shape, dtype, entropy=entropy), MODES)
            for shape in shapes
            for dtype in both
            for entropy in (True, False)
        ),
        (case(logits_shape("gpt2", 256), torch.float16, entropy=True), MODES),
        (case(logits_shape("gpt2", 1), torch.float32, entropy=True), MODES),
        (case(logits_shape("gpt2", 4096), torch.bfloat16, entropy=True), MODES),
    ]


def case(shape: Shape, dtype: torch.dtype, *, entropy: bool) -> Case:
    size = shape["N"] * shape["V"] * dtype.itemsize
    eager = peers.eager_logprobs_entropy if entropy else peers.eager_logprobs
    rivals = [
        *peers.eager_and_compiled(eager),
        Provider("trl", peers.trl_logprobs_entropy if entropy else peers.trl_logprobs),
    ]
    if not entropy:
        # It writes its gradient over the logits already in forward.
        rivals.append(Provider("liger", peers.liger_logprobs, overwrites=("logits",)))

    def call(x: Inputs, *, in_place: bool = False) -> Results:
        if entropy:
            return token_logprobs(x["logits"], x["labels"], return_entropy=True, inplace_backward=in_place)
        return (token_logprobs(x["logits"], x["labels"], inplace_backward=in_place),)

    return Case(
        op="token_logprobs",
        options="entropy" if entropy else "",
        shape=shape,
        dtype=dtype,
        inputs=lambda: inputs.logits(shape, dtype),
        call=call,
        in_place=lambda x: call(x, in_place=True),
        names=("log-probability", "entropy") if entropy else ("log-probability",),
        learns=("logits",),
        upstream=2 if entropy else 1,
        eager=eager,
        peers=rivals,
        traffic={
            "forward": {"read": size},
            "backward": {"copy_fresh": 2 * size},
            "full": {"read": size, "copy_fresh": 2 * size},
        },
    )


def bench_token_logprobs(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
