"""A rollout batch of random numbers over given macro ids, for the oracle as lists and for the ops as tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.cases import oracle
from tests.cases.layouts import Layout
from tests.cases.precision import wide

TOKEN_FIELDS = (
    "logprobs", "old_logprobs", "ref_logprobs", "values", "old_values", "rewards", "advantages", "returns",
)  # fmt: skip
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Batch:
    """Fields laid out in one layout, poison wherever no action token is.

    `fields` holds the token-aligned tensors of TOKEN_FIELDS, `scores` and `bootstrap_values` [B], and `macro_x`
    [B, K]. `lists(name)` is the same numbers, rounded to the tensor's dtype, row by row.
    """

    layout: Layout
    macro_ids: Tensor
    fields: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    @property
    def ids(self) -> Sequence[Sequence[int]]:
        return self.layout.ids

    @property
    def keywords(self) -> dict[str, Tensor]:
        """`cu_seqlens` where the layout is packed."""
        return self.layout.keywords

    @property
    def mask(self) -> Tensor:
        """True on every action token."""
        return self.layout.lay([[float(0 <= k <= t) for t, k in enumerate(row)] for row in self.ids], 0.0).bool()

    def lists(self, name: str) -> list:
        x = self.fields[name]
        return self.layout.rows(x) if name in TOKEN_FIELDS else x.detach().double().tolist()

    def with_fields(self, **fields: Tensor) -> Batch:
        """The same batch with some tensors replaced."""
        return replace(self, fields={**self.fields, **fields})


def make_batch(
    ids: Sequence[Sequence[int]],
    layout: str = "right",
    dtype: torch.dtype | None = None,
    poison: float = NAN,
    seed: int = 0,
    id_dtype: torch.dtype = torch.int32,
) -> Batch:
    """Random numbers for every field, `poison` at every place that is no action token.

    The new log-probabilities and values are near the old ones, some inside the clip range and some beyond;
    a few advantages are 0. `dtype` is by default the widest of the backend.
    A row without actions has a poisoned score and bootstrap value, and the slots of
    `macro_x` that belong to no macro action are poisoned too. The numbers do not depend on layout or poison.
    """
    dtype = wide() if dtype is None else dtype
    rng = random.Random(seed)
    laid = Layout(layout, ids)
    rows: dict[str, list[list[float]]] = {name: [] for name in TOKEN_FIELDS}
    scores, bootstrap, macro_x = [], [], []
    macros = [len(oracle.groups(row)) for row in ids]
    for b, row in enumerate(ids):
        line: dict[str, list[float]] = {name: [] for name in TOKEN_FIELDS}
        for t, k in enumerate(row):
            old, value = -abs(rng.gauss(0.0, 1.5)), rng.gauss(0.0, 1.0)
            numbers = {
                "old_logprobs": old,
                "logprobs": old + rng.gauss(0.0, 0.3),
                "ref_logprobs": old + rng.gauss(0.0, 0.3),
                "old_values": value,
                "values": value + rng.gauss(0.0, 0.3),
                "rewards": rng.gauss(0.0, 1.0),
                "advantages": 0.0 if rng.random() < 0.1 else rng.gauss(0.0, 1.0),
                "returns": rng.gauss(0.0, 1.0),
            }
            for name in TOKEN_FIELDS:
                line[name].append(numbers[name] if 0 <= k <= t else poison)
        for name in TOKEN_FIELDS:
            rows[name].append(line[name])
        score, end = rng.gauss(0.0, 2.0), rng.gauss(0.0, 1.0)
        scores.append(score if macros[b] else poison)
        bootstrap.append(end if macros[b] else poison)
        macro_x.append([rng.gauss(0.0, 1.0) if k < macros[b] else poison for k in range(max(macros))])
    fields = {name: laid.lay(rows[name], poison, dtype) for name in TOKEN_FIELDS}
    fields["scores"] = torch.tensor(scores, dtype=dtype)
    fields["bootstrap_values"] = torch.tensor(bootstrap, dtype=dtype)
    fields["macro_x"] = torch.tensor(macro_x, dtype=dtype).reshape(len(ids), max(macros, default=0))
    return Batch(laid, laid.macro_ids(id_dtype), fields)


def upstream(x: Tensor, seed: int = 1) -> Tensor:
    """A gradient to send into output `x`: different in every place, none of them 0 or 1."""
    rng = random.Random(seed)
    return torch.tensor([rng.gauss(0.0, 1.0) for _ in range(x.numel())], dtype=x.dtype).reshape(x.shape)
