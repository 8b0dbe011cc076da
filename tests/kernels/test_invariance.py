"""What must not change any number: what stands in masked places, padding, batching, and running twice."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import marlhf_kernels as mk
from tests.cases import calls, shapes
from tests.cases.batches import INF, NAN, make_batch, upstream
from tests.cases.calls import MACRO, SCALAR, TOKEN
from tests.cases.checks import check_call, run_with_gradient
from tests.cases.compare import assert_close, assert_same_bits, largest
from tests.cases.layouts import LAYOUTS, PADDED
from tests.cases.precision import wide

pytestmark = pytest.mark.usefixtures("backend")
HOLED = [*shapes.BY_HAND["holes inside macro actions"], [-1, -1, -1], *shapes.BY_HAND["prompt in front"]]


@pytest.mark.parametrize("call", calls.ALL, ids=str)
@pytest.mark.parametrize("layout", ["mixed", "packed with a tail"])
def test_masked_places_are_never_used(call, layout):
    """NaN, inf, -inf or a large number at every -1 of every input: the same bits, in values and gradients."""
    clean = make_batch(HOLED, layout, poison=0.5)
    want = run_with_gradient(call, clean)
    for poison in (NAN, INF, -INF, 1e30):
        got = run_with_gradient(call, make_batch(HOLED, layout, poison=poison))
        for a, b in zip(got[0], want[0], strict=True):
            assert_same_bits(a, b, f"{call} {poison}")
        if want[1] is not None:
            assert_same_bits(got[1], want[1], f"{call} {poison} gradient")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_gradient_at_masked_places_is_never_used(layout):
    """A broadcast's output at -1 is a constant: NaN sent into it goes nowhere."""
    batch = make_batch(HOLED, layout)
    leaf = batch["macro_x"].clone().requires_grad_()
    out = mk.macro_broadcast(leaf, batch.macro_ids, **batch.keywords)
    out.backward(torch.where(batch.mask, upstream(out), NAN))
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    "call", [c for c in calls.ALL if SCALAR not in c.outputs and "num_macros" not in str(c)], ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_equals_its_rows_one_by_one(call, layout):
    """A batch under left, right or mixed padding or packed gives every row what the row gives alone."""
    ids = [*HOLED, *shapes.random_rows(3, 21, seed=5)]
    batch = make_batch(ids, layout)
    outputs = call.run(batch)
    for b, row in enumerate(ids):
        # The same numbers as in the batch, alone in a row.
        alone = make_batch([row], "right")
        fields = {}
        for name, x in batch.fields.items():
            if name == "macro_x":
                fields[name] = x[b : b + 1]
            elif x.ndim == batch.macro_ids.ndim and x.shape == batch.macro_ids.shape:
                fields[name] = alone.layout.lay([batch.lists(name)[b]], NAN, x.dtype)
            else:
                fields[name] = x[b : b + 1]
        single = alone.with_fields(**fields)
        for kind, got, want in zip(call.outputs, outputs, call.run(single), strict=True):
            if kind == TOKEN:
                alone_row = single.layout.rows(want)[0]
                assert_close(batch.layout.rows(got)[b], alone_row, scale=max(1.0, largest(alone_row)))
            else:
                assert kind == MACRO
                width = want.shape[1]
                assert_close(got[b, :width], want[0], scale=max(1.0, largest(want)))
                assert not got[b, width:].any()


@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if SCALAR in c.outputs], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_padding_changes_no_loss_and_no_metric(call, layout):
    """Rows without actions and wider padding leave loss and statistics as they are."""
    ids = shapes.BY_HAND["ragged"]
    plain = call.run(make_batch(ids, layout))
    longer = call.run(make_batch([*ids, [-1] * 40, [-1] * 3], layout))
    for a, b in zip(plain, longer, strict=True):
        assert_close([a], [b], scale=1.0)


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_bits_every_run(call, dtype):
    """Twice the same inputs: the same bits, outputs and gradients."""
    batch = make_batch(shapes.random_rows(7, 65), "mixed", dtype)
    first, second = run_with_gradient(call, batch), run_with_gradient(call, batch)
    for a, b in zip(first[0], second[0], strict=True):
        assert_same_bits(a, b)
    if first[1] is not None:
        assert_same_bits(first[1], second[1])


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
def test_under_deterministic_algorithms(call):
    """`use_deterministic_algorithms` refuses nothing here, and its NaN in uninitialised memory shows nowhere."""
    batch = make_batch(HOLED, "mixed")
    want = run_with_gradient(call, batch)
    torch.use_deterministic_algorithms(True)
    try:
        got = run_with_gradient(call, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got[0], want[0], strict=True):
        assert_same_bits(a, b)
    if want[1] is not None:
        assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
