"""Scores of whole responses from a reward model."""

from typing import Any

import torch
from torch import Tensor

from marlhf.config import one_of
from marlhf.models import sequence_scores


def scores_of_responses(
    model: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    *,
    standardize: bool = False,
) -> Tensor:
    """Centred scores `[B]` of prompt + response, read at each row's last real token.

    With `standardize` they are divided by the deviation of scores that was saved with the reward model.
    """
    scores = sequence_scores(
        model,
        torch.cat([prompt_ids, response_ids], dim=1),
        torch.cat([prompt_mask, response_mask], dim=1),
    )
    return scores / getattr(model.config, "reward_std", 1.0) if standardize else scores


def penalise_missing_stop(scores: Tensor, truncated: Tensor, *, penalty: float | None, mode: str) -> Tensor:
    """Scores `[B]` after the penalty for responses that never stopped.

    `mode` is `subtract` (score - penalty) or `set` (the score becomes -penalty); None changes nothing.
    """
    one_of(mode, ("subtract", "set"), key="ppo.missing_stop_mode")
    if penalty is None:
        return scores
    penalised = scores - penalty if mode == "subtract" else torch.full_like(scores, -penalty)
    return torch.where(truncated, penalised, scores)


def penalise_length(scores: Tensor, lengths: Tensor, *, penalty: float | None, start: int) -> Tensor:
    """Scores `[B]` less `penalty` for each of `lengths [B]` tokens beyond the first `start`; None changes nothing.

    With penalty 1 / c and start max - c it is the soft overlong punishment of DAPO (Yu et al., arXiv 2503.14476).
    """
    return scores if penalty is None else scores - penalty * (lengths - start).clamp(min=0)
