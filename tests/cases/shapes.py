"""Macro-action ids to try every op on: by hand the shapes that break code, at random the rest.

A case is a list of rows (sequences) of ids; -1 is no action. `GRIDS` names sizes by what can run them:
`interpreter` is small enough for a GPU kernel run by Triton's interpreter, `edge` sits on the borders of
tiles, `production` is what a trainer sends.
"""

from __future__ import annotations

import random

IdRows = list[list[int]]

BY_HAND: dict[str, IdRows] = {
    "one macro action a row": [[0, 0, 0, 0], [0, 0]],
    "every token its own": [[0, 1, 2, 3], [0], [0, 1, 2]],
    "ragged": [[0, 0, 0, 1, 1, 2], [0, 1, 1], [0, 0, 0, 0, 0, 0, 0]],
    "holes between macro actions": [[0, 0, -1, -1, 1, 1, 1], [0, -1, 1, -1, 2]],
    "holes inside macro actions": [[0, -1, 0, 0, 1, -1, -1, 1], [0, -1, -1, -1, 0]],
    "prompt in front": [[-1, -1, -1, 0, 0, 1], [-1, 0]],
    "tail masked": [[0, 0, 1, -1, -1], [0, -1, -1, -1, -1]],
    "a row without actions among others": [[-1, -1, -1], [0, 0, 1], [-1, -1, -1]],
    "no action at all": [[-1, -1], [-1, -1, -1]],
    "one token": [[0]],
    "one masked token": [[-1]],
    "an empty row among others": [[0, 0, 1], [], [0]],
    "no rows": [],
    "any negative id is no action": [[-2, 0, -7, 0, 1], [-2147483648, 0]],
}

# An id above its own position cannot be an action; the position counts from the start of the tensor's row or of
# the packed sequence, so this case is for layouts that put a row there.
ABOVE_POSITION: IdRows = [[1, 0, 0, 7, 1, 9], [5, 0, 0, 1, 2147483647, 1], [3]]
FROM_THE_START = ("right", "packed", "packed with a tail")

# Lengths around the borders of scan and tile sizes.
EDGE_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 257)

GRIDS: dict[str, list[tuple[int, int]]] = {
    "interpreter": [(1, 1), (2, 3), (3, 17), (5, 33)],
    "edge": [(1 + t % 3, t) for t in EDGE_LENGTHS] + [(1, 1000), (70, 3)],
    "production": [(64, 512), (8, 2048), (1, 16384)],
}


def random_row(rng: random.Random, length: int, longest: int = 6, holes: float = 0.2) -> list[int]:
    """A row of `length` places: macro actions of 1 to `longest` tokens, holes anywhere with this chance."""
    ids, k, left = [], -1, 0
    for _ in range(length):
        if rng.random() < holes:
            ids.append(-1)
            continue
        if left == 0:
            k, left = k + 1, rng.randint(1, longest)
        ids.append(k)
        left -= 1
    return ids


def random_rows(rows: int, length: int, seed: int = 0) -> IdRows:
    """`rows` ragged rows, the first of them exactly `length` long."""
    rng = random.Random(1000 * seed + 10 * rows + length)
    longest = rng.choice((1, 3, 6, max(1, length)))
    return [
        random_row(rng, length if b == 0 else rng.randint(0, length), longest, rng.choice((0.0, 0.2, 0.6)))
        for b in range(rows)
    ]
