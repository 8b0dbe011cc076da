"""Encoded rows as padded tensors. Masks come from lengths, never from `ids != pad`: pad may equal EOS."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.data.encoding import EncodedRow

IGNORED_LABEL = -100


@dataclass(frozen=True)
class SFTBatch:
    """Right-padded; labels[b, t] is the token at t where it is trained on, else -100. They are not shifted."""

    input_ids: Tensor  # [B, L] int64
    attention_mask: Tensor  # [B, L] bool
    labels: Tensor  # [B, L] int64


@dataclass(frozen=True)
class PairBatch:
    """Right-padded; row b is pair b with its chosen response, row B + b the same with its rejected one."""

    input_ids: Tensor  # [2B, L] int64
    attention_mask: Tensor  # [2B, L] bool


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, P], mask bool [B, P]) with each sequence at the right end of its row."""
    return _pad(sequences, pad_id, left=True)


def right_pad(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, L], mask bool [B, L]) with each sequence at the left end of its row."""
    return _pad(sequences, pad_id, left=False)


def position_ids(mask: Tensor) -> Tensor:
    """Positions counted over real tokens only, 0 on padding in front: cumsum(mask) - 1, int64 [B, L]."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def sft_batch(rows: Sequence[EncodedRow], *, pad_id: int, train_on_prompt: bool = False) -> SFTBatch:
    """Prompt and response of each row; labels on the response, and with `train_on_prompt` on both."""
    sequences = [row.prompt_ids + row.response_ids["response"] for row in rows]
    input_ids, attention_mask = right_pad(sequences, pad_id)
    trained = attention_mask
    if not train_on_prompt:
        prompt_lengths = torch.tensor([len(row.prompt_ids) for row in rows]).unsqueeze(1)  # [B, 1]
        trained = attention_mask & (torch.arange(input_ids.shape[1]) >= prompt_lengths)
    return SFTBatch(input_ids, attention_mask, input_ids.masked_fill(~trained, IGNORED_LABEL))


def pair_batch(rows: Sequence[EncodedRow], *, pad_id: int, see_prompt: bool = True) -> PairBatch:
    """The chosen responses and then the rejected ones, each behind its prompt.

    see_prompt: False leaves of the prompt only what the tokenizer puts in front, such as BOS.
    """
    sequences = []
    for name in ("chosen", "rejected"):
        for row in rows:
            prompt = row.prompt_ids if see_prompt else row.prompt_ids[: row.prefix_length]
            sequences.append(prompt + row.response_ids[name])
    return PairBatch(*right_pad(sequences, pad_id))


def epochs(n: int, batch_size: int, *, seed: int, max_steps: int | None = None, epochs: int = 1) -> Iterator[list[int]]:
    """The row numbers of each batch: every epoch a fresh permutation of 0 .. n-1, the last batch partial.

    The permutation is a function of (seed, epoch) alone, the same on every machine. max_steps: so many
    batches, however many epochs that is; None: `epochs` epochs.
    """
    if n < 1:
        raise ValueError("there are no rows to make batches of")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    return _batches(n, batch_size, seed, max_steps, epochs)


def _batches(n: int, batch_size: int, seed: int, max_steps: int | None, epochs: int) -> Iterator[list[int]]:
    step = 0
    epoch = 0
    while epoch < epochs if max_steps is None else step < max_steps:
        order = list(range(n))
        random.Random(f"{seed}:{epoch}").shuffle(order)
        for start in range(0, n, batch_size):
            if step == max_steps:
                return
            yield order[start : start + batch_size]
            step += 1
        epoch += 1


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    length = max((len(sequence) for sequence in sequences), default=0)
    ids, mask = [], []
    for sequence in sequences:
        pads = length - len(sequence)
        padding, real = [pad_id] * pads, list(sequence)
        ids.append(padding + real if left else real + padding)
        mask.append([False] * pads + [True] * len(real) if left else [True] * len(real) + [False] * pads)
    shape = (len(sequences), length)
    return torch.tensor(ids, dtype=torch.int64).view(shape), torch.tensor(mask, dtype=torch.bool).view(shape)
