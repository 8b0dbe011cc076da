"""Random inputs, the same numbers every time."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness import Inputs
from benchmarks.shapes import Shape
from marlhf_kernels import macro_lengths, segmentation


def logits(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Rows of logits with the spread of a trained model's, and a label each."""
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary = shape["N"], shape["V"]
    return {
        "logits": torch.randn(rows, vocabulary, generator=generator).mul_(3).to(dtype),
        "labels": torch.randint(vocabulary, (rows,), generator=generator),
    }


def head(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Hidden states, an output layer that gives logits a spread of 3, and labels."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = shape["N"], shape["H"], shape["V"]
    return {
        "hidden": torch.randn(rows, width, generator=generator).to(dtype),
        "weight": torch.randn(vocabulary, width, generator=generator).mul_(3 * width**-0.5).to(dtype),
        "labels": torch.randint(vocabulary, (rows,), generator=generator),
    }


def response_mask(shape: Shape) -> Tensor:
    """[B, T] right-padded responses of T / 2 to T tokens."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens = shape["B"], shape["T"]
    lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1), generator=generator)
    return torch.arange(tokens) < lengths


def rollout(shape: Shape, dtype: torch.dtype, macro_tokens: float) -> Inputs:
    """What a rollout holds, cut into macro actions of `macro_tokens` tokens, and `lengths` [B, K] of them.

    New log-probabilities and values differ from the old ones by about the clip range.
    """
    generator = torch.Generator().manual_seed(1)
    batch, tokens = shape["B"], shape["T"]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch, tokens, generator=generator)

    old_logprobs, old_values = -noise(1.5).abs(), noise(1.0)
    fields = {
        "old_logprobs": old_logprobs,
        "logprobs": old_logprobs + noise(0.2),
        "ref_logprobs": old_logprobs + noise(0.2),
        "old_values": old_values,
        "values": old_values + noise(0.2),
        "rewards": noise(1.0),
        "returns": noise(1.0),
        "advantages": noise(1.0),
        "scores": torch.randn(batch, generator=generator),
    }
    ids = segmentation.fixed_ngram(response_mask(shape), macro_tokens)
    whole = {name: x.to(dtype) for name, x in fields.items()}
    return {**whole, "macro_ids": ids, "lengths": macro_lengths(ids)}
