"""What our kernels have to reach, in one place: least ratios to rivals, and least shares of a bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import Row

LOGITS = ("gpt2-256", "qwen-256")
BATCHES = ("64x512", "16x4096")


@dataclass(frozen=True)
class Floor:
    """`rival`'s time over ours must be at least `ratio`."""

    op: str
    mode: str
    rival: str
    """A `Row.who`."""
    ratio: float
    shapes: tuple[str, ...]
    options: str | None = None
    """None: with any options."""
    ours: str = "marlhf"
    on: str = "cpu"

    def holds_for(self, ours: Row, rival: Row) -> bool:
        return (
            ours.op == self.op
            and ours.mode == self.mode
            and ours.provider == self.ours
            and ours.shape in self.shapes
            and self.options in (None, ours.options)
            and rival.who == self.rival
            and (ours.threads is not None) == (self.on == "cpu")
        )


@dataclass(frozen=True)
class ShareFloor:
    """Our time must be at most 1 / `share` of what the bytes take at the measured bandwidth."""

    op: str
    mode: str
    share: float
    on: str

    def holds_for(self, ours: Row) -> bool:
        return ours.op == self.op and ours.mode == self.mode and (ours.threads is not None) == (self.on == "cpu")


FLOORS = (
    Floor("token_logprobs", "forward", "eager", 12, LOGITS, options="entropy"),
    Floor("token_logprobs", "forward", "compile", 3, LOGITS, options="entropy"),
    Floor("token_logprobs", "full", "eager", 7, LOGITS, options="entropy"),
    Floor("token_logprobs", "full", "compile", 2.5, LOGITS, options="entropy"),
    Floor("token_logprobs", "full", "compile", 5, LOGITS, options="entropy", ours="marlhf in place"),
    Floor("macro_gae", "forward", "loop", 100, BATCHES, options="fixed 5"),
    Floor("macro_gae", "forward", "marlhf:reference", 10, BATCHES, options="fixed 5"),
    Floor("rollout_advantages", "forward", "loop", 100, BATCHES, options="fixed 5"),
    Floor("rollout_advantages", "forward", "marlhf:reference", 10, BATCHES, options="fixed 5"),
    Floor("macro_policy_loss", "full", "compile:reference", 3, BATCHES),
    Floor("macro_value_loss", "full", "compile:reference", 3, BATCHES),
    Floor("linear_token_logprobs", "full", "eager", 1 / 1.05, ("gpt2-4096-h512",)),
)
SHARES = (
    ShareFloor("token_logprobs", "forward", 0.6, on="cpu"),
    ShareFloor("token_logprobs", "backward", 0.6, on="cpu"),
    ShareFloor("token_logprobs", "full", 0.6, on="cpu"),
    ShareFloor("token_logprobs", "forward", 0.85, on="cuda"),
    ShareFloor("token_logprobs", "backward", 0.8, on="cuda"),
)


def ratio_floor(ours: Row, rival: Row) -> float | None:
    """The least ratio of these two, if there is one."""
    return max((floor.ratio for floor in FLOORS if floor.holds_for(ours, rival)), default=None)


def share_floor(ours: Row) -> float | None:
    """The least share of the bandwidth, if there is one."""
    return max((floor.share for floor in SHARES if floor.holds_for(ours)), default=None)
