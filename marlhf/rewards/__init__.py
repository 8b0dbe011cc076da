"""Rewards: scores of whole responses and the KL penalty's coefficient."""

from marlhf.rewards.kl import KLController
from marlhf.rewards.scores import penalise_missing_stop, scores_of_responses

__all__ = ["KLController", "penalise_missing_stop", "scores_of_responses"]
