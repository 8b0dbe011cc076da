"""Rows of logits that break softmax kernels, and their exact log-probabilities from the loop oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.cases import oracle
from tests.cases.batches import INF, NAN


@dataclass(frozen=True)
class LogitCase:
    """Logits [N, V] and labels [N] in float64, with the options to call the op with."""

    name: str
    logits: list[list[float]]
    labels: list[int]
    options: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        vocab = len(self.logits[0]) if self.logits else 5
        logits = torch.tensor(self.logits, dtype=torch.float64).reshape(len(self.labels), vocab)
        return logits.to(dtype), torch.tensor(self.labels, dtype=torch.int64)


def noise(rows: int, vocab: int, centre: float = 0.0, spread: float = 1.0, seed: int = 0) -> list[list[float]]:
    """Normal numbers."""
    rng = random.Random(seed + 31 * rows + vocab)
    return [[rng.gauss(centre, spread) for _ in range(vocab)] for _ in range(rows)]


def _spread_labels(rows: int, vocab: int) -> list[int]:
    # First, last and inner places of the vocabulary.
    return [(0, vocab - 1, vocab // 2, vocab // 3)[n % 4] for n in range(rows)]


def _random(name: str, rows: int, vocab: int, centre: float = 0.0, spread: float = 1.0, **options: float) -> LogitCase:
    return LogitCase(name, noise(rows, vocab, centre, spread), _spread_labels(rows, vocab), options)


def _peaked(vocab: int) -> LogitCase:
    # The last row is an ordinary one: the error budget is relative to the largest number of a batch.
    rows = noise(4, vocab)
    labels = _spread_labels(4, vocab)
    for row, y in zip(rows[:3], labels[:3], strict=True):
        row[y] = max(row) + 12.0
    return LogitCase(f"target 12 above the rest, V {vocab}", rows, labels)


def _likely_and_far_from_zero(centre: float) -> LogitCase:
    # Log-probabilities near 0 out of logits near -200: a maximum added to log S before the difference is taken
    # rounds away more than the budget of such small numbers allows.
    rows = noise(16, 17, centre)
    labels = _spread_labels(16, 17)
    for row, y in zip(rows, labels, strict=True):
        row[y] += 5.0
    return LogitCase(f"likely labels, logits near {centre:.0f}", rows, labels)


def _banned(vocab: int) -> LogitCase:
    rows = noise(3, vocab)
    for row in rows:
        for v in range(0, vocab, 3):
            row[v] = -INF
    # The last row's label is banned itself.
    return LogitCase(f"-inf logits, V {vocab}", rows, [1, vocab - vocab % 3 - 1, 0])


def _ignored(vocab: int) -> LogitCase:
    rows = noise(8, vocab)
    rows[1] = [NAN] * vocab
    rows[4] = [INF] * vocab
    return LogitCase(f"a quarter of the rows ignored, V {vocab}", rows, [1, -100, 0, 2, -1, 3, 2, 0])


CASES = [
    *(_random(f"V {v}", 3, v) for v in (1, 2, 5, 17, 33, 128, 1000)),
    *(_random(f"logits near 0, V {v}", 2, v, 0.0, 1e-3) for v in (17, 33, 1000)),
    *(_random(f"logits near -200, V {v}", 2, v, -200.0) for v in (17, 33, 1000)),
    *(_random(f"logits near +200, V {v}", 2, v, 200.0) for v in (33,)),
    *(_random(f"large spread, V {v}", 4, v, 0.0, 30.0) for v in (33,)),
    *(_random(f"temperature {t}", 3, 33, temperature=t) for t in (0.5, 0.7, 2.0)),
    *(_random(f"softcap {c}", 3, 33, 0.0, 4.0, logit_softcap=c) for c in (1.0, 5.0, 30.0)),
    _random("softcap 1, logits near -50, V 17", 3, 17, -50.0, 1.0, logit_softcap=1.0),
    _random("softcap and temperature", 3, 33, 0.0, 4.0, logit_softcap=5.0, temperature=0.7),
    *(_peaked(v) for v in (17, 1000)),
    *(_likely_and_far_from_zero(c) for c in (-200.0, 200.0)),
    *(_banned(v) for v in (5, 33)),
    *(_ignored(v) for v in (5, 33)),
    LogitCase("no rows", [], []),
    LogitCase("every row ignored", [[NAN] * 5] * 3, [-1, -100, -7]),
]


def exact(case: LogitCase, logits: Tensor) -> tuple[list[float], list[float]]:
    """(log-probabilities, entropies) of `logits`, as they were rounded to their dtype."""
    pairs = [
        oracle.token_logprob(row, y, **case.options)
        for row, y in zip(logits.double().tolist(), case.labels, strict=True)
    ]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def exact_gradient(
    case: LogitCase, logits: Tensor, grad_logprob: list[float], grad_entropy: list[float]
) -> list[list[float]]:
    """Gradient in the logits of sum(grad_logprob * log-probability + grad_entropy * entropy)."""
    return [
        oracle.token_logprob_gradient(row, y, a, b, **case.options)
        for row, y, a, b in zip(logits.double().tolist(), case.labels, grad_logprob, grad_entropy, strict=True)
    ]


def eager(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, logit_softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """What a user of plain PyTorch would write, on inputs raised to float32: the measure of the error budget."""
    x = logits.float()
    if logit_softcap is not None:
        x = logit_softcap * torch.tanh(x / logit_softcap)
    logp = torch.log_softmax(x / temperature, dim=-1)
    keep = labels >= 0
    picked = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -INF, 0.0)).sum(-1)
    return torch.where(keep, picked, 0.0), torch.where(keep, entropy, 0.0)
