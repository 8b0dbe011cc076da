"""Recording the `marlhf::` ops that a public function calls, so that they can be handed to `opcheck`."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class RecordOps(TorchFunctionMode):
    """Keeps (overload, args, kwargs) of every `marlhf::` op called inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):
            func = func.default
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "marlhf":
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)
