"""Rewards: sources of scores, what is taken off them, and the KL to the reference as a penalty and as a loss."""

from marlhf.rewards.kl import KLController, k2_loss
from marlhf.rewards.scores import penalise_length, penalise_missing_stop, scores_of_responses
from marlhf.rewards.sources import ModelReward, Rewards, check_rewards, critic_origin, load_rewards

__all__ = [
    "KLController",
    "ModelReward",
    "Rewards",
    "check_rewards",
    "critic_origin",
    "k2_loss",
    "load_rewards",
    "penalise_length",
    "penalise_missing_stop",
    "scores_of_responses",
]
