"""The token-sized ops of the native CPU backend: what the tests of every backend cannot see."""

import math
import random

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases import calls, shapes
from tests.cases.batches import make_batch
from tests.cases.checks import run_with_gradient
from tests.cases.compare import assert_close, assert_same_bits, largest
from tests.cases.layouts import Layout
from tests.cases.precision import widest

pytestmark = pytest.mark.skipif(not mk.backends()["cpu"].available, reason=mk.backends()["cpu"].reason)


@pytest.fixture(autouse=True)
def _native():
    with widest(torch.float32), mk.use_backend("cpu"):
        yield


@pytest.fixture
def threads():
    """Sets the number of threads; it is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Ids that break the rules, one function a kind; `info` is of their type, whose borders they reach.
def _extremes(rng, length, info):
    return [
        rng.choice([info.min, info.min + 1, -2, -1, 0, 1, 2, length, info.max - 1, info.max]) for _ in range(length)
    ]


def _decreasing(rng, length, info):
    ids = sorted((rng.randrange(length) for _ in range(length)), reverse=True)
    return [min(k, t) for t, k in enumerate(ids)]


def _jumps(rng, length, info):
    ids, k = [], -1
    for t in range(length):
        k = max(k, rng.choice([k, k, k + 1, t]))
        ids.append(k if rng.random() < 0.8 else -1)
    return ids


def _anything(rng, length, info):
    return [rng.randint(-2, length + 2) for _ in range(length)]


GARBAGE = {"extremes": _extremes, "decreasing": _decreasing, "jumps": _jumps, "anything": _anything}


def _garbage(kind, layout, id_dtype):
    """A batch with a row in order, rows of garbage, and the shortest ones."""
    rng = random.Random(5)
    info = torch.iinfo(id_dtype)
    rows = [[0, 0, 1, 1, 2], *(GARBAGE[kind](rng, n, info) for n in (1, 2, 7, 33, 70)), []]
    return make_batch(rows, layout, torch.float32, id_dtype=id_dtype)


# Everything but what depends on the order of the tokens inside of a macro action, which garbage has none of.
ORDERLESS = [
    calls.reduce_call(weights="sum"),
    calls.reduce_call(weights="mean"),
    calls.lengths_call(),
    *(calls.kl_call(kl_coef=0.3, kl_estimator=e) for e in ("k1", "k2", "k3")),
    *(calls.policy_call(normalize_by=n) for n in ("tokens", "macros", "sequences")),
    *(calls.value_call(normalize_by=n) for n in ("tokens", "macros", "sequences")),
]
# Ids that rise, if by too much, still say which token is the first and which the last.
ORDERED = [
    *(calls.reduce_call(weights=w) for w in ("first", "last", "position", "position_reversed")),
    calls.reduce_call(weights="discounted_sum", discount=0.9),
    *(
        calls.policy_call(ratio_level=r, normalize_by=n)
        for r in ("macro", "macro_mean")
        for n in ("macros", "sequences")
    ),
    *(calls.value_call(level="macro", value_weights=w) for w in ("mean", "first", "position")),
]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", shapes.FROM_THE_START)
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_ids_give_what_the_reference_gives(kind, layout, id_dtype):
    """INT_MIN, INT_MAX, decreasing, huge jumps: the reference's numbers wherever ids without order have a meaning."""
    batch = _garbage(kind, layout, id_dtype)
    for call in [*ORDERLESS, *(ORDERED if kind == "jumps" else [])]:
        got = run_with_gradient(call, batch)
        with mk.use_backend("reference"):
            want = run_with_gradient(call, batch)
        for a, b in zip(got[0], want[0], strict=True):
            assert_close(a, b, torch.float32, scale=max(1.0, largest(b)), what=f"{call}")
        if want[1] is not None:
            assert_close(got[1], want[1], torch.float32, what=f"{call} gradient")
    isolated = segmentation.isolate_last(batch.macro_ids, **batch.keywords)
    wide_x = torch.arange(7 * 80, dtype=torch.float32).view(7, 80)
    spread = mk.macro_broadcast(wide_x, batch.macro_ids, **batch.keywords)
    with mk.use_backend("reference"):
        assert torch.equal(isolated, segmentation.isolate_last(batch.macro_ids, **batch.keywords))
        assert torch.equal(spread, mk.macro_broadcast(wide_x, batch.macro_ids, **batch.keywords))


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_ids_leave_other_rows_alone(kind):
    """Advantages of the row in order are its own, whatever stands in the others."""
    for layout in shapes.FROM_THE_START:
        batch = _garbage(kind, layout, torch.int32)
        clean = make_batch([batch.ids[0]], layout, torch.float32)
        call = calls.rollout_call(kl_coef=0.1, bootstrap=True, gamma=0.9)
        for a, b in zip(call.run(batch), call.run(clean), strict=True):
            assert batch.layout.rows(a)[0] == clean.layout.rows(b)[0]


