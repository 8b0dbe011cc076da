"""The native CPU backend: C++ functions behind a plain C interface, loaded when one is first needed."""

from marlhf_kernels import backends
from marlhf_kernels.cpu import loader, macro

backends.register(
    backends.Backend(
        name="cpu",
        where="native C++, on CPU tensors",
        implementations={"macro_lengths": macro.macro_lengths},
        missing=loader.missing,
        worth_a_warning=loader.build_failed,
    )
)
