"""Scores and values from a scalar head on hidden states."""

from typing import Any

import torch
from torch import Tensor

from marlhf.models.loading import scalar_head
from marlhf.models.policy import hidden_states


def sequence_scores(model: Any, input_ids: Tensor, attention_mask: Tensor, *, centred: bool = True) -> Tensor:
    """Scores `[B]`, float32, read at each row's last real token, found from the mask under any padding.

    Centred scores have the mean score of the reference responses subtracted, which is saved with the model.
    A row without any real token is read at its last position.
    """
    hidden = hidden_states(model, input_ids, attention_mask)
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    scores = scalar_head(model, key="model")(hidden[rows, last_positions(attention_mask)]).squeeze(-1).float()
    return scores - getattr(model.config, "reward_mean", 0.0) if centred else scores


def position_scores(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Uncentred scores `[B, L]`, float32, as read at every position, those of padding included."""
    return scalar_head(model, key="model")(hidden_states(model, input_ids, attention_mask)).squeeze(-1).float()


def last_positions(mask: Tensor) -> Tensor:
    """The position `[B]` of each row's last real token; the last position of a row without any."""
    length = mask.shape[1]
    positions = torch.arange(length, device=mask.device)
    return torch.where(mask, positions, -1).amax(dim=1).remainder(length)


def response_values(
    model: Any, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, response_mask: Tensor
) -> Tensor:
    """Values `[B, T]`, float32: entry t is the value before response token t is chosen, 0 where masked."""
    prompt_length, length = prompt_ids.shape[1], response_ids.shape[1]
    hidden = hidden_states(
        model,
        torch.cat([prompt_ids, response_ids], dim=1),
        torch.cat([prompt_mask, response_mask], dim=1),
    )
    predicting = hidden[:, prompt_length - 1 : prompt_length + length - 1]
    values = scalar_head(model, key="model")(predicting).squeeze(-1).float()
    return values.masked_fill(~response_mask, 0.0)