def test_inputs_are_left_alone(call):
    """No op writes into its inputs, ids included."""
    batch = make_batch(HOLED, "mixed", poison=0.5)
    before = {name: x.clone() for name, x in batch.fields.items()}
    ids = batch.macro_ids.clone()
    run_with_gradient(call, batch)
    for name, x in before.items():
        assert_same_bits(batch[name], x, name)
    assert torch.equal(batch.macro_ids, ids)


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_any_strides(call, layout):
    """Every input strided by 2 in its last dimension: what contiguous inputs give."""

    def strided(x):
        return torch.stack((x, torch.full_like(x, 77)), dim=-1).flatten(-2)[..., ::2] if x.ndim else x

    batch = make_batch(HOLED, layout, poison=0.5)
    want = run_with_gradient(call, batch)
    spread = batch.with_fields(**{name: strided(x) for name, x in batch.fields.items()})
    spread = type(spread)(spread.layout, strided(batch.macro_ids), spread.fields)
    got = run_with_gradient(call, spread)
    for a, b in zip(got[0], want[0], strict=True):
        assert_close(a, b)
    if want[1] is not None:
        assert_close(got[1], want[1])


@pytest.mark.parametrize(
    "reduce",
    [
        lambda o: o.sum(),
        lambda o: o[:, ::2].sum(),
        lambda o: (o.t() * 2.0)[1:].sum(),
        lambda o: o.expand(3, *o.shape).sum(),
    ],
)
@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if c.op in ("macro_reduce", "macro_broadcast")], ids=str)
def test_strided_upstream_gradients(call, reduce):
    """Zero-stride, strided and transposed upstream gradients equal the same gradient laid out densely."""
    batch = make_batch(HOLED, "mixed", poison=0.5)
    gradients = []
    for dense in (False, True):
        leaf = batch[call.learns].clone().requires_grad_()
        (out,) = call.run(batch.with_fields(**{call.learns: leaf}))
        if dense:
            probe = out.detach().clone().requires_grad_()
            (sent,) = torch.autograd.grad(reduce(probe), probe)
            out.backward(sent.contiguous())
        else:
            reduce(out).backward()
        gradients.append(leaf.grad)
    assert gradients[0].any()
    assert_same_bits(*gradients)


@pytest.mark.parametrize(
    "call", [c for c in calls.ONE_EACH if len(c.exact(make_batch([[0]]))) > 1 or c.learns], ids=str
)
def test_inputs_may_have_different_types(call):
    """bf16 log-probabilities beside float32 advantages: float32 out, each gradient in its input's type."""
    batch = make_batch(HOLED, "mixed", torch.float32, poison=0.5)
    narrow = {n: batch[n].bfloat16() for n in ("logprobs", "values", "macro_x", "ref_logprobs")}
    mixed = batch.with_fields(**narrow)
    same = batch.with_fields(**{n: x.float() for n, x in narrow.items()})
    got, want = run_with_gradient(call, mixed), run_with_gradient(call, same)
    for a, b in zip(got[0], want[0], strict=True):
        assert_close(a.float(), b, torch.float32, scale=1.0)
    if got[1] is not None:
        assert got[1].dtype == torch.bfloat16
        assert_close(got[1], want[1], torch.float32)


