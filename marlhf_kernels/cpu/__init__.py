"""The native CPU backend: C++ functions behind a plain C interface, loaded when one is first needed."""

from marlhf_kernels.backends import Backend, register
from marlhf_kernels.cpu import advantages, loader, logprobs, macro, policy_loss, segmentation, value_loss, whiten

register(
    Backend(
        name="cpu",
        where="native C++, on CPU tensors",
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
                segmentation.fixed_ngram,
                segmentation.from_ends,
                segmentation.from_bounds,
                segmentation.perplexity,
                segmentation.isolate_last,
            )
        },
        missing=loader.missing,
        worth_a_warning=loader.expected,
    )
)
