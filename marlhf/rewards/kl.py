"""The coefficient of the KL penalty, and the KL as a loss."""

import math

from torch import Tensor

from marlhf.errors import ConfigError


class KLController:
    """A fixed coefficient, or the adaptive one of Ziegler et al. (arXiv 1909.08593).

    After a batch of n responses whose mean KL (summed over each response's tokens) is kl, the adaptive
    coefficient is multiplied by `1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`.
    """

    def __init__(self, coefficient: float, *, target: float | None = None, horizon: int = 10000) -> None:
        if not 0 <= coefficient < math.inf:
            raise ConfigError(f"`ppo.kl_coef` is {coefficient}; it must not be negative")
        if target is not None and not target > 0:
            raise ConfigError(f"`ppo.kl_target` is {target}; it must be above 0, or null for a fixed coefficient")
        if target is not None and horizon <= 0:
            raise ConfigError(f"`ppo.kl_horizon` is {horizon}; it must be above 0")
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def state_dict(self) -> dict[str, float]:
        """Where the coefficient stands."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Sets what `state_dict` gave."""
        self.coefficient = state["coefficient"]

    def update(self, kl: float, responses: int) -> None:
        """Moves the coefficient after a batch; does nothing when it is fixed."""
        if self.target is None:
            return
        error = min(0.2, max(-0.2, kl / self.target - 1.0))
        self.coefficient *= 1.0 + error * responses / self.horizon


def k2_loss(logprobs: Tensor, ref_logprobs: Tensor, actions: Tensor, *, normalizer: Tensor) -> Tensor:
    """The sum over `actions [B, T]` of d^2 / 2, d = logp - reference logp, divided by `normalizer`.

    Its value is the k2 estimator of the KL to the reference (J. Schulman, "Approximating KL divergence", 2020). On
    tokens that the policy sampled, its gradient d grad(logp) is that of the KL in expectation; k1's would be 0 and
    k3's that of the KL from the reference to the policy.
    """
    d = (logprobs - ref_logprobs).masked_fill(~actions, 0.0)
    return (d.square() / 2).sum() / normalizer.clamp(min=1)