@pytest.mark.parametrize("num_macros", [0, 2])
def test_ids_above_the_room_are_refused(num_macros):
    """An id that is one, but has no place in the result: ValueError with the id."""
    ids = torch.tensor([[0, 1, 2]])
    for run in (
        lambda: mk.macro_reduce(torch.zeros(1, 3), ids, num_macros=num_macros),
        lambda: mk.macro_lengths(ids, num_macros=num_macros),
        lambda: mk.macro_broadcast(torch.zeros(1, num_macros), ids),
    ):
        with pytest.raises(ValueError, match="id 2"):
            run()


BROKEN = {"start": [1, 2, 3], "decrease": [0, 3, 2], "ends": [0, 2, 9]}


@pytest.mark.parametrize("word", BROKEN)
def test_broken_cu_seqlens_are_refused(word):
    """Every op says what is wrong with cu_seqlens before it reads a token."""
    batch = make_batch([[0, 0], [0]], "packed", torch.float32)
    batch.keywords["cu_seqlens"] = torch.tensor(BROKEN[word], dtype=torch.int32)
    mask = torch.ones(3, dtype=torch.bool)
    runs = [lambda call=call: call.run(batch) for call in calls.ONE_EACH]
    runs += [
        lambda: segmentation.fixed_ngram(mask, 2, **batch.keywords),
        lambda: segmentation.from_ends(mask, mask, **batch.keywords),
        lambda: segmentation.perplexity(mask, torch.zeros(3), **batch.keywords),
        lambda: segmentation.isolate_last(batch.macro_ids, **batch.keywords),
    ]
    for run in runs:
        with pytest.raises(ValueError, match=f"cu_seqlens.*{word}"):
            run()


@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_the_same_bits_for_any_number_of_threads(threads, layout):
    """One thread and two: outputs and gradients of every op, in batches that are cut into several pieces."""
    ids = shapes.random_rows(40, 1500, seed=2)
    batch = make_batch(ids, layout, torch.float32)
    results = []
    for number in (1, 2):
        threads(number)
        outputs = []
        for call in calls.ONE_EACH:
            values, gradient = run_with_gradient(call, batch)
            outputs += [*values, *([] if gradient is None else [gradient])]
        mask = batch.mask
        outputs += [
            mk.masked_whiten(batch["values"], mask),
            segmentation.fixed_ngram(mask, 3, **batch.keywords),
            segmentation.perplexity(mask, batch["ref_logprobs"], **batch.keywords),
            segmentation.isolate_last(batch.macro_ids, **batch.keywords),
        ]
        results.append(outputs)
    for one, two in zip(*results, strict=True):
        assert_same_bits(one, two)


def _row_slices(x):
    return torch.stack((x, torch.full_like(x, 7)), dim=1).flatten(0, 1)[::2] if x.ndim == 2 else x


def _cut_from_wider(x):
    return torch.nn.functional.pad(x, (3, 5), value=9)[..., 3:-5]


