"""Batch arithmetic of the supervised stages, checked and told before any work starts."""

from collections.abc import Iterator, Mapping, Sequence

from marlhf.config import RewardConfig, SFTConfig
from marlhf.data import EncodedRow
from marlhf.errors import ConfigError, DataError
from marlhf.progress import console


def check_batches(stage: SFTConfig | RewardConfig, *, key: str) -> None:
    """ConfigError for sizes that cannot work."""
    for name in ("batch_size", "epochs", "eval_every"):
        if getattr(stage, name) < 1:
            raise ConfigError(f"`{key}.{name}` is {getattr(stage, name)}; it must be at least 1")
    if stage.eval_rows < 0:
        raise ConfigError(f"`{key}.eval_rows` is {stage.eval_rows}; it must be at least 0")
    for name in ("microbatch_size", "max_steps"):
        value = getattr(stage, name)
        if value is not None and value < 1:
            raise ConfigError(f"`{key}.{name}` is {value}; it must be at least 1, or null")


def longest(*parts: Sequence[EncodedRow]) -> int:
    """Tokens of the longest prompt with one of its responses."""
    rows = (row for part in parts for row in part)
    return max((len(row.prompt_ids) + max(map(len, row.response_ids.values())) for row in rows), default=0)


def step_count(rows: int, stage: SFTConfig | RewardConfig) -> int:
    """Optimiser steps of the whole stage."""
    if rows == 0:
        raise DataError("no training row is left; see the counts of dropped rows above")
    return stage.max_steps or -(-rows // stage.batch_size) * stage.epochs


def microbatches(rows: Sequence[EncodedRow], size: int | None) -> Iterator[Sequence[EncodedRow]]:
    """The rows of one optimiser step in parts of `size`, rows of like length together; None: all in one part."""
    size = size or max(1, len(rows))
    ordered = sorted(rows, key=lambda row: len(row.prompt_ids) + max(map(len, row.response_ids.values())))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


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
