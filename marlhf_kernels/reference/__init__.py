"""The definition of every op in plain PyTorch, for any device; the other backends are held to it."""

from marlhf_kernels.backends import Backend, register
from marlhf_kernels.reference import (
    advantages,
    linear,
    logprobs,
    macro,
    policy_loss,
    segmentation,
    value_loss,
    whiten,
)

register(
    Backend(
        name="reference",
        where="plain PyTorch, on any device",
        implementations={
            function.__name__: function
            for function in (
                logprobs.token_logprobs,
                logprobs.token_logprobs_backward,
                logprobs.token_logprobs_backward_,
                macro.macro_reduce,
                macro.macro_reduce_backward,
                macro.macro_broadcast,
                macro.macro_lengths,
                advantages.kl_penalized_rewards,
                advantages.macro_gae,
                advantages.rollout_advantages,
                whiten.masked_moments,
                whiten.masked_normalize,
                policy_loss.macro_policy_loss,
                value_loss.macro_value_loss,
                value_loss.scale_gradient,
                policy_loss.policy_penalty,
                policy_loss.action_labels,
                linear.linear_token_logprobs,
                linear.linear_token_logprobs_backward,
                linear.merge_slices,
                segmentation.fixed_ngram,
                segmentation.from_ends,
                segmentation.from_bounds,
                segmentation.perplexity,
                segmentation.isolate_last,
            )
        },
        missing=lambda: None,
        worth_a_warning=lambda: False,
    )
)
