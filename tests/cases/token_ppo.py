"""Token-level PPO for language models as it is usually written: vectors over tokens, a mask, no macro actions."""

from __future__ import annotations

import torch
from torch import Tensor


def rewards(score: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * (logp - ref) on real tokens, the score added at the last of them. [B, T]"""
    out = torch.where(mask, -kl_coef * (logprobs - ref_logprobs), 0.0)
    for b in range(mask.shape[0]):
        real = mask[b].nonzero()
        if len(real):
            out[b, real[-1, 0]] += score[b]
    return out


def advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GAE backwards in time; masked steps are stepped over. [B, T] each"""
    batch, length = rewards.shape
    adv, ret = torch.zeros_like(rewards), torch.zeros_like(rewards)
    next_value = rewards.new_zeros(batch)
    running = rewards.new_zeros(batch)
    for t in reversed(range(length)):
        real = mask[:, t]
        value = torch.where(real, values[:, t], 0.0)
        delta = torch.where(real, rewards[:, t], 0.0) + gamma * next_value - value
        here = delta + gamma * lam * running
        adv[:, t] = torch.where(real, here, 0.0)
        ret[:, t] = torch.where(real, here + value, 0.0)
        running = torch.where(real, here, running)
        next_value = torch.where(real, value, next_value)
    return adv, ret


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
    """The mean over real tokens of the clipped surrogate."""
    ratio = torch.exp(torch.where(mask, logprobs - old, 0.0))
    worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
    return torch.where(mask, worse, 0.0).sum() / mask.sum()


def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Half the mean over real tokens of the worse squared error."""
    values, old = torch.where(mask, values, 0.0), torch.where(mask, old, 0.0)
    held = torch.minimum(torch.maximum(values, old - clip), old + clip)
    worse = torch.maximum((values - returns) ** 2, (held - returns) ** 2)
    return 0.5 * torch.where(mask, worse, 0.0).sum() / mask.sum()
