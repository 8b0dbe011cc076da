"""Policies, critics and reward models: transformers models reached through one narrow seam."""

from marlhf.models.loading import load_critic, load_policy, load_reward_model, save_model
from marlhf.models.policy import check_head, response_logprobs, token_nll
from marlhf.models.scorer import last_positions, position_scores, response_values, sequence_scores

__all__ = [
    "check_head",
    "last_positions",
    "load_critic",
    "load_policy",
    "load_reward_model",
    "position_scores",
    "response_logprobs",
    "response_values",
    "save_model",
    "sequence_scores",
    "token_nll",
]
