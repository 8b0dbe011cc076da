"""macro_value_loss."""

import math

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import calls, oracle, shapes
from tests.cases.batches import make_batch
from tests.cases.checks import check_call, check_everywhere, run_with_gradient
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.precision import wide
from tests.cases.tensors import ids_of, numbers

pytestmark = pytest.mark.usefixtures("backend")
NAN = math.nan


@pytest.mark.parametrize(
    ("new", "target", "loss", "slope", "clipped"),
    [
        (1.0, 1.0, 0.32, 0.0, 1.0),
        (1.0, 0.5, 0.125, 0.5, 0.0),
        (1.0, 0.9, 0.245, 0.0, 1.0),
        (-1.0, -0.9, 0.245, 0.0, 1.0),
        (0.1, 1.0, 0.405, -0.9, 0.0),
    ],
)
@pytest.mark.parametrize("level", ["token", "macro"])
def test_clip_by_hand(new, target, loss, slope, clipped, level):
    """Clip .2, old 0: (new 1, G 1) -> .32 with gradient 0; (1, .5) -> .125 with the full gradient."""
    v = numbers([new]).requires_grad_()
    out = mk.macro_value_loss(v, numbers([0.0]), numbers([target]), ids_of([0]), level=level)
    out.loss.backward()
    assert_close([out.loss, v.grad.item(), out.clip_fraction], [loss, slope, clipped])


def test_no_clip():
    """clip=None: half the squared error, whatever the old value, which may then be anything."""
    out = mk.macro_value_loss(numbers([1.0, 3.0]), numbers([0.0, 9.0]), numbers([0.0, 1.0]), ids_of([0, 0]), clip=None)
    assert_close([out.loss, out.clip_fraction], [(0.5 + 2.0) / 2, 0.0])


def test_every_token_value_regresses_to_its_macro_actions_return():
    """Level `token`: values [0, 2] and return 1 -> (.5 + .5) / 2, gradient [-.5, .5]."""
    v = numbers([0.0, 2.0]).requires_grad_()
    out = mk.macro_value_loss(v, v.detach(), numbers([1.0, 1.0]), ids_of([0, 0]), clip=None)
    out.loss.backward()
    assert_close([out.loss, *v.grad[0].tolist()], [0.5, -0.5, 0.5])


@pytest.mark.parametrize(
    ("weights", "sigma"),
    [
        ("mean", [1 / 3] * 3),
        ("first", [1.0, 0.0, 0.0]),
        ("last", [0.0, 0.0, 1.0]),
        ("position", [2 / 11, 3 / 11, 6 / 11]),
        ("position_reversed", [6 / 11, 3 / 11, 2 / 11]),
    ],
)
def test_macro_level_by_hand(weights, sigma):
    """level="macro" aggregates V first: .5 (V_k - G)^2 with gradient (V_k - G) sigma_i, for every weight."""
    values = [1.0, 2.0, 4.0]
    v = numbers([1.0, NAN, 2.0, 4.0]).requires_grad_()
    returns = numbers([5.0, NAN, NAN, NAN])
    out = mk.macro_value_loss(
        v,
        numbers([0.0, NAN, 0.0, 0.0]),
        returns,
        ids_of([0, -1, 0, 0]),
        level="macro",
        value_weights=weights,
        clip=None,
    )
    out.loss.backward()
    error = sum(s * x for s, x in zip(sigma, values, strict=True)) - 5.0
    assert_close([out.loss], [0.5 * error**2])
    assert_close(v.grad, [[error * sigma[0], 0.0, error * sigma[1], error * sigma[2]]])


def test_old_values_are_aggregated_like_values():
    """level="macro": V_k = 1.5 and its old aggregate 1 give a held value of 1.2; G 1.5 takes it, G 1 not."""
    args = (numbers([1.0, 2.0]), numbers([0.0, 2.0]))
    ids = ids_of([0, 0])
    plain = mk.macro_value_loss(*args, numbers([1.0, 1.0]), ids, level="macro")
    assert_close([plain.loss, plain.clip_fraction], [0.125, 0.0])
    held = mk.macro_value_loss(*args, numbers([1.5, 1.5]), ids, level="macro")
    assert_close([held.loss, held.clip_fraction], [0.5 * 0.3**2, 1.0])


