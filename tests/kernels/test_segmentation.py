"""The builders of macro_ids."""

import math

import pytest
import torch

from marlhf_kernels import segmentation
from tests.cases import oracle, shapes
from tests.cases.layouts import LAYOUTS, Layout

pytestmark = pytest.mark.usefixtures("backend")
NAN = math.nan


def mask_of(*rows):
    return torch.tensor(rows).bool()


MASKS = {
    "full": [[1, 1, 1, 1, 1, 1, 1]],
    "ragged": [[1, 1, 1, 1, 1], [1], [1, 1, 1]],
    "holes": [[1, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1, 1, 0]],
    "a row without actions": [[0, 0, 0], [1, 1, 1], [0]],
    "an empty row": [[1, 1], [], [1]],
    "one token": [[1]],
    "nothing": [[0]],
    "no rows": [],
    "long": [[int(i % 7 != 3) for i in range(200)], [1] * 33],
}


def laid_out(rows, layout):
    """The mask of `rows` in one layout, the layout, and its keywords."""
    laid = Layout(layout, [[0 if m else -1 for m in row] for row in rows])
    return laid.lay(rows, 0.0).bool(), laid


def check(builder, exact, layout, *fields):
    """A builder against the loop oracle on every mask: int32, -1 outside, and valid in its own layout."""
    for name, rows in MASKS.items():
        mask, laid = laid_out(rows, layout)
        ids = builder(mask, *(laid.lay(f(rows), NAN if f is not _ends else 1.0) for f in fields), **laid.keywords)
        assert ids.dtype == torch.int32, name
        assert ids.shape == mask.shape, name
        want = [exact(row, *(f(rows)[b] for f in fields)) for b, row in enumerate(rows)]
        assert laid.rows(ids) == want, name
        assert (laid.outside(ids) == -1).all(), name
        segmentation.validate(ids, **laid.keywords)


def _ends(rows):
    return [[float((3 * t + b) % 4 == 0) for t in range(len(row))] for b, row in enumerate(rows)]


def test_fixed_by_hand():
    """n = 2 over six places with a hole: 0 0 - 1 1 2; the count steps over holes and restarts in each row."""
    mask = mask_of([1, 1, 0, 1, 1, 1], [0, 0, 1, 0, 1, 1])
    ids = segmentation.fixed_ngram(mask, 2)
    assert ids.tolist() == [[0, 0, -1, 1, 1, 2], [-1, -1, 0, -1, 0, 1]]
    assert ids.dtype == torch.int32


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 100, math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fixed_oracle(n, layout):
    """Every n, in every layout, equals the loop."""
    check(lambda mask, **kw: segmentation.fixed_ngram(mask, n, **kw), lambda row: oracle.fixed_ngram(row, n), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_and_whole(layout):
    """`token` is fixed n = 1, `whole` is n = inf."""
    check(segmentation.token, lambda row: oracle.fixed_ngram(row, 1), layout)
    check(segmentation.whole, lambda row: oracle.fixed_ngram(row, math.inf), layout)


@pytest.mark.parametrize("n", [0, -1, 0.5, 2.5, math.nan, -math.inf])
def test_fixed_refuses(n):
    """n is a whole number >= 1 or math.inf."""
    with pytest.raises((ValueError, TypeError), match="n"):
        segmentation.fixed_ngram(mask_of([1, 1]), n)


@pytest.mark.parametrize("builder", [segmentation.token, segmentation.whole, lambda m: segmentation.fixed_ngram(m, 3)])
def test_masks_must_be_bool(builder):
    """A float or integer mask is refused: 0/1 integers are too easily ids."""
    with pytest.raises((TypeError, ValueError), match="bool"):
        builder(torch.ones(2, 3))


@pytest.mark.parametrize("ids", shapes.BY_HAND.values(), ids=shapes.BY_HAND.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_strides(ids, layout):
    """A strided mask gives what its contiguous copy gives."""
    laid = Layout(layout, ids)
    mask = laid.lay([[float(k >= 0) for k in row] for row in ids], 0.0).bool()
    doubled = torch.stack((mask, ~mask), dim=-1).flatten(-2)[..., ::2]
    assert doubled.shape == mask.shape
    assert (
        segmentation.fixed_ngram(doubled, 2, **laid.keywords).tolist()
        == segmentation.fixed_ngram(mask, 2, **laid.keywords).tolist()
    )
