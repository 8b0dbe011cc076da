"""Advantage estimators over macro actions, by the name that a config uses.

`gae` learns a critic; the others have none. R_k is the reward of macro action k, KL penalty included, M the
number of macro actions, and R = sum_k R_k the return of a response.
"""

import torch
from torch import Tensor

from marlhf.config import PPOConfig
from marlhf_kernels import macro_broadcast, macro_gae, macro_reduce

ESTIMATORS = ("gae", "rloo", "grpo", "reinforce")
GROUPED = ("rloo", "grpo")
"""Estimators that compare the responses to one prompt with each other."""
STD_EPSILON = 1e-6


def needs_critic(config: PPOConfig) -> bool:
    """Whether the estimator reads values."""
    return config.estimator == "gae"


def whitens(config: PPOConfig) -> bool:
    """Whether advantages are whitened over the batch: as asked for, by default unless compared within a group."""
    return config.estimator not in GROUPED if config.whiten_advantages is None else config.whiten_advantages


def estimate(
    rewards: Tensor,
    values: Tensor,
    macro_ids: Tensor,
    *,
    config: PPOConfig,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[B, T]` of token rewards `[B, T]`; 0 where the macro id is -1.

    - `gae`: delta_k = R_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lam A_{k+1}, returns A_k + V_k (Schulman et
      al., arXiv 1506.02438, over the macro actions of Chai et al., arXiv 2410.02743).
    - `reinforce`: A_k = sum_{j >= k} gamma^{j-k} R_j, which is `gae` with lam 1 and values 0 (Williams, 1992;
      whitened over the batch, REINFORCE++, Hu, arXiv 2501.03262).
    - `rloo`, `grpo`: see `group_advantages`; every macro action of a response has the advantage of the response.

    Without a critic, values are not read and the returns are 0.
    """
    if config.estimator in GROUPED:
        per_row = group_advantages(
            macro_reduce(rewards, macro_ids, weights=config.reward_weights).sum(dim=1),
            (macro_ids >= 0).any(dim=1),
            samples=config.samples_per_prompt,
            estimator=config.estimator,
        )
        broadcast = macro_broadcast(per_row[:, None], macro_ids.clamp(max=0))
        return broadcast, torch.zeros_like(broadcast)
    critic = needs_critic(config)
    result = macro_gae(
        rewards,
        values if critic else torch.zeros_like(values),
        macro_ids,
        gamma=config.gamma,
        lam=config.lam if critic else 1.0,
        reward_weights=config.reward_weights,
        value_weights=config.value_weights,
        discount_per=config.discount_per,
        bootstrap_values=bootstrap_values,
    )
    return result.advantages, result.returns if critic else torch.zeros_like(result.returns)


def group_advantages(returns: Tensor, counted: Tensor, *, samples: int, estimator: str) -> Tensor:
    """Advantages `[B]` of returns `[B]` within groups of `samples` consecutive rows, one group per prompt.

    For the n counted responses of a group, with mean over them:

    - `rloo`: A_i = R_i - 1/(n-1) sum_{j != i} R_j
      (Ahmadian et al., arXiv 2402.14740).
    - `grpo`: A_i = (R_i - mean R) / (std R + 1e-6), std with n - 1 (Shao et al., arXiv 2402.03300, outcome
      supervision; the paper does not say which std, its public implementations take this one).

    A response that is not `counted` (it has no action) enters no mean and has advantage 0, and so has one that
    stands alone.
    """
    real = counted.view(-1, samples)
    grouped = returns.view(-1, samples).masked_fill(~real, 0.0)
    n = real.sum(dim=1, keepdim=True)
    centred = (grouped - grouped.sum(dim=1, keepdim=True) / n.clamp(min=1)).masked_fill(~real, 0.0)
    if estimator == "rloo":
        # R_i - (sum - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
        advantages = centred * n / (n - 1).clamp(min=1)
    else:
        std = (centred.square().sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()
        advantages = centred / (std + STD_EPSILON)
    return advantages.view(-1)
