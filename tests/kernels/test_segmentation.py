"""The builders of macro_ids."""

import math
import random

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases import oracle, shapes
from tests.cases.layouts import LAYOUTS, Layout
from tests.cases.recorder import RecordOps

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
    """A builder against the loop oracle on every mask: int32, -1 outside, and valid in its own layout.

    `fields` are functions from the mask's rows to rows of what else the builder takes, and the tensor's type.
    """
    for name, rows in MASKS.items():
        mask, laid = laid_out(rows, layout)
        more = [f(rows) for f, _ in fields]
        tensors = [
            laid.lay(x, NAN if dtype != torch.bool else 1.0).to(dtype)
            for x, (_, dtype) in zip(more, fields, strict=True)
        ]
        ids = builder(mask, *tensors, **laid.keywords)
        assert ids.dtype == torch.int32, name
        assert ids.shape == mask.shape, name
        want = [exact(row, *(x[b] for x in more)) for b, row in enumerate(rows)]
        assert laid.rows(ids) == want, name
        assert (laid.outside(ids) == -1).all(), name
        segmentation.validate(ids, **laid.keywords)


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


def test_a_true_mask_past_the_last_sequence():
    """What stands past cu_seqlens[-1] is no token, whatever the mask says there."""
    mask, keywords = torch.ones(7).bool(), {"cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32)}
    past = [-1, -1]
    assert segmentation.fixed_ngram(mask, 2, **keywords).tolist() == [0, 0, 1, 0, 0, *past]
    assert segmentation.from_ends(mask, mask, **keywords).tolist() == [0, 1, 2, 0, 1, *past]
    assert segmentation.from_lengths(mask, [[1, 2], [2]], **keywords).tolist() == [0, 1, 1, 0, 0, *past]
    rising = -torch.tensor([1.0, 2.0, 2.0, 1.0, 4.0, 8.0, NAN])
    for rule in ("running_mean", "neighbour"):
        assert segmentation.perplexity(mask, rising, rule=rule, **keywords).tolist() == [0, 1, 1, 0, 1, *past]


def random_logprobs(seed, values=None, poison=True):
    """Rows of log-probabilities for a mask, exact in float32, poison where it is False."""

    def rows_for(rows):
        rng = random.Random(seed)
        out = [[oracle.float32(-rng.choice(values) if values else -abs(rng.gauss(0, 2))) for _ in row] for row in rows]
        return [
            [v if m or not poison else NAN for v, m in zip(*pair, strict=True)] for pair in zip(out, rows, strict=True)
        ]

    return rows_for


def test_perplexity_by_hand():
    """nll 1 2 1 1 5 1: 2 > 1 opens; 1 and 1 lower the mean; 5 > 4/3 opens; 1 does not."""
    ref = -torch.tensor([[1.0, 2.0, 1.0, 1.0, 5.0, 1.0]])
    assert segmentation.perplexity(torch.ones(1, 6).bool(), ref).tolist() == [[0, 1, 1, 1, 2, 2]]


def test_neighbour_by_hand():
    """nll 1 2 1 1 5 1: a token above the one before it opens: 2 and 5."""
    ref = -torch.tensor([[1.0, 2.0, 1.0, 1.0, 5.0, 1.0]])
    ids = segmentation.perplexity(torch.ones(1, 6).bool(), ref, rule="neighbour")
    assert ids.tolist() == [[0, 1, 1, 1, 2, 2]]
    ref = -torch.tensor([[5.0, 1.0, 2.0]])
    mask = torch.ones(1, 3).bool()
    # Against the running mean 3 the 2 does not open, against its neighbour 1 it does.
    assert segmentation.perplexity(mask, ref).tolist() == [[0, 0, 0]]
    assert segmentation.perplexity(mask, ref, rule="neighbour").tolist() == [[0, 0, 1]]


def test_perplexity_ties_stay():
    """Strictly greater opens: equal numbers are one macro action, under both rules."""
    ref = torch.full((1, 40), -2.0)
    for rule in ("running_mean", "neighbour"):
        assert not segmentation.perplexity(torch.ones(1, 40).bool(), ref, rule=rule).any()


def test_perplexity_steps_over_holes():
    """A hole neither opens nor enters the mean; what stands there is not used."""
    ref = -torch.tensor([[1.0, NAN, 0.5, NAN, 3.0]])
    for rule in ("running_mean", "neighbour"):
        ids = segmentation.perplexity(mask_of([1, 0, 1, 0, 1]), ref, rule=rule)
        assert ids.tolist() == [[0, -1, 0, -1, 1]]


@pytest.mark.parametrize("rule", ["running_mean", "neighbour"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", [None, [0.1], [0.1, 0.3, 0.7], [1.0, 1.0 + 2.0**-23]])
def test_perplexity_oracle(rule, layout, values):
    """Equal ids to the loop whose sums are rounded to float32 in order, on ties too."""
    for seed in range(5):
        check(
            lambda mask, ref, **kw: segmentation.perplexity(mask, ref, rule=rule, **kw),
            lambda row, ref: oracle.perplexity(row, ref, rule),
            layout,
            (random_logprobs(seed, values), torch.float32),
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_perplexity_of_other_types(dtype):
    """Any floating type is read as float32, so that equal inputs give equal ids."""
    mask = torch.ones(3, 50).bool()
    ref = torch.tensor(random_logprobs(1)([[1] * 50] * 3)).to(dtype)
    assert torch.equal(segmentation.perplexity(mask, ref), segmentation.perplexity(mask, ref.float()))


def test_perplexity_refuses():
    """Unknown rules (with the known ones), other shapes, integer log-probabilities."""
    mask = torch.ones(1, 3).bool()
    with pytest.raises(ValueError, match=r"rule.*mean_mean.*running_mean.*neighbour"):
        segmentation.perplexity(mask, torch.zeros(1, 3), rule="mean_mean")
    with pytest.raises(ValueError, match="ref_logprobs"):
        segmentation.perplexity(mask, torch.zeros(1, 4))
    with pytest.raises((TypeError, ValueError), match=r"ref_logprobs.*int64"):
        segmentation.perplexity(mask, torch.zeros(1, 3).long())


def _ends(rows):
    return [[float((3 * t + b) % 4 == 0) for t in range(len(row))] for b, row in enumerate(rows)]


def test_from_ends_by_hand():
    """A flag closes its macro action; the tail is one too; flags on masked places are nothing."""
    mask = mask_of([1, 1, 0, 1, 1, 1])
    assert segmentation.from_ends(mask, mask_of([0, 1, 1, 0, 1, 0])).tolist() == [[0, 0, -1, 1, 1, 2]]
    assert segmentation.from_ends(mask, mask_of([0, 0, 1, 0, 0, 0])).tolist() == [[0, 0, -1, 0, 0, 0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_ends_oracle(layout):
    """Equal to the loop in every layout."""
    check(segmentation.from_ends, oracle.from_ends, layout, (_ends, torch.bool))


def test_from_ends_refuses():
    """Ends of another shape or type."""
    mask = torch.ones(1, 3).bool()
    with pytest.raises(ValueError, match="ends"):
        segmentation.from_ends(mask, torch.ones(1, 4).bool())
    with pytest.raises((TypeError, ValueError), match=r"ends.*float32"):
        segmentation.from_ends(mask, torch.ones(1, 3))


def _lengths(row):
    """Lengths 1, 2, 3, ... that fill the row's action tokens."""
    left, out = sum(row), []
    while left:
        out.append(min(len(out) + 1, left))
        left -= out[-1]
    return out


def test_from_lengths_by_hand():
    """Lengths count action tokens, holes are stepped over; lists and a filled-up tensor are the same."""
    mask = mask_of([1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1])
    want = [[0, -1, 0, 1, 1, 1], [-1, -1, -1, -1, -1, 0]]
    assert segmentation.from_lengths(mask, [[2, 3], [1]]).tolist() == want
    assert segmentation.from_lengths(mask, torch.tensor([[2, 3], [1, 0]], dtype=torch.int32)).tolist() == want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_from_lengths_oracle(layout, as_tensor):
    """Equal to the loop in every layout, and lengths come back from macro_lengths."""
    for rows in MASKS.values():
        mask, laid = laid_out(rows, layout)
        lengths = [_lengths(row) for row in rows]
        widest = max((len(x) for x in lengths), default=0)
        filled = [x + [0] * (widest - len(x)) for x in lengths]
        given = torch.tensor(filled, dtype=torch.int32).reshape(len(rows), widest) if as_tensor else lengths
        ids = segmentation.from_lengths(mask, given, **laid.keywords)
        assert laid.rows(ids) == [oracle.from_lengths(row, x) for row, x in zip(rows, lengths, strict=True)]
        assert (laid.outside(ids) == -1).all()
        assert mk.macro_lengths(ids, **laid.keywords).tolist() == filled


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ([[1, 1], [1, 1]], "3"),
        ([[1, 3], [2]], "3"),
        ([[3], [1, 1], [1]], "length"),
        ([[3]], "length"),
        ([[4, -1], [2]], "length"),
        (torch.tensor([[3, 0], [1, 0]], dtype=torch.int32), "2"),
        (torch.tensor([[0, 3], [2, 0]], dtype=torch.int32), "length"),
        (torch.tensor([[3.0], [2.0]]), "float32"),
        ([[2.5, 0.5], [2]], "length"),
        (3, "lengths"),
    ],
    ids=str,
)
def test_from_lengths_refuses(lengths, match):
    """Sums that do not match the row's action tokens, other numbers of rows, lengths below 1, other types."""
    with pytest.raises((ValueError, TypeError), match=match):
        segmentation.from_lengths(mask_of([1, 1, 1, 0], [1, 1, 0, 0]), lengths)


def test_isolate_last_by_hand():
    """The last action token leaves its macro action, unless it is alone already; a masked row has none."""
    ids = torch.tensor([[0, 0, 1, -1, 1], [0, 1, -1, -1, -1], [-1] * 5, [0, -1, -1, -1, -1]], dtype=torch.int64)
    out = segmentation.isolate_last(ids)
    assert out.dtype == torch.int32
    assert out.tolist() == [[0, 0, 1, -1, 2], [0, 1, -1, -1, -1], [-1] * 5, [0, -1, -1, -1, -1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_isolate_last_oracle(layout):
    """Equal to the loop on every shape and layout, valid, and a second time changes nothing."""
    for ids in [*shapes.BY_HAND.values(), shapes.random_rows(6, 20)]:
        laid = Layout(layout, ids)
        out = segmentation.isolate_last(laid.macro_ids(), **laid.keywords)
        assert laid.rows(out) == [[max(k, -1) for k in oracle.isolate_last(row)] for row in ids]
        assert (laid.outside(out) == -1).all()
        segmentation.validate(out, **laid.keywords)
        assert torch.equal(segmentation.isolate_last(out, **laid.keywords), out)


@pytest.mark.parametrize("grid", ["interpreter", "edge", pytest.param("production", marks=pytest.mark.slow)])
def test_oracle_grids(grid, backend):
    """Every builder with an oracle, around the borders of tile sizes and at a trainer's sizes."""
    if grid not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the {grid} grid")
    for rows, length in shapes.GRIDS[grid]:
        ids = shapes.random_rows(rows, length)
        chosen = [[int(k >= 0) for k in row] for row in ids]
        laid = Layout("packed" if length % 2 else "mixed", ids)
        mask = laid.lay(chosen, 0.0).bool()
        ref = random_logprobs(length)(chosen)
        results = {
            "fixed": segmentation.fixed_ngram(mask, 3, **laid.keywords),
            "ends": segmentation.from_ends(mask, laid.lay(_ends(chosen), 0.0).bool(), **laid.keywords),
            "perplexity": segmentation.perplexity(mask, laid.lay(ref, NAN, torch.float32), **laid.keywords),
            "isolated": segmentation.isolate_last(laid.macro_ids(), **laid.keywords),
        }
        want = {
            "fixed": [oracle.fixed_ngram(row, 3) for row in chosen],
            "ends": [oracle.from_ends(row, e) for row, e in zip(chosen, _ends(chosen), strict=True)],
            "perplexity": [oracle.perplexity(row, x, "running_mean") for row, x in zip(chosen, ref, strict=True)],
            "isolated": [oracle.isolate_last(row) for row in ids],
        }
        for name, got in results.items():
            assert laid.rows(got) == want[name], f"{name} {rows}x{length}"


def runs(row):
    """Lengths of the macro actions of a row of ids."""
    return [len(x) for x in oracle.groups(row)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_randomized_draws_each_length_its_number_of_times(layout):
    """Lengths 2, 3, 5, 10, each 3 times, in any order, and what is beyond their sum of 60 is one macro action."""
    rows = [[1] * 75, [1] * 60, [int(t % 3 != 1) for t in range(120)], [1] * 7, []]
    mask, laid = laid_out(rows, layout)
    ids = segmentation.randomized_ngram(mask, generator=torch.Generator().manual_seed(0), **laid.keywords)
    assert ids.dtype == torch.int32
    segmentation.validate(ids, **laid.keywords)
    lengths = [runs([int(k) for k in row]) for row in laid.rows(ids)]
    full = sorted([2, 3, 5, 10] * 3)
    assert sorted(lengths[0][:-1]) == full
    assert lengths[0][-1] == 15
    assert sorted(lengths[1]) == full
    assert sorted(lengths[2][:-1]) == full
    assert lengths[2][-1] == 20
    assert sum(lengths[3]) == 7
    assert all(n in (2, 3, 5, 10) for n in lengths[3][:-1])
    assert lengths[4] == []


def test_randomized_own_lengths_and_repeats():
    """lengths=(1, 4), repeats=2 over 12 tokens: 1, 1, 4, 4 in some order and a tail of 2."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = segmentation.randomized_ngram(torch.ones(1, 12).bool(), lengths=(1, 4), repeats=2, generator=generator)
        lengths = runs(ids[0].tolist())
        assert sorted(lengths[:-1]) == [1, 1, 4, 4]
        assert lengths[-1] == 2


def test_randomized_with_one_length():
    """One length drawn once has one order: 2 of five tokens and a tail of 3; where 10 are asked of 3, there are 3."""
    ids = segmentation.randomized_ngram(torch.ones(1, 5).bool(), lengths=(2,), repeats=1)
    assert ids.tolist() == [[0, 0, 1, 1, 1]]
    ids = segmentation.randomized_ngram(torch.ones(3, 3).bool(), lengths=(10,), repeats=2)
    assert ids.tolist() == [[0, 0, 0]] * 3


def test_randomized_is_a_shuffle_per_row():
    """Rows differ, seeds differ, one seed repeats; every order of two lengths comes about equally often."""
    mask = torch.ones(400, 3).bool()

    def draw(seed):
        return segmentation.randomized_ngram(
            mask, lengths=(1, 2), repeats=1, generator=torch.Generator().manual_seed(seed)
        )

    first = draw(0)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))
    orders = [tuple(runs(row)) for row in first.tolist()]
    assert set(orders) == {(1, 2), (2, 1)}
    # 400 fair coins: six standard deviations around 200.
    assert 140 < orders.count((1, 2)) < 260


def test_randomized_does_not_depend_on_the_mask_or_layout():
    """One shuffle a row whatever its mask: padding or packing changes no other row's lengths."""
    rows = [[1] * 30, [1] * 5, [1] * 44]
    seen = []
    for layout in LAYOUTS:
        mask, laid = laid_out(rows, layout)
        ids = segmentation.randomized_ngram(mask, generator=torch.Generator().manual_seed(7), **laid.keywords)
        seen.append(laid.rows(ids))
    assert all(x == seen[0] for x in seen)
    mask = torch.ones(3, 44).bool()
    mask[0] = False
    without_first = segmentation.randomized_ngram(mask, generator=torch.Generator().manual_seed(7))
    assert without_first[2].tolist() == seen[0][2]


def test_randomized_without_a_generator_uses_the_default_one():
    """torch.manual_seed governs it."""
    mask = torch.ones(2, 70).bool()
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(segmentation.randomized_ngram(mask))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    "options",
    [{"lengths": ()}, {"lengths": (0, 2)}, {"lengths": (2, -1)}, {"lengths": (1.5,)}, {"repeats": 0}],
    ids=str,
)
def test_randomized_refuses(options):
    """No lengths, lengths below 1 or broken ones, no repeats."""
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        segmentation.randomized_ngram(torch.ones(1, 3).bool(), **options)


def test_validate_accepts_what_builders_make():
    """Valid ids pass silently, of both integer types, holes and all."""
    for ids in shapes.BY_HAND.values():
        if any(k < -1 for row in ids for k in row):
            continue
        for layout in LAYOUTS:
            laid = Layout(layout, ids)
            for dtype in (torch.int32, torch.int64):
                assert segmentation.validate(laid.macro_ids(dtype), **laid.keywords) is None


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ([1, 1, 2], 0),
        ([-1, 1, 2], 1),
        ([0, 0, 2], 2),
        ([0, 1, 0], 2),
        ([0, -1, 2, 3], 2),
        ([0, 1, -1, 0], 3),
        ([0, -2, 0], 1),
        ([0, 0, 2147483647], 2),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_validate_names_row_and_column(row, column, packed):
    """Broken ids: the message has the row and the column of the first, under both layouts."""
    good = [0, 0, 1, 1]
    if packed:
        ids = torch.tensor([*good, *row, *good], dtype=torch.int32)
        ends = [0, 4, 4 + len(row), 8 + len(row)]
        keywords = {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
    else:
        ids = torch.tensor([good, row + [-1] * (4 - len(row)), good], dtype=torch.int32)
        keywords = {}
    with pytest.raises(ValueError, match=rf"row 1\b.*column {column}\b"):
        segmentation.validate(ids, **keywords)


def test_validate_finds_the_first_of_several():
    """Two broken rows: the first is named."""
    ids = torch.tensor([[0, 0], [0, 5], [3, 3]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"row 1\b.*column 1\b"):
        segmentation.validate(ids)


@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_opcheck_builders(layout):
    """The builders that run on a device are well-made ops."""
    mask, laid = laid_out(MASKS["holes"], layout)
    ref = laid.lay(random_logprobs(0, poison=False)(MASKS["holes"]), 0.5, torch.float32)
    ends = laid.lay(_ends(MASKS["holes"]), 0.0).bool()
    with RecordOps() as recorder:
        segmentation.perplexity(mask, ref, **laid.keywords)
        segmentation.perplexity(mask, ref, rule="neighbour", **laid.keywords)
        segmentation.from_ends(mask, ends, **laid.keywords)
        segmentation.isolate_last(segmentation.fixed_ngram(mask, 3, **laid.keywords), **laid.keywords)
    assert len(recorder.calls) >= 4
    for op, args, kwargs in recorder.calls:
        torch.library.opcheck(op, args, kwargs)


def test_builders_compile():
    """perplexity, from_ends and isolate_last compile with fullgraph, and no builder's device work breaks a graph."""
    torch._dynamo.reset()

    def build(mask, ref, ends):
        return (
            segmentation.isolate_last(segmentation.perplexity(mask, ref)),
            segmentation.from_ends(mask, ends),
            segmentation.fixed_ngram(mask, 3),
        )

    mask, laid = laid_out(MASKS["holes"], "mixed")
    ref = laid.lay(random_logprobs(0)(MASKS["holes"]), NAN, torch.float32)
    ends = laid.lay(_ends(MASKS["holes"]), 0.0).bool()
    compiled = torch.compile(build, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(mask, ref, ends), build(mask, ref, ends), strict=True):
        assert torch.equal(a, b)
