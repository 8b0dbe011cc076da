"""Batch arithmetic of the supervised stages, checked and told before any work starts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from marlhf.config import RewardConfig, SFTConfig
from marlhf.data import EncodedRow, epochs
from marlhf.errors import ConfigError, DataError
from marlhf.progress import console

Row = TypeVar("Row")


def check_batches(stage: SFTConfig | RewardConfig, *, key: str) -> None:
    """ConfigError for sizes that cannot work."""
    for name in ("batch_size", "epochs", "eval_every"):
        if getattr(stage, name) < 1:
            raise ConfigError(f"`{key}.{name}` is {getattr(stage, name)}; it must be at least 1")
    for name in ("microbatch_size", "max_steps"):
        value = getattr(stage, name)
        if value is not None and value < 1:
            raise ConfigError(f"`{key}.{name}` is {value}; it must be at least 1, or null")


def batches(rows: Sequence[EncodedRow], stage: SFTConfig | RewardConfig, *, seed: int) -> Iterator[list[int]]:
    """Row numbers of every optimiser step of the stage, a fresh permutation each epoch."""
    lengths = None
    if stage.group_by_length:
        lengths = [len(row.prompt_ids) + max(map(len, row.response_ids.values())) for row in rows]
    return epochs(
        len(rows), stage.batch_size, seed=seed, max_steps=stage.max_steps, epochs=stage.epochs, lengths=lengths
    )


def step_count(rows: int, stage: SFTConfig | RewardConfig) -> int:
    """Optimiser steps of the whole stage."""
    if rows == 0:
        raise DataError("no training row is left; see the counts of dropped rows above")
    return stage.max_steps or -(-rows // stage.batch_size) * stage.epochs


def microbatches(rows: Sequence[Row], size: int | None) -> Iterator[Sequence[Row]]:
    """The rows in consecutive parts of `size`; all of them when size is None."""
    size = size or max(1, len(rows))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def describe_batches(
    name: str,
    *,
    rows: int,
    held_out: int,
    counts: Mapping[str, int],
    stage: SFTConfig | RewardConfig,
    total: int,
) -> None:
    """Prints what was read and how it is divided into optimiser steps."""
    micro = stage.microbatch_size or stage.batch_size
    console.print(
        f"{name}: {rows:,} training rows, {held_out:,} held out; {total:,} optimiser steps of {stage.batch_size} rows, "
        f"{-(-stage.batch_size // micro)} backward passes of {min(micro, stage.batch_size)} each",
        highlight=False,
        markup=False,
    )
    for what, count in counts.items():
        if count:
            console.print(f"  {what.replace('_', ' ')}: {count:,}", highlight=False, markup=False)
