"""What the Triton backend does beside giving right numbers: how it cuts its work, what it launches, what it copies."""

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import logits as rows_of_logits
from tests.cases.batches import NAN, make_batch, upstream
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.layouts import LAYOUTS
from tests.cases.logits import CASES, noise
from tests.cases.shapes import ABOVE_POSITION, BY_HAND, FROM_THE_START, random_rows
from tests.kernels import test_token_logprobs

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def gpu(backend):
    """Skips for every other backend; the Triton package is imported only here."""
    if backend.name != "gpu":
        pytest.skip("about the Triton backend alone")
    return backend


@pytest.fixture
def launched(gpu):
    """The names of the kernels that the test launches, as it goes."""
    from marlhf_kernels.gpu.launch import intercepted, start

    names = []

    def note(kernel, *rest):
        names.append(kernel.__name__)
        start(kernel, *rest)

    with intercepted(note):
        yield names


@pytest.fixture(params=["whole rows", "rows in parts"])
def small_blocks(gpu, request, monkeypatch):
    """Blocks of 16 logits, so that short rows are long ones; a program a row, or a block."""
    from marlhf_kernels.gpu import logprobs

    monkeypatch.setattr(logprobs, "SHORT_VOCABULARY", 0)
    monkeypatch.setattr(logprobs, "LONG", logprobs.Block(16, 1))
    monkeypatch.setattr(logprobs, "num_processors", lambda device: 1)
    monkeypatch.setattr(logprobs, "PROGRAMS_PER_PROCESSOR", {"whole rows": 1, "rows in parts": 10**6}[request.param])