def test_defaults():
    """Clip .2, level token, divided by the tokens."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    args = (batch["values"], batch["old_values"], batch["returns"], batch.macro_ids)
    explicit = mk.macro_value_loss(
        *args, clip=0.2, level="token", value_weights="mean", normalize_by="tokens", normalizer=None
    )
    for x, y in zip(mk.macro_value_loss(*args), explicit, strict=True):
        assert_same_bits(x, y)


def test_normalisers_by_hand():
    """Rows of 4 tokens in 2 macro actions and of 1 in 1, errors 1 and 2: every count by hand."""
    v = torch.zeros(2, 4, dtype=wide())
    ids = ids_of([0, 0, 0, 1], [0, -1, -1, -1])
    returns = numbers([1.0] * 4, [2.0] * 4)

    def loss(**options):
        return mk.macro_value_loss(v, v, returns, ids, clip=None, **options).loss

    assert_close(
        [loss(), loss(normalize_by="macros"), loss(normalize_by="sequences"), loss(normalizer=8)],
        [4 / 5, 4 / 3, (0.5 + 2.0) / 2, 0.5],
    )
    macro = {"level": "macro"}
    assert_close(
        [loss(**macro), loss(**macro, normalize_by="tokens"), loss(**macro, normalize_by="sequences", normalizer=5)],
        [3 / 3, 3 / 5, 2.5 / 5],
    )


def test_inside_the_range_nothing_is_clipped(backend):
    """|V - V_old| < c in float32: the clipped term may not win by a rounding and switch the gradient off."""
    torch.manual_seed(0)
    # Values much finer than their distance from the old ones: old + (V - old) is not V there.
    old = (0.05 * torch.randn(1, 20000)).clamp(-0.19, 0.19)
    v = (0.001 * torch.randn(1, 20000)).clamp(-0.005, 0.005).requires_grad_()
    target = torch.randn(1, 20000)
    out = mk.macro_value_loss(v, old, target, torch.zeros(1, 20000, dtype=torch.int32), normalizer=1.0)
    out.loss.backward()
    assert out.clip_fraction.item() == 0.0
    assert_close(v.grad, v.detach() - target, torch.float32)


def test_ties_take_the_unclipped_branch():
    """V = V_old with clip 0: both terms are equal, the gradient is full and nothing counts as clipped."""
    v = numbers([1.0]).requires_grad_()
    out = mk.macro_value_loss(v, numbers([1.0]), numbers([3.0]), ids_of([0]), clip=0.0)
    out.loss.backward()
    assert_close([out.loss, v.grad.item(), out.clip_fraction], [2.0, -2.0, 0.0])


@pytest.mark.parametrize("level", ["token", "macro"])
@pytest.mark.parametrize("normalize_by", [None, *oracle.NORMALIZE_BY])
@pytest.mark.parametrize("normalizer", [None, 0, torch.tensor(0.0), 5.0])
def test_no_action_token(level, normalize_by, normalizer):
    """No action at all: loss 0, gradient 0, no NaN, also with normalizer 0."""
    for shape in ((2, 3), (0, 3), (2, 0)):
        v = torch.full(shape, NAN, dtype=wide(), requires_grad=True)
        other = torch.full(shape, NAN, dtype=wide())
        out = mk.macro_value_loss(
            v, other, other, torch.full(shape, -1, dtype=torch.int32),
            level=level, normalize_by=normalize_by, normalizer=normalizer,
        )  # fmt: skip
        out.loss.backward()
        assert [x.item() for x in out] == [0.0, 0.0]
        assert not v.grad.any()


def test_only_values_learn():
    """Gradients flow to values alone; old values and returns get none."""
    batch = make_batch(shapes.BY_HAND["ragged"], poison=0.0)
    leaves = [batch[n].clone().requires_grad_() for n in ("values", "old_values", "returns")]
    out = mk.macro_value_loss(*leaves, batch.macro_ids)
    assert [x.requires_grad for x in out] == [True, False]
    out.loss.backward()
    assert leaves[0].grad.any()
    assert leaves[1].grad is None
    assert leaves[2].grad is None


@pytest.mark.parametrize("call", calls.VALUE, ids=str)
def test_oracle_by_hand_shapes(call):
    """Loss, statistics and gradient of every option set equal the loop oracle, on every shape and layout."""
    check_everywhere(call)


@pytest.mark.parametrize(
    "call",
    [calls.value_call(), calls.value_call(level="macro", value_weights="position")],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_oracle_grids(call, dtype, backend):
    """Low precisions in, float32 accumulation, gradient in the input's dtype: around the borders of tiles."""
    for grid in {"interpreter", "edge"} & set(backend.grids):
        for rows, length in shapes.GRIDS[grid]:
            ids = shapes.random_rows(rows, length)
            check_call(call, make_batch(ids, "packed" if length % 2 else "mixed", dtype), f"{rows}x{length}")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "macro"])
def test_oracle_production(level, backend):
    """Production-sized batches."""
    if "production" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the production grid")
    for rows, length in shapes.GRIDS["production"]:
        batch = make_batch(shapes.random_rows(rows, length), "right", torch.float32)
        check_call(calls.value_call(level=level), batch, f"{rows}x{length}")


def test_coefficients_may_be_tensors():
    """clip and normalizer as 0-d tensors give what numbers give."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    numbers = {"clip": 0.1, "normalizer": 7.0}
    tensors = {k: torch.tensor(v, dtype=wide()) for k, v in numbers.items()}
    a = run_with_gradient(calls.value_call(**numbers), batch)
    b = run_with_gradient(calls.value_call(**tensors), batch)
    assert_close([*a[0]], [*b[0]])
    assert_close(a[1], b[1])


def test_grad_output_is_honoured():
    """loss * -3 has minus three times the gradient."""
    call = calls.value_call(level="macro")
    batch = make_batch(shapes.BY_HAND["ragged"], poison=0.0)
    gradients = []
    for factor in (1.0, -3.0):
        v = batch["values"].clone().requires_grad_()
        (call.run(batch.with_fields(values=v))[0] * factor).backward()
        gradients.append(v.grad)
    assert_close(gradients[1], -3.0 * gradients[0])