def test_more_rows_and_more_tokens_than_a_grid_axis_holds(backend):
    """B and T past 65535."""
    if "edge" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for 65536 rows")
    for shape in ((65537, 2), (1, 65537)):
        ids = torch.arange(shape[1], dtype=torch.int32).expand(shape)
        torch.manual_seed(0)
        x, v = torch.randn(shape), torch.randn(shape)
        out = mk.macro_gae(x, v, ids, gamma=0.5, lam=0.0)
        following = torch.cat((v[:, 1:], torch.zeros(shape[0], 1)), dim=1)
        assert_close(out.advantages, x + 0.5 * following - v, torch.float32)
        assert_close(mk.macro_lengths(ids), torch.ones(shape), torch.float32)


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
@pytest.mark.parametrize("hint", [None, 0, 1, 5, 10**6])
def test_max_seqlen_is_only_a_hint(call, hint):
    """max_seqlen may be anything, too small too: the right answer comes out."""
    batch = make_batch(HOLED, "packed", poison=0.5)
    want = run_with_gradient(call, batch)
    batch.keywords["max_seqlen"] = hint
    got = run_with_gradient(call, batch)
    for a, b in zip(got[0], want[0], strict=True):
        assert_close(a, b)
    if want[1] is not None:
        assert_close(got[1], want[1])


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
@pytest.mark.parametrize("layout", ["right", "packed with a tail"])
def test_any_ids_are_memory_safe(call, layout):
    """Ids that break every rule, to the borders of their type: nothing crashes, and other rows keep their numbers."""
    rng = random.Random(3)
    rows = [[0, 0, 1, 1, 2, 2, 3, 3], *HOLED]
    width = 64
    for dtype in (torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        batch = make_batch(rows, layout, poison=0.5)
        batch = batch.with_fields(macro_x=torch.ones(len(rows), width, dtype=wide()))
        want = call.run(batch)
        for _ in range(10):
            wild = batch.macro_ids.to(dtype)
            row = wild if wild.ndim == 1 else wild[0]
            for t in range(8):
                row[t] = rng.choice([info.min, -2, -1, 0, 1, 2, 3, 5, 7, 40, info.max])
            outputs, _ = run_with_gradient(call, type(batch)(batch.layout, wild, batch.fields))
            for kind, got, clean in zip(call.outputs, outputs, want, strict=True):
                if kind == TOKEN:
                    assert got.shape == wild.shape
                    assert_close(batch.layout.rows(got)[1:], batch.layout.rows(clean)[1:])
                elif kind == MACRO:
                    both = min(got.shape[1], clean.shape[1])
                    assert_close(got[1:, :both], clean[1:, :both])


def test_builders_ignore_a_wrong_hint_too():
    """max_seqlen too small or too large for the builders."""
    mask, cu = torch.ones(9).bool(), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    want = [0, 0, 0, 0, 1, 1, 2, 2, 3]
    ends = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0]).bool()
    for hint in (None, 0, 1, 7, 1000):
        options = {"cu_seqlens": cu, "max_seqlen": hint}
        assert mk.segmentation.fixed_ngram(mask, 2, **options).tolist() == want
        assert mk.segmentation.from_ends(mask, ends, **options).tolist() == want
        assert mk.segmentation.from_lengths(mask, [[2], [], [2, 2, 2, 1]], **options).tolist() == want
        rising = -torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 8.0])
        assert mk.segmentation.perplexity(mask, rising, **options).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3]
        generator = torch.Generator().manual_seed(0)
        drawn = mk.segmentation.randomized_ngram(mask, lengths=(2,), generator=generator, **options)
        assert drawn.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3]
        assert mk.segmentation.validate(drawn, **options) is None
        isolated = mk.segmentation.isolate_last(mk.segmentation.whole(mask, **options), **options)
        assert isolated.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
def test_autocast_is_ignored(call, layout):
    """Under autocast every macro op gives the same bits."""
    batch = make_batch(HOLED, layout, torch.float32)
    want = call.run(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call.run(batch)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_autocast_is_ignored_by_builders_and_whitening():
    """The same for what is no macro op."""
    torch.manual_seed(0)
    x, mask = torch.randn(3, 40), torch.rand(3, 40) < 0.8
    want = (mk.masked_whiten(x, mask), mk.segmentation.perplexity(mask, -x.abs()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = (mk.masked_whiten(x, mask), mk.segmentation.perplexity(mask, -x.abs()))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


id_rows = st.lists(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=24).map(
        # Two coins a place: is it an action, and does it open a macro action?
        lambda coins: _ids_from_coins(coins)
    ),
    max_size=5,
)


def _ids_from_coins(coins):
    ids, k = [], -1
    for action, opens in coins:
        if action and (opens or k < 0):
            k += 1
        ids.append(k if action else -1)
    return ids


@settings(
    max_examples=400, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    ids=id_rows,
    call=st.sampled_from([c for c in calls.ALL if "num_macros" not in str(c)]),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    poison=st.sampled_from([NAN, INF, -INF]),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch(ids, call, layout, dtype, poison, seed):
    """Ragged batches with holes anywhere and poison in masked places, found by search: the loop oracle's numbers."""
    dtype = wide() if dtype is torch.float64 else dtype
    check_call(call, make_batch(ids, layout, dtype, poison, seed), f"{ids} {seed}")


@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if TOKEN in c.outputs], ids=str)
def test_zero_sizes(call):
    """B = 0, T = 0 and both: empty outputs of the right shape, in both layouts."""
    for ids, layout in (([], "right"), ([[], []], "packed"), ([], "packed"), ([[]], "left")):
        batch = make_batch(ids, layout)
        for out in call.run(batch):
            assert out.shape == batch.macro_ids.shape
    assert math.prod(batch.macro_ids.shape) == 2