def _transposed(x):
    return x.t().contiguous().t() if x.ndim == 2 else x


@pytest.mark.parametrize("view", [_row_slices, _cut_from_wider, _transposed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides(view, dtype):
    """Rows apart from each other, cut out of wider ones, or down the columns: the bits of contiguous tensors."""
    batch = make_batch(shapes.random_rows(5, 37), "mixed", dtype)
    fields = {name: view(x) for name, x in batch.fields.items()}
    spread = type(batch)(batch.layout, view(batch.macro_ids), fields)
    for call in calls.ONE_EACH:
        for a, b in zip(call.run(spread), call.run(batch), strict=True):
            assert_same_bits(a, b, str(call))


def test_one_row_for_all():
    """Expanded rows, which lie in the same place, are read as often as they stand there."""
    ids = shapes.random_rows(1, 50)
    laid = Layout("right", ids * 3)
    one = make_batch(ids, "right", torch.float32)
    expanded = {name: x.expand(3, *x.shape[1:]) if x.ndim else x for name, x in one.fields.items()}
    three = type(one)(laid, one.macro_ids.expand(3, -1), expanded)
    dense = type(one)(laid, three.macro_ids.contiguous(), {name: x.contiguous() for name, x in expanded.items()})
    for call in calls.ONE_EACH:
        for a, b in zip(call.run(three), call.run(dense), strict=True):
            assert_same_bits(a, b, str(call))


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)])
def test_empty_batches(shape):
    """No rows, or rows without tokens, through every op: zeros of the right shape, and losses of 0."""
    x = torch.zeros(shape, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.int32)
    mask = ids == 0
    assert mk.macro_reduce(x, ids, num_macros=3).tolist() == [[0.0] * 3] * shape[0]
    assert mk.macro_lengths(ids).shape == (shape[0], 0)
    assert mk.macro_broadcast(torch.ones(shape[0], 2), ids).shape == shape
    for out in mk.rollout_advantages(torch.zeros(shape[0]), x, x, x, ids, kl_coef=0.1):
        assert out.shape == shape
    (mk.macro_policy_loss(x, x, x, ids).loss + mk.macro_value_loss(x, x, x, ids).loss).backward()
    assert x.grad.shape == shape
    assert mk.masked_whiten(x, mask).shape == shape
    for built in (
        segmentation.fixed_ngram(mask, 2),
        segmentation.from_ends(mask, mask),
        segmentation.randomized_ngram(mask),
        segmentation.perplexity(mask, x),
        segmentation.isolate_last(ids),
    ):
        assert built.shape == shape
        assert built.dtype == torch.int32


def test_small_divergences_keep_their_digits():
    """e^-d - 1 + d has a small relative error for every d: nothing cancels, where exp loses all digits of it."""
    d = torch.logspace(-12, 1.9, 5000)
    for sign in (1.0, -1.0):
        logprobs = (sign * d)[None]
        ids = torch.arange(5000, dtype=torch.int32)[None]
        _, kl = mk.kl_penalized_rewards(
            torch.zeros(1), logprobs, torch.zeros(1, 5000), ids, kl_coef=1.0, kl_estimator="k3"
        )
        for got, x in zip(kl[0].tolist(), logprobs[0].tolist(), strict=True):
            # The series below 1e-4, where float64 cancels too.
            want = x * x / 2 - x**3 / 6 if abs(x) < 1e-4 else math.expm1(-x) + x
            assert got == pytest.approx(want, rel=5e-6, abs=1e-30)


@pytest.mark.parametrize("op", ["policy", "value"])
def test_a_normalizer_of_zero_divides_as_tensors_do(op):
    """The caller's 0 gives infinite gradients, as it does in PyTorch, not an error out of backward."""
    x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = mk.macro_policy_loss if op == "policy" else mk.macro_value_loss
    loss(x, x.detach(), torch.ones(1, 2), torch.tensor([[0, 1]]), normalizer=0.0).loss.backward()
    assert x.grad.isinf().all()
