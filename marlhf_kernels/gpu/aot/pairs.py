"""A few combinations of many options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Settings in which every two options of two axes meet at least once; always the same ones."""
    names = list(axes)
    open_pairs = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }  # a dictionary keeps its order
    settings = []
    while open_pairs:
        chosen = dict(next(iter(open_pairs)))
        for name in names:
            if name not in chosen:
                met = [
                    sum(_pair(names, (name, option), other) in open_pairs for other in chosen.items())
                    for option in range(len(axes[name]))
                ]
                chosen[name] = met.index(max(met))
        for pair in combinations(((name, chosen[name]) for name in names), 2):
            open_pairs.pop(pair, None)
        settings.append({name: axes[name][chosen[name]] for name in names})
    return settings


def _pair(names: list[str], a: tuple[str, int], b: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)
