"""macro_reduce, macro_broadcast, macro_lengths."""

import math

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import calls, oracle, shapes
from tests.cases.batches import make_batch
from tests.cases.checks import check_call, check_everywhere
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.layouts import LAYOUTS, PADDED
from tests.cases.precision import wide
from tests.cases.tensors import ids_of, numbers

pytestmark = pytest.mark.usefixtures("backend")
NAN = math.nan

IDS = [0, 0, 0, 1, -1, 1]
X = [1.0, 2.0, 4.0, 8.0, NAN, 16.0]


@pytest.mark.parametrize(
    ("weights", "discount", "expected"),
    [
        ("sum", 1.0, [7.0, 24.0]),
        ("discounted_sum", 0.5, [1 + 1 + 1, 8 + 8]),
        ("mean", 1.0, [7 / 3, 12.0]),
        ("first", 1.0, [1.0, 8.0]),
        ("last", 1.0, [4.0, 16.0]),
        # 1/3, 1/2, 1 over 11/6: 2/11, 3/11, 6/11; and 1/2, 1 over 3/2
        ("position", 1.0, [(2 * 1 + 3 * 2 + 6 * 4) / 11, (8 + 2 * 16) / 3]),
        ("position_reversed", 1.0, [(6 * 1 + 3 * 2 + 2 * 4) / 11, (2 * 8 + 16) / 3]),
    ],
)
def test_reduce_by_hand(weights, discount, expected):
    """Each weight on macro actions of 3 and 2 tokens, the hole inside the second skipped: numbers by hand."""
    assert_close(mk.macro_reduce(numbers(X), ids_of(IDS), weights=weights, discount=discount), [expected])


@pytest.mark.parametrize(("weights", "place"), [("first", 0), ("last", 2), ("discounted_sum", 0)])
def test_a_weight_of_zero_reads_nothing(weights, place):
    """A token of weight 0 adds nothing, not even the NaN of 0 * inf."""
    x = [math.inf, -math.inf, NAN]
    x[place] = 5.0
    discount = 0.0 if weights == "discounted_sum" else 1.0
    out = mk.macro_reduce(numbers(x), ids_of([0, 0, 0]), weights=weights, discount=discount)
    assert out.tolist() == [[5.0]]


def test_reduce_is_a_sum_by_default():
    """The default weight is the sum."""
    assert_close(mk.macro_reduce(numbers(X), ids_of(IDS)), [[7.0, 24.0]])


def test_broadcast_by_hand():
    """Each action token gets its macro action's number, a masked place 0."""
    out = mk.macro_broadcast(torch.tensor([[5.0, 7.0]], dtype=wide()), ids_of(IDS))
    assert_close(out, [[5.0, 5.0, 5.0, 7.0, 0.0, 7.0]])


def test_lengths_by_hand():
    """Lengths count action tokens and are int32; shorter rows are padded with 0."""
    ids = torch.tensor([[0, 0, -1, 0, 1, 2], [-1, 0, -1, -1, -1, 0]], dtype=torch.int32)
    out = mk.macro_lengths(ids)
    assert out.dtype == torch.int32
    assert out.tolist() == [[3, 1, 1], [2, 0, 0]]


@pytest.mark.parametrize("call", [*calls.REDUCE, calls.BROADCAST, *calls.LENGTHS], ids=str)
def test_oracle_by_hand_shapes(call):
    """Values and gradients equal the loop oracle on every hand-made shape, in every layout."""
    check_everywhere(call)


