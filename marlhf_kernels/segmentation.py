"""Termination rules on tensors: from a mask of action tokens to `macro_ids`.

Every builder takes a bool mask `[B, T]`, or packed `[N]` with `cu_seqlens`, and returns int32 ids that start
at 0 in each sequence and rise by 0 or 1; -1 where the mask is False. None of them makes an empty macro
action.
"""

from marlhf_kernels.ops.segmentation import (
    fixed_ngram,
    from_ends,
    from_lengths,
    isolate_last,
    perplexity,
    randomized_ngram,
    token,
    validate,
    whole,
)

__all__ = [
    "fixed_ngram",
    "from_ends",
    "from_lengths",
    "isolate_last",
    "perplexity",
    "randomized_ngram",
    "token",
    "validate",
    "whole",
]
