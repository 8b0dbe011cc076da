"""How an op is registered: schema, one kernel that asks for a backend, a fake, and its derivative.

The derivative is a kernel of our own at the Autograd key that calls an `autograd.Function`: the same
guarantees as `torch.library.register_autograd` at a quarter of its cost per call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from marlhf_kernels.backends import requested, resume, select

NAMESPACE = "marlhf"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Private to PyTorch; where a version lacks it, `register_autograd` is slower and does the same.
_BelowAutograd: Callable[[], AbstractContextManager[None]] | None = getattr(
    torch._C, "_AutoDispatchBelowAutograd", None
)

Save = Callable[[Any, tuple[Any, ...], tuple[Tensor, ...]], Sequence[Tensor | None]]
Backward = Callable[..., Sequence[Tensor | None]]


def define(schema: str, fake: Callable[..., Any], *, detached: bool = False) -> Any:
    """Register `marlhf::<schema>`. Returns the callable op.

    Args:
        schema: name, arguments and results in the dispatcher's notation.
        fake: shapes, dtypes and devices of the results from those of the arguments.
        detached: no gradient flows through the op; its results never require one.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def kernel(*args: Any) -> Any:
        return select(name, args)(*args)

    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if detached:
        _register_detached(name, op)
    return op


def differentiable(op: Any, *, inputs: Sequence[int], save: Save, backward: Backward) -> None:
    """Give `op` its first derivative; a second one raises.

    Args:
        op: what `define` returned.
        inputs: positions of the arguments that get a gradient.
        save: `save(ctx, arguments, results)` returns the tensors that backward needs and may set plain values
            on ctx.
        backward: `backward(ctx, saved, *grads)` returns one gradient for each of `inputs`, in that order.
            A gradient that nothing asked for comes as None; `ctx.needs_input_grad` is over all arguments.
    """
    name = op._schema.name.partition("::")[2]

    def forward_saved(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.requested = requested()
        ctx.num_args = len(args)
        # The differentiated inputs are saved so that a second derivative finds its way to them, and raises.
        ctx.save_for_backward(*(args[i] for i in inputs), *save(ctx, args, results))

    def run_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sources = ctx.saved_tensors[: len(inputs)]
        with below_autograd(), resume(ctx.requested):
            results = backward(ctx, ctx.saved_tensors, *grads)
        results = first_order(name, results, (*sources, *grads))
        every: list[Tensor | None] = [None] * ctx.num_args
        for position, result in zip(inputs, results, strict=True):
            every[position] = result
        return tuple(every)

    if _BelowAutograd is None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}",
            run_backward,
            setup_context=lambda ctx, inputs, output: forward_saved(
                ctx, inputs, output if isinstance(output, tuple) else (output,)
            ),
            lib=LIBRARY,
        )
        return

    def run_forward(ctx: Any, *args: Any) -> Any:
        with below_autograd():
            results = op(*args)
        forward_saved(ctx, args, results if isinstance(results, tuple) else (results,))
        return results

    # Made by hand so that `grad_fn` shows the op's name.
    function: Any = type(
        "".join(part.title() for part in name.split("_")),
        (torch.autograd.Function,),
        {
            "forward": staticmethod(run_forward),
            "backward": staticmethod(run_backward),
            "__module__": __name__,
        },
    )

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(args[i] is not None and args[i].requires_grad for i in inputs):
            return function.apply(*args)
        with below_autograd():
            return op(*args)

    LIBRARY.impl(name, kernel, "Autograd")


def first_order(
    name: str, gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The gradients of op `name`; where a graph of them is made, differentiating it raises."""
    if not torch.is_grad_enabled():
        return gradients
    return [g if g is None else _FirstOrder.apply(name, g, *sources) for g in gradients]


def below_autograd() -> AbstractContextManager[None]:
    """Calls inside skip the Autograd key, where our own kernels would catch them again."""
    return _BelowAutograd() if _BelowAutograd is not None else contextlib.nullcontext()


def _register_detached(name: str, op: Any) -> None:
    if _BelowAutograd is None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_gradient, lib=LIBRARY)
        return

    def kernel(*args: Any) -> Any:
        with below_autograd():
            return op(*args)

    LIBRARY.impl(name, kernel, "Autograd")


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    return (None,) * len(ctx.needs_input_grad)


class _FirstOrder(torch.autograd.Function):
    """The identity on a gradient, tied to what it came from, so that differentiating it again is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        ctx.name = name
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{NAMESPACE}::{ctx.name} has a first derivative only; its gradient cannot be differentiated again"
        )
