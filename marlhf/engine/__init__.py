"""What a training loop needs around the arithmetic: device, seeds, optimiser, schedule, steps."""

import math
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from marlhf.config import Config, OptimizerConfig, one_of
from marlhf.errors import ConfigError, DivergedError

# Ranks draw different noise and shuffle data alike: each rank's rollout seed is `seed + rank * RANK_PRIME`.
RANK_PRIME = 100_003


def prepare(config: Config) -> torch.device:
    """Sets threads and seeds, and returns the device to run on; ConfigError if there is no such device."""
    if config.threads is not None:
        most = max(64, 4 * (os.cpu_count() or 1))
        if not 1 <= config.threads <= most:
            raise ConfigError(f"`threads` is {config.threads}; it must be from 1 to {most}")
        torch.set_num_threads(config.threads)
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"`seed` is {config.seed}; it must be from 0 to {2**32 - 1}")
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"`device` is {name!r}; write auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"`device` is {name!r}; write auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"`device` is {name!r}, but this PyTorch sees no GPU; write device=cpu or device=auto")
    return device


def rollout_generator(seed: int, *, rank: int = 0) -> torch.Generator:
    """The source of seeds for sampling responses: its own per rank, the same on every run."""
    return torch.Generator().manual_seed(seed + rank * RANK_PRIME)


def next_seed(generator: torch.Generator) -> int:
    """Draws the seed of one sampling call."""
    return int(torch.randint(2**31 - 1, (), generator=generator))


def check_optimizer(config: OptimizerConfig, *, key: str) -> None:
    """ConfigError for values that cannot work."""
    one_of(config.schedule, ("constant", "linear", "cosine"), key=f"{key}.schedule")
    for name in ("learning_rate", "eps", "max_grad_norm"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"`{key}.{name}` is {value}; it must be above 0")
    if config.max_skipped_steps < 0:
        raise ConfigError(f"`{key}.max_skipped_steps` is {config.max_skipped_steps}; it must be at least 0")
    for name in ("warmup_steps", "weight_decay"):
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"`{key}.{name}` is {value}; it must not be negative")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(f"`{key}.betas` is {tuple(config.betas)}; both must be at least 0 and below 1")


class Optimizer:
    """AdamW over a model's parameters with gradient clipping and a schedule that counts optimiser steps."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, total_steps: int) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.max_grad_norm = config.max_grad_norm
        self.max_skipped_steps = config.max_skipped_steps
        self.skipped = 0
        """Steps that were skipped in the whole run."""
        self._skipped_in_a_row = 0
        self.adamw = AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.schedule = LambdaLR(self.adamw, _schedule(config, total_steps))

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self.schedule.get_last_lr()[0])

    def step(self) -> Tensor:
        """Clips, steps, zeroes the gradients and advances the schedule; returns the norm before clipping.

        If the gradient is not finite, nothing moves: the step is skipped and counted. Raises DivergedError at
        more than `max_skipped_steps` of them in a row.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        if torch.isfinite(norm):
            self._skipped_in_a_row = 0
            self.adamw.step()
            self.schedule.step()
        else:
            self.skipped += 1
            self._skipped_in_a_row += 1
        self.adamw.zero_grad(set_to_none=True)
        if self._skipped_in_a_row > self.max_skipped_steps:
            raise DivergedError(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row, at a learning rate of "
                f"{self.learning_rate:g}; lower the learning rate, or look for inf or NaN in the scores and the data "
                "(the run folder's skipped/ holds the batches)"
            )
        return norm.detach()

    def state_dict(self) -> dict[str, Any]:
        """AdamW's moments, the schedule's place, and how many steps were skipped."""
        return {
            "adamw": self.adamw.state_dict(),
            "schedule": self.schedule.state_dict(),
            "skipped": [self.skipped, self._skipped_in_a_row],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets what `state_dict` gave."""
        self.adamw.load_state_dict(state["adamw"])
        self.schedule.load_state_dict(state["schedule"])
        self.skipped, self._skipped_in_a_row = state["skipped"]


def _schedule(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        progress = min(1.0, progress)
        if config.schedule == "linear":
            return 1.0 - progress
        if config.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0

    return factor


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of a model to 0, so that it computes the same in train and eval mode.

    Reward models, rollouts and updates must see the same function, or the first importance ratio is not 1.
    Attention modules hold their probability as a number that acts in train mode only.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Excludes parameters from training."""
    for parameter in parameters:
        parameter.requires_grad_(False)
