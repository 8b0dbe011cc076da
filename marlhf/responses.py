"""Responses as padded tensors: what models read, which tokens are actions, and microbatches of them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

from torch import Tensor

Batch = TypeVar("Batch", bound="Responses")


@dataclass
class Responses:
    """Sampled responses, stop token included where there is one."""

    prompt_ids: Tensor  # [B, P] int64
    prompt_mask: Tensor  # [B, P] bool
    response_ids: Tensor  # [B, T] int64
    response_mask: Tensor  # [B, T] bool, from lengths
    truncated: Tensor  # [B] bool: no stop token was seen
    action_mask: Tensor  # [B, T] bool: the policy wrote the token; False on what a tool or a user put in

    @property
    def lengths(self) -> Tensor:
        """Tokens in each response, `[B]`."""
        return self.response_mask.sum(dim=1)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the models read: prompt ids and mask, response ids and mask."""
        return self.prompt_ids, self.prompt_mask, self.response_ids, self.response_mask

    def __getitem__(self: Batch, rows: Tensor | slice) -> Batch:
        return type(self)(**{entry.name: getattr(self, entry.name)[rows] for entry in fields(self)})

    def as_lists(self) -> dict[str, object]:
        """Every tensor as nested lists, for a person to look at."""
        return {entry.name: getattr(self, entry.name).tolist() for entry in fields(self)}

    def microbatches(self: Batch, size: int | None) -> Iterator[tuple[Tensor, Batch]]:
        """Row numbers and rows in parts of at most `size`, without the columns that are padding in a whole part.

        Rows of like length go together, so that little padding is left; None: all rows in one part. Lengths
        are read on the host once.
        """
        prompts, responses = self.prompt_mask.sum(dim=1), self.lengths
        order = (prompts + responses).argsort(stable=True)
        for rows in order.split(size or max(1, order.shape[0])):
            part = self[rows]
            if rows.numel():
                width = part.prompt_mask.shape[1] - int(prompts[rows].max())
                length = max(1, int(responses[rows].max()))
                part = type(part)(**{entry.name: part._trimmed(entry.name, width, length) for entry in fields(part)})
            yield rows, part

    def _trimmed(self, name: str, skipped: int, length: int) -> Tensor:
        column: Tensor = getattr(self, name)
        if column.dim() == 1:
            return column
        return column[:, skipped:] if name in ("prompt_ids", "prompt_mask") else column[:, :length]