@pytest.mark.parametrize("case", [c for c in CASES if "V 1000" not in c.name], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_rows_of_several_blocks(case, dtype, small_blocks):
    """Rows longer than a block, with and without a shorter block at the end, within the budget of the oracle."""
    test_token_logprobs.test_oracle(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling", "banned but for one"])
def test_the_maximum_moves_from_block_to_block(order, dtype, small_blocks):
    """What was summed is rescaled at each new maximum; a block of -inf alone, in front or behind, adds nothing."""
    base = torch.tensor(noise(4, 70), dtype=torch.float64)
    ramp = torch.arange(70).double()
    if order == "banned but for one":
        rows = torch.full_like(base, -torch.inf)
        rows[range(4), [0, 20, 40, 69]] = 1.0
    else:
        rows = base + (ramp if order == "rising" else -ramp)
    case = rows_of_logits.LogitCase(order, rows.tolist(), [0, 20, 40, 69])
    test_token_logprobs.test_oracle(case, dtype)


def test_launches_of_token_logprobs(launched):
    """One launch forward and one backward; two forward where few rows are taken in parts."""
    from marlhf_kernels.gpu import logprobs

    for rows, vocabulary, forward in ((6, 40, ["_forward"]), (1, 2 * logprobs.LONG.size + 1, ["_forward", "_combine"])):
        x = torch.randn(rows, vocabulary, requires_grad=True)
        outputs = mk.token_logprobs(x, torch.arange(rows), return_entropy=True, temperature=0.7)
        assert launched == forward
        launched.clear()
        sum(o.sum() for o in outputs).backward()
        assert launched == ["_backward"]
        launched.clear()


def test_launches_of_whitening(launched):
    """Moments and normalising: one each for a block, three in all beyond it; nothing without entries to normalise."""
    for number, expected in ((50, 2), (5000, 3), (0, 1)):
        mk.masked_whiten(torch.randn(number), torch.ones(number, dtype=torch.bool))
        assert len(launched) == expected
        launched.clear()


def test_no_rows_launch_nothing(launched):
    """Empty tensors start no kernel."""
    x = torch.empty(0, 7, requires_grad=True)
    mk.token_logprobs(x, torch.empty(0, dtype=torch.int64)).sum().backward()
    assert x.grad.shape == (0, 7)
    assert launched == []


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, :-1],
        lambda x: x[:, 1:, :-1],
        lambda x: x.transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[:1],
        lambda x: x[:, :1],
        lambda x: x[:, :, :1],
        lambda x: x.unsqueeze(1),
        lambda x: x[0],
    ],
)
def test_views_are_read_where_they_are(view):
    """No copy of logits with one or two leading dimensions, whatever their strides; every row is found."""
    from marlhf_kernels.gpu.logprobs import rows_of

    x = view(torch.arange(3 * 4 * 6).reshape(3, 4, 6))
    rows = rows_of(x)
    assert rows.data is x
    first = [n // rows.inner * rows.outer_stride + n % rows.inner * rows.inner_stride for n in range(rows.number)]
    # An entry of this tensor is its own place in memory.
    start = x.storage_offset()
    assert [start + f for f in first] == x[..., 0].flatten().tolist()


def test_three_strides_apart_are_copied():
    """Leading dimensions that no two strides describe."""
    x = torch.randn(3, 4, 5, 6)[::2, ::2, ::2]
    y = torch.zeros(x.shape[:-1], dtype=torch.int64)
    leaf, plain = x.clone().requires_grad_(), x.detach().requires_grad_()
    for z in (leaf, plain):
        mk.token_logprobs(z, y).sum().backward()
    assert_same_bits(plain.grad, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_coefficients_on_the_device_give_the_same_bits(dtype, gpu):
    """A coefficient as a number is an argument, as a tensor of the device a pointer: the kernel computes alike."""
    x, y = torch.tensor(noise(5, 40)), torch.tensor([0, 3, -1, 39, 20])

    def run(temperature, softcap):
        leaf = x.clone().requires_grad_()
        outputs = mk.token_logprobs(leaf, y, temperature=temperature, logit_softcap=softcap, return_entropy=True)
        torch.autograd.backward(outputs, [upstream(o) for o in outputs])
        return *outputs, leaf.grad

    numbers = run(0.75, 5.0)
    tensors = run(torch.tensor(0.75, dtype=dtype), torch.tensor(5.0, dtype=dtype))
    for a, b in zip(numbers, tensors, strict=True):
        assert_same_bits(a, b)


def test_the_same_bits_every_run(small_blocks):
    """Twice the same call."""
    x, y = torch.tensor(noise(5, 100)), torch.tensor([0, 3, -1, 99, 20])
    runs = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        outputs = mk.token_logprobs(leaf, y, return_entropy=True)
        torch.autograd.backward(outputs, [upstream(o) for o in outputs])
        runs.append((*outputs, leaf.grad))
    for a, b in zip(*runs, strict=True):
        assert_same_bits(a, b)


def of_the_reference(op, *args):
    """The op on the reference, whose definition counts."""
    with mk.use_backend("reference"):
        return op(*args)


ROWS = {
    "every shape": [row for rows in (*BY_HAND.values(), random_rows(5, 33)) for row in rows],
    "above their position": ABOVE_POSITION,
    "long": random_rows(3, 1200),
    **{name: BY_HAND[name] for name in ("no action at all", "no rows")},
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_action_labels(name, layout, dtype):
    """Labels of actions, -1 elsewhere, in every layout."""
    batch = make_batch(ROWS[name], layout)
    labels = torch.arange(100, 100 + batch.macro_ids.numel(), dtype=dtype).reshape(batch.macro_ids.shape)
    args = (labels, batch.macro_ids.to(dtype), batch.keywords.get("cu_seqlens"), None)
    assert_same_bits(torch.ops.marlhf.action_labels(*args), of_the_reference(torch.ops.marlhf.action_labels, *args))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("layout", ["mixed", "packed with a tail"])
@pytest.mark.parametrize(
    ("kl", "entropy", "normalizer"), [(True, True, None), (True, False, 7.0), (False, True, None), (False, False, 3.0)]
)
def test_policy_penalty(name, layout, kl, entropy, normalizer):
    """Loss, both gradients and the count, in every layout; NaN where no action is changes nothing."""
    if name == "above their position" and layout not in FROM_THE_START:
        pytest.skip("its ids are above their position only in a row that starts the tensor's")
    batch = make_batch(ROWS[name], layout, torch.float32, poison=NAN)
    args = (
        batch["logprobs"],
        batch["values"] if entropy else None,
        batch["ref_logprobs"] if kl else None,
        batch.macro_ids,
        torch.tensor(0.25, dtype=torch.float64, device="cpu"),
        torch.tensor(0.5),
        None if normalizer is None else torch.tensor(normalizer),
        batch.keywords.get("cu_seqlens"),
        None,
    )
    want = of_the_reference(torch.ops.marlhf.policy_penalty, *args)
    for a, b in zip(torch.ops.marlhf.policy_penalty(*args), want, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [0, 1, 16, 1000, 2048])
def test_scale_gradient(number, dtype):
    """gradient * grad_output / count in the dtype asked for."""
    args = (torch.randn(number), torch.tensor(-2.5), torch.tensor(3.0), dtype)
    scaled = torch.ops.marlhf.scale_gradient(*args)
    assert scaled.dtype == dtype
    assert_close(scaled, args[0].double() * (-2.5 / 3.0), torch.float32, scale=4.0)
