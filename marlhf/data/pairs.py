"""Preference pairs from prompts with one good response each: the worse response is made in a known way."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marlhf.data.encoding import EncodedRow

KINDS = ("other", "shuffled", "truncated", "sample")
"""How a rejected response comes about: another prompt's response; the words in another order; the first 30-70%
of the words; what a policy wrote for the prompt."""

DEFAULT_WEIGHTS = {"other": 3.0, "shuffled": 1.0, "truncated": 1.0, "sample": 1.0}
"""Half of the pairs teach what belongs to the prompt, which is harder to learn than fluent text."""

_KEPT_PERCENT = (30, 70)
_WORD = re.compile(r"\S+")


def make_pairs(
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    samples: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> list[dict[str, str]]:
    """One pair {"prompt", "chosen", "rejected", "kind"} per row with a `prompt` and a `response`, in their order.

    samples: for the kind `sample`, what a policy wrote for each row's prompt; None leaves the kind out.
    weights: relative shares of the kinds, those not named getting none; None: `DEFAULT_WEIGHTS`. The shares
    are met to one pair, except where rows do not allow a kind: a single word has no other order. A row that
    allows none of the kinds gives no pair.

    chosen and rejected always differ, and `other` never takes a response from an equal prompt. The pairs are a
    function of the arguments. Raises ValueError for unknown kinds, weights that are negative or all 0, and
    samples that are missing or not one per row.
    """
    shares = _shares(weights, samples is not None)
    if samples is not None and len(samples) != len(rows):
        raise ValueError(f"{len(samples)} samples for {len(rows)} rows; there must be one per row")
    generator = random.Random(seed)
    makers: dict[str, Callable[[int], str | None]] = {
        "other": lambda index: _other(rows, index, generator),
        "shuffled": lambda index: _shuffled(rows[index]["response"], generator),
        "truncated": lambda index: _truncated(rows[index]["response"], generator),
        "sample": lambda index: _usable(samples[index] if samples else "", rows[index]["response"]),
    }
    order = list(range(len(rows)))
    generator.shuffle(order)
    made = dict.fromkeys(shares, 0)
    pairs: dict[int, dict[str, str]] = {}
    for index in order:
        # The kind that is furthest behind its share comes first, so that a kind that a row does not allow is
        # made up for by the next row.
        due = sorted(shares, key=lambda kind: made[kind] - shares[kind] * (len(pairs) + 1))
        for kind in due:
            rejected = makers[kind](index)
            if rejected is not None:
                row = rows[index]
                made[kind] += 1
                pairs[index] = {
                    "prompt": row["prompt"],
                    "chosen": row["response"],
                    "rejected": rejected,
                    "kind": kind,
                }
                break
    return [pairs[index] for index in sorted(pairs)]


def drop_equal_pairs(rows: Sequence[EncodedRow]) -> tuple[list[EncodedRow], int]:
    """(pairs whose chosen and rejected ids differ, how many did not): cutting to length can make them equal."""
    kept = [row for row in rows if row.response_ids["chosen"] != row.response_ids["rejected"]]
    return kept, len(rows) - len(kept)


def _shares(weights: Mapping[str, float] | None, have_samples: bool) -> dict[str, float]:
    if weights is None:
        weights = {kind: weight for kind, weight in DEFAULT_WEIGHTS.items() if have_samples or kind != "sample"}
    unknown = [kind for kind in weights if kind not in KINDS]
    if unknown:
        raise ValueError(f"unknown kinds {', '.join(unknown)}; known: {', '.join(KINDS)}")
    if min(weights.values(), default=0.0) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"weights must not be negative, and one must be above 0: {dict(weights)}")
    if weights.get("sample", 0) > 0 and not have_samples:
        raise ValueError("pairs of the kind `sample` need samples")
    total = sum(weights.values())
    return {kind: weights[kind] / total for kind in KINDS if weights.get(kind, 0) > 0}


def _usable(text: str, chosen: str) -> str | None:
    return text if text.strip() and text.split() != chosen.split() else None


def _other(rows: Sequence[Mapping[str, Any]], index: int, generator: random.Random) -> str | None:
    start = generator.randrange(len(rows))
    for step in range(len(rows)):
        candidate = rows[(start + step) % len(rows)]
        if candidate["prompt"] != rows[index]["prompt"]:
            text = _usable(candidate["response"], rows[index]["response"])
            if text is not None:
                return text
    return None


def _shuffled(text: str, generator: random.Random) -> str | None:
    """The words in another order, the white space between them as it was."""
    words = _WORD.findall(text)
    if len(set(words)) < 2:
        return None
    shuffled = words.copy()
    while shuffled == words:
        generator.shuffle(shuffled)
    replacements = iter(shuffled)
    return _WORD.sub(lambda _: next(replacements), text)


def _truncated(text: str, generator: random.Random) -> str | None:
    """The first words, from 30% to 70% of them and at least one."""
    ends = [word.end() for word in _WORD.finditer(text)]
    if len(ends) < 2:
        return None
    fewest = -(-_KEPT_PERCENT[0] * len(ends) // 100)
    most = _KEPT_PERCENT[1] * len(ends) // 100
    return text[: ends[generator.randint(fewest, most) - 1]]
