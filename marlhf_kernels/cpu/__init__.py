"""The native CPU backend: C++ functions behind a plain C interface, loaded when one is first needed."""

from marlhf_kernels.backends import Backend, register
from marlhf_kernels.cpu import loader, logprobs, macro

register(
    Backend(
        name="cpu",
        where="native C++, on CPU tensors",
        implementations={
            "macro_lengths": macro.macro_lengths,
            "token_logprobs": logprobs.token_logprobs,
            "token_logprobs_backward": logprobs.token_logprobs_backward,
            "token_logprobs_backward_": logprobs.token_logprobs_backward_,
        },
        missing=loader.missing,
        worth_a_warning=loader.expected,
    )
)
