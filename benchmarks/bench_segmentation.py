"""Builders of macro-action ids."""

from collections.abc import Callable

import torch

from benchmarks import inputs, peers
from benchmarks.harness import Bench, Case, Inputs, Provider, Results
from benchmarks.shapes import Shape, token_shape
from marlhf_kernels import segmentation

MACRO_TOKENS = 5
ID_BYTES = 4


def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    if sizes == "tiny":
        shapes = [token_shape(2, 11)]
    elif sizes == "full":
        shapes = [token_shape(64, 512), token_shape(16, 4096), token_shape(256, 1024)]
    else:
        shapes = [token_shape(64, 512)]
    names = {"few": ["perplexity"], "quick": ["fixed_ngram", "randomized_ngram", "perplexity"]}.get(sizes, [*BUILDERS])
    return [(case(shape, name), ("forward",)) for shape in shapes for name in names]


def _inputs(shape: Shape) -> Inputs:
    fields = inputs.rollout(shape, torch.float32, MACRO_TOKENS)
    mask = inputs.response_mask(shape)
    ids = fields["macro_ids"]
    ends = mask & (ids != torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-1))
    names = ("ref_logprobs", "lengths")
    return {"mask": mask, "macro_ids": ids, "ends": ends, **{name: fields[name] for name in names}}


def _randomized(x: Inputs) -> torch.Tensor:
    # Seeded anew, so that every backend draws the same lengths.
    return segmentation.randomized_ngram(x["mask"], generator=torch.Generator().manual_seed(0))


BUILDERS: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "fixed_ngram": lambda x: segmentation.fixed_ngram(x["mask"], MACRO_TOKENS),
    "token": lambda x: segmentation.token(x["mask"]),
    "whole": lambda x: segmentation.whole(x["mask"]),
    "randomized_ngram": _randomized,
    "perplexity": lambda x: segmentation.perplexity(x["mask"], x["ref_logprobs"]),
    "from_ends": lambda x: segmentation.from_ends(x["mask"], x["ends"]),
    "from_lengths": lambda x: segmentation.from_lengths(x["mask"], x["lengths"]),
    "isolate_last": lambda x: segmentation.isolate_last(x["macro_ids"]),
}
# Bytes read a token, beside the four of the id that is written.
READS = {"perplexity": 1 + 4, "from_ends": 2, "isolate_last": ID_BYTES}
PEERS: dict[str, list[Provider]] = {
    "fixed_ngram": peers.eager_and_compiled(peers.eager_fixed_ngram(MACRO_TOKENS)),
    "perplexity": [Provider("loop", peers.loop_perplexity)],
}


def case(shape: Shape, name: str) -> Case:
    def call(x: Inputs) -> Results:
        return (BUILDERS[name](x),)

    return Case(
        op=f"segmentation.{name}",
        shape=shape,
        dtype=torch.int32,
        inputs=lambda: _inputs(shape),
        call=call,
        names=("macro_ids",),
        peers=PEERS.get(name, []),
        # In float64 the perplexity rule decides otherwise.
        widened=False,
        traffic={"forward": {"": shape["B"] * shape["T"] * (READS.get(name, 1) + ID_BYTES)}},
    )


def bench_segmentation(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