@pytest.mark.parametrize("call", [*calls.REDUCE, calls.BROADCAST, *calls.LENGTHS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_oracle_types(call, dtype):
    """Low precisions in, float32 accumulation, gradients in the input's type."""
    rows = [row for ids in shapes.BY_HAND.values() for row in ids]
    for layout in LAYOUTS:
        check_call(call, make_batch(rows, layout, dtype), "all shapes")


@pytest.mark.parametrize(
    "call", [c for c in [*calls.REDUCE, calls.BROADCAST, calls.LENGTHS[0]] if "num_macros" not in str(c)], ids=str
)
@pytest.mark.parametrize("grid", ["interpreter", "edge", pytest.param("production", marks=pytest.mark.slow)])
def test_oracle_grids(call, grid, backend):
    """Values and gradients equal the loop oracle around the borders of tile sizes, and at a trainer's sizes."""
    if grid not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the {grid} grid")
    for rows, length in shapes.GRIDS[grid]:
        for layout in ("mixed", "packed"):
            check_call(call, make_batch(shapes.random_rows(rows, length), layout, torch.float32), f"{rows}x{length}")


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_ids_of_both_integer_types(id_dtype):
    """int64 ids give what int32 ids give."""
    for call in (calls.REDUCE[0], calls.BROADCAST, calls.LENGTHS[0]):
        check_call(call, make_batch(shapes.BY_HAND["ragged"], "mixed", id_dtype=id_dtype), str(id_dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sum_and_broadcast_are_each_others_gradient(layout):
    """<macro_reduce(x), y> = <x, macro_broadcast(y)>, and each op's backward is the other op, bit for bit."""
    batch = make_batch(shapes.BY_HAND["holes inside macro actions"], layout, poison=0.25)
    x = batch["values"].clone().requires_grad_()
    y = batch["macro_x"].clone().requires_grad_()
    reduced = mk.macro_reduce(x, batch.macro_ids, weights="sum", **batch.keywords)
    spread = mk.macro_broadcast(y, batch.macro_ids, **batch.keywords)
    reduced.backward(y.detach())
    spread.backward(x.detach())
    assert_same_bits(x.grad, spread.detach())
    assert_same_bits(y.grad, reduced.detach())
    assert_close((reduced * y).sum(), (x * spread).sum())


@pytest.mark.parametrize("weights", oracle.VALUE_WEIGHTS)
def test_value_weights_sum_to_one(weights):
    """A constant value stays the same under every value weight, whatever the length."""
    ids = torch.tensor([[0, *[1] * 2, *[2] * 3, *[3] * 7, *[4] * 50]], dtype=torch.int32)
    out = mk.macro_reduce(torch.full(ids.shape, 0.7, dtype=wide()), ids, weights=weights)
    assert_close(out, [[0.7] * 5])


def test_position_grows_toward_the_last_token():
    """`position` weighs the last token n times the first, `position_reversed` the other way round."""
    n = 6
    ids = torch.zeros(1, n, dtype=torch.int32)
    for weights, first, last in (("position", 1 / n, 1.0), ("position_reversed", 1.0, 1 / n)):
        x = torch.zeros(1, n, dtype=wide(), requires_grad=True)
        mk.macro_reduce(x, ids, weights=weights).sum().backward()
        sigma = x.grad[0].tolist()
        assert_close([sigma[0] / sigma[-1]], [first / last])


def test_discounted_sum_with_discount_one_is_the_sum():
    """rho = 1 is `sum`; rho = 0 is `first`."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    x, ids = batch["values"], batch.macro_ids
    assert_close(mk.macro_reduce(x, ids, weights="discounted_sum"), mk.macro_reduce(x, ids, weights="sum"))
    zero = mk.macro_reduce(x, ids, weights="discounted_sum", discount=0.0)
    assert_close(zero, mk.macro_reduce(x, ids, weights="first"))


def test_discount_may_be_a_tensor():
    """discount as a 0-d tensor gives what the number gives."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    a, b = (
        mk.macro_reduce(batch["values"], batch.macro_ids, weights="discounted_sum", discount=d)
        for d in (0.9, torch.tensor(0.9, dtype=wide()))
    )
    assert_close(a, b)


def test_num_macros_pads_with_zero():
    """K is max(id) + 1 unless given; places beyond a row's macro actions are 0."""
    ids = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32)
    x = torch.ones(2, 2, dtype=wide())
    assert mk.macro_reduce(x, ids).tolist() == [[1.0, 1.0], [2.0, 0.0]]
    assert mk.macro_reduce(x, ids, num_macros=4).tolist() == [[1.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    assert mk.macro_lengths(ids, num_macros=3).tolist() == [[1, 1, 0], [2, 0, 0]]
    none = torch.full((2, 3), -1, dtype=torch.int32)
    assert mk.macro_reduce(torch.ones(2, 3), none).shape == (2, 0)
    assert mk.macro_lengths(none).shape == (2, 0)
    assert mk.macro_lengths(none[:, :0]).shape == (2, 0)


def test_ids_beyond_num_macros(backend):
    """An id >= num_macros is a ValueError on a CPU."""
    if backend.name == "gpu":
        pytest.skip("a GPU drops such ids instead: to know of them would need a host sync")
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match="id 2"):
        mk.macro_reduce(torch.ones(1, 3), ids, num_macros=2)
    with pytest.raises(ValueError, match="id 2"):
        mk.macro_lengths(ids, num_macros=2)
    with pytest.raises(ValueError, match="id 2"):
        mk.macro_broadcast(torch.ones(1, 2), ids)


def test_broadcast_keeps_its_dtype():
    """A broadcast copies: dtype and bits stay, also of numbers that float32 cannot hold."""
    for dtype in (wide(), torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([[0.1, -3.0]], dtype=dtype)
        out = mk.macro_broadcast(x, ids_of(IDS))
        assert out.dtype == dtype
        assert_same_bits(out[0, [0, 3]], x[0])


def test_sixteen_bit_inputs_accumulate_in_float32():
    """1 + 4096 times 2^-12 is 2 in float32; bf16 accumulation stays at 1."""
    x = torch.full((1, 4097), 2.0**-12, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    out = mk.macro_reduce(x, torch.zeros(1, 4097, dtype=torch.int32))
    assert out.dtype == torch.float32
    assert out.item() == 2.0


@pytest.mark.parametrize("layout", PADDED)
def test_any_strides(layout):
    """Transposed, sliced and expanded inputs give what contiguous ones give."""
    batch = make_batch(shapes.BY_HAND["ragged"], layout, poison=0.5)
    ids, x = batch.macro_ids, batch["values"]
    want = mk.macro_reduce(x, ids, weights="position")
    every_other = torch.stack((x, x + 100.0), dim=-1).flatten(1)[:, ::2]
    ids_other = torch.stack((ids, ids + 1), dim=-1).flatten(1)[:, ::2]
    for variant in (x.t().contiguous().t(), every_other):
        assert_same_bits(mk.macro_reduce(variant, ids_other, weights="position"), want)
    assert_same_bits(mk.macro_lengths(ids.t().contiguous().t()), mk.macro_lengths(ids))
    spread = mk.macro_broadcast(batch["macro_x"][:1].expand(3, -1), ids)
    assert_same_bits(spread, mk.macro_broadcast(batch["macro_x"][:1].repeat(3, 1), ids))
