"""What a rollout batch and its update looked like, over real tokens only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marlhf.rollout import Rollout


class UpdateMetrics:
    """Collects the metrics of an update over microbatches without waiting for the device.

    Parts of a loss add up within an optimiser step; other metrics are means whose weight is what they are
    means over, so that the split into microbatches changes none of them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._sums: dict[str, Tensor] = {}
        self._weighted: dict[str, tuple[Tensor, Tensor]] = {}
        self._largest: dict[str, Tensor] = {}

    def per_step(self, **parts: Tensor) -> None:
        """Adds parts of sums that are reported as a mean over optimiser steps."""
        for name, part in parts.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(part)) + part.detach()

    def mean(self, weight: Tensor, **values: Tensor) -> None:
        """Adds means over `weight` units."""
        for name, value in values.items():
            total, weights = self._weighted.get(name, (torch.zeros_like(value), torch.zeros_like(weight)))
            self._weighted[name] = (total + value.detach() * weight, weights + weight)

    def largest(self, **values: Tensor) -> None:
        """Keeps the largest value."""
        for name, value in values.items():
            self._largest[name] = torch.maximum(self._largest.get(name, value), value).detach()

    def result(self) -> dict[str, float]:
        """Everything that was collected, as numbers."""
        found = {name: total / max(1, self.steps) for name, total in self._sums.items()}
        found.update({name: total / weight.clamp(min=1) for name, (total, weight) in self._weighted.items()})
        found.update(self._largest)
        return {name: value.item() for name, value in found.items()}


def unit_count(ids: Tensor, unit: str) -> Tensor:
    """How many `tokens`, `macros` or non-empty `sequences` there are in macro ids `[B, T]`; a 0-d tensor."""
    if unit == "tokens":
        return (ids >= 0).sum()
    if unit == "macros":
        return (ids.amax(dim=1) + 1).sum()
    return (ids >= 0).any(dim=1).sum()


def level_unit(level: str) -> str:
    """What a loss at this level is a sum over."""
    return "tokens" if level == "token" else "macros"


@torch.no_grad()
def rollout_metrics(rollout: Rollout, kl_coef: float, *, sources: Sequence[str] = ()) -> dict[str, float]:
    """What one rollout batch looks like; padding enters none of the numbers.

    Two or more named sources of rewards are also reported apart, each without its weight.
    """
    tokens = rollout.action_mask.sum().clamp(min=1)
    macros = unit_count(rollout.macro_ids, "macros").clamp(min=1)
    means = rollout.source_scores.mean(dim=0).tolist() if len(sources) > 1 else []
    return {
        "score": rollout.scores.mean().item(),
        "score_std": rollout.scores.std(correction=0).item(),
        "kl": rollout.kl.sum(dim=1).mean().item(),
        "kl_coef": kl_coef,
        "response_length": rollout.lengths.float().mean().item(),
        "stopped_share": 1.0 - rollout.truncated.float().mean().item(),
        "entropy": (rollout.entropy.sum() / tokens).item(),
        "value": (rollout.values.sum() / tokens).item(),
        "return": (rollout.returns.sum() / tokens).item(),
        "macro_length": (tokens / macros).item(),
        **{f"score/{name}": mean for name, mean in zip(sources, means, strict=False)},
    }
