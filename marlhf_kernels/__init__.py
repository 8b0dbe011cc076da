"""Fused kernels for reinforcement learning from human feedback with macro actions.

B sequences, T tokens, N packed tokens or rows, V vocabulary, H hidden, K macro actions. Tensors `[B, T]` are
aligned to response tokens; `macro_ids` says which macro action each token belongs to, -1 for none. Importing
this needs torch alone.
"""

# Each backend registers itself when it is imported.
from marlhf_kernels import cpu, gpu, reference, segmentation
from marlhf_kernels.backends import BackendStatus, BackendUnavailableError, backends, use_backend
from marlhf_kernels.ops.advantages import (
    Advantages,
    RolloutAdvantages,
    TokenRewards,
    kl_penalized_rewards,
    macro_gae,
    rollout_advantages,
)
from marlhf_kernels.ops.linear import linear_macro_policy_loss, linear_token_logprobs
from marlhf_kernels.ops.logprobs import token_logprobs
from marlhf_kernels.ops.macro import macro_broadcast, macro_lengths, macro_reduce
from marlhf_kernels.ops.policy_loss import PolicyLoss, macro_policy_loss
from marlhf_kernels.ops.value_loss import ValueLoss, macro_value_loss
from marlhf_kernels.ops.whiten import masked_whiten

__all__ = [
    "Advantages",
    "BackendStatus",
    "BackendUnavailableError",
    "PolicyLoss",
    "RolloutAdvantages",
    "TokenRewards",
    "ValueLoss",
    "backends",
    "kl_penalized_rewards",
    "linear_macro_policy_loss",
    "linear_token_logprobs",
    "macro_broadcast",
    "macro_gae",
    "macro_lengths",
    "macro_policy_loss",
    "macro_reduce",
    "macro_value_loss",
    "masked_whiten",
    "rollout_advantages",
    "segmentation",
    "token_logprobs",
    "use_backend",
]

del cpu, gpu, reference
