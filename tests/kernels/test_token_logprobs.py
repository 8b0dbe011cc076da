"""token_logprobs."""

import math
import subprocess
import sys

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import logits as rows_of_logits
from tests.cases import oracle
from tests.cases.batches import INF, NAN, upstream
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.logits import CASES, eager, exact, exact_gradient, noise
from tests.cases.precision import wide
from tests.cases.tensors import numbers

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_temperature_by_hand():
    """Logits [2, 0], T = 0.5, token 0: -0.01815."""
    out = mk.token_logprobs(numbers([2.0, 0.0]), torch.tensor([0]), temperature=0.5)
    assert out.item() == pytest.approx(-0.01815, abs=5e-6)


def test_uniform():
    """Equal logits: log-probability -ln V, entropy ln V."""
    for vocab in (1, 2, 33):
        lp, entropy = mk.token_logprobs(
            torch.full((2, vocab), 3.0, dtype=wide()), torch.tensor([0, vocab - 1]), return_entropy=True
        )
        assert_close(lp, [-math.log(vocab)] * 2, scale=1.0)
        assert_close(entropy, [math.log(vocab)] * 2, scale=1.0)


def test_gradient_by_hand():
    """Probabilities (.8, .2): d logp_0 / d logits = (.2, -.2); d entropy = -p (log p + H) = -+.2218."""
    x = numbers([math.log(0.8), math.log(0.2)]).requires_grad_()
    lp, entropy = mk.token_logprobs(x, torch.tensor([0]), return_entropy=True)
    lp.backward(retain_graph=True)
    assert_close(x.grad, [[0.2, -0.2]])
    x.grad = None
    entropy.backward()
    assert x.grad[0].tolist() == pytest.approx([-0.2218, 0.2218], abs=5e-5)


def test_banned_vocabulary():
    """Logits [0, 0, -inf]: entropy ln 2 with a finite gradient; a label on the -inf logit gives -inf."""
    x = numbers([0.0, 0.0, -INF], [0.0, 0.0, -INF]).requires_grad_()
    lp, entropy = mk.token_logprobs(x, torch.tensor([0, 2]), return_entropy=True)
    assert lp[0].item() == pytest.approx(-math.log(2.0))
    assert lp[1].item() == -INF
    assert_close(entropy, [math.log(2.0)] * 2)
    entropy.sum().backward()
    assert x.grad.isfinite().all()
    assert_close(x.grad, [[0.0] * 3] * 2, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_cancellation_at_the_target(dtype):
    """Target 12 above the rest: p - 1 at the target is not rounded in the logits' dtype; the row sums to 0."""
    vocab = 33
    x = torch.zeros(1, vocab, dtype=dtype)
    x[0, 7] = 12.0
    x.requires_grad_()
    mk.token_logprobs(x, torch.tensor([7])).backward()
    rest = math.exp(-12.0)
    want = (vocab - 1) * rest / (1 + (vocab - 1) * rest)
    # float32 holds 1 - 2e-4 to 3e-4 of the difference; a 16-bit 1 - 2e-4 would be 1.
    assert x.grad[0, 7].item() == pytest.approx(want, rel={torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 1e-2))
    assert x.grad[0, 0].item() == pytest.approx(
        -want / (vocab - 1), rel={torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 1e-2)
    )


def test_softcap_by_hand():
    """cap tanh(x / cap) before the division by the temperature."""
    x, cap, temperature = [3.0, -2.0, 0.5], 2.0, 0.5
    z = [cap * math.tanh(v / cap) / temperature for v in x]
    want = z[0] - math.log(sum(math.exp(v) for v in z))
    out = mk.token_logprobs(numbers(x), torch.tensor([0]), temperature=temperature, logit_softcap=cap)
    assert_close(out, [want])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle(case, dtype):
    """Values and gradients (of log-probability and entropy together) within the error budget of the loop oracle."""
    logits, labels = case.tensors(dtype)
    x = logits.clone().requires_grad_()
    lp, entropy = mk.token_logprobs(x, labels, return_entropy=True, **case.options)
    want_lp, want_entropy = exact(case, logits)
    y = logits.float().requires_grad_()
    eager_lp, eager_entropy = eager(y, labels, **case.options)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert (lp.dtype, entropy.dtype) == (out_dtype, out_dtype)
    low = dtype != torch.float64
    assert_close(lp, want_lp, dtype, eager=eager_lp if low else None, scale=None if low else 100.0, what="logprob")
    assert_close(
        entropy, want_entropy, dtype, eager=eager_entropy if low else None, scale=None if low else 100.0, what="entropy"
    )
    alone = mk.token_logprobs(logits, labels, **case.options)
    assert_close(alone, lp, dtype, scale=100.0 if dtype == torch.float64 else None)
    if not case.labels:
        return
    g, h = upstream(lp, 1), upstream(entropy, 2)
    # A row whose label is banned has no finite log-probability to differentiate.
    dead = [n for n, v in enumerate(want_lp) if v == -INF]
    g[dead] = 0.0
    torch.autograd.backward([lp, entropy], [g, h])
    assert x.grad.dtype == dtype
    want = exact_gradient(case, logits, g.double().tolist(), h.double().tolist())
    eager_grad = None
    if low:
        finite = [n for n in range(len(labels)) if n not in dead and labels[n] >= 0]
        eager_out = (eager_lp * g).masked_fill(g == 0, 0.0).sum() + (eager_entropy * h).sum()
        eager_out.backward()
        eager_grad = (
            y.grad if y.grad.isfinite().all() else torch.where(y.grad.isfinite(), y.grad, torch.tensor(want).float())
        )
        assert finite or case.name == "every row ignored"
    assert_close(x.grad, want, dtype, eager=eager_grad, what="gradient")


@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 1, 3), (1,)])
def test_any_leading_shape(shape, label_dtype):
    """[..., V] and [...] to [...]; labels int32 or int64."""
    n = math.prod(shape)
    x = torch.tensor(noise(n, 9), dtype=wide())
    y = torch.arange(n) % 9
    flat = mk.token_logprobs(x, y)
    out, entropy = mk.token_logprobs(x.reshape(*shape, 9), y.reshape(shape).to(label_dtype), return_entropy=True)
    assert out.shape == entropy.shape == shape
    assert_same_bits(out.flatten(), flat)


def test_a_scalar_label():
    """One row without leading dimensions."""
    out = mk.token_logprobs(numbers([2.0, 0.0])[0], torch.tensor(0), temperature=0.5)
    assert out.shape == ()
    assert out.item() == pytest.approx(-0.01815, abs=5e-6)


def test_ignored_rows_are_zero_and_unused():
    """A negative label: log-probability, entropy and gradient 0, whatever the logits hold."""
    x = numbers([NAN] * 4, [1.0, 2.0, 3.0, 4.0], [INF] * 4).requires_grad_()
    lp, entropy = mk.token_logprobs(x, torch.tensor([-100, 1, -1]), return_entropy=True)
    assert lp[[0, 2]].tolist() == entropy[[0, 2]].tolist() == [0.0, 0.0]
    torch.autograd.backward([lp, entropy], [numbers(NAN, 1.0, NAN).reshape(3), numbers(NAN, 1.0, INF).reshape(3)])
    assert x.grad[[0, 2]].tolist() == [[0.0] * 4] * 2
    assert x.grad[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_temperature_per_token(dtype):
    """temperature may be a tensor shaped like the labels: each row by its own, with no gradient of its own."""
    x, y = torch.tensor(noise(6, 11), dtype=dtype), torch.arange(6)
    temperatures = [0.3, 0.7, 1.0, 1.5, 2.0, 10.0]
    t = torch.tensor(temperatures, dtype=dtype).reshape(2, 3).requires_grad_()
    leaf = x.clone().requires_grad_()
    lp, entropy = mk.token_logprobs(leaf.reshape(2, 3, 11), y.reshape(2, 3), temperature=t, return_entropy=True)
    pairs = [
        oracle.token_logprob(row, n, temperature=s)
        for n, (row, s) in enumerate(zip(x.double().tolist(), t.flatten().double().tolist(), strict=True))
    ]
    assert_close(lp, [p[0] for p in pairs], dtype, scale=10.0)
    assert_close(entropy, [p[1] for p in pairs], dtype, scale=10.0)
    g, h = upstream(lp, 1), upstream(entropy, 2)
    torch.autograd.backward([lp, entropy], [g, h])
    assert t.grad is None
    want = [
        oracle.token_logprob_gradient(row, n, a, b, temperature=s)
        for n, (row, s, a, b) in enumerate(
            zip(
                x.double().tolist(),
                t.flatten().double().tolist(),
                g.flatten().tolist(),
                h.flatten().tolist(),
                strict=True,
            )
        )
    ]
    assert_close(leaf.grad, want, dtype, scale=4.0)


def test_temperature_of_ignored_rows_is_unused():
    """Where the label is negative the row's temperature is not used either."""
    x = torch.tensor(noise(2, 5), dtype=wide(), requires_grad=True)
    lp = mk.token_logprobs(x, torch.tensor([1, -1]), temperature=numbers(1.0, NAN).reshape(2))
    lp.sum().backward()
    assert lp.isfinite().all()
    assert not x.grad[1].any()
    assert x.grad.isfinite().all()


def test_upstream_gradient_per_token():
    """backward([0, 1, -2, 3]): each row's gradient is its own factor times its own."""
    x, y = torch.tensor(noise(4, 6), dtype=wide()), torch.tensor([0, 5, 2, 3])
    factors = [0.0, 1.0, -2.0, 3.0]
    leaf = x.clone().requires_grad_()
    mk.token_logprobs(leaf, y).backward(torch.tensor(factors, dtype=wide()))
    want = [oracle.token_logprob_gradient(r, n, f) for r, n, f in zip(x.tolist(), y.tolist(), factors, strict=True)]
    assert_close(leaf.grad, want)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda o: o.sum(),
        lambda o: o[::2].sum(),
        lambda o: (o * 2.0).mean(),
        lambda o: o.reshape(2, 2).t().flatten()[1:].sum(),
    ],
)
def test_strided_upstream_gradients(reduce):
    """Zero-stride (`sum`) and strided (`[::2]`) upstream gradients are read as they are."""
    x, y = torch.tensor(noise(4, 6), dtype=wide()), torch.tensor([0, 5, 2, 3])
    leaf, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    for out in mk.token_logprobs(leaf, y, return_entropy=True):
        reduce(out).backward(retain_graph=True)
    logp = plain.log_softmax(-1)
    reduce(logp.gather(-1, y[:, None])[:, 0]).backward(retain_graph=True)
    reduce(-(logp.exp() * logp).sum(-1)).backward()
    assert_close(leaf.grad, plain.grad, scale=1.0)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(4, 2, 8, dtype=wide()).transpose(0, 1),
        lambda: torch.randn(3, 5, 8, dtype=wide())[:, :-1],
        lambda: torch.randn(3, 4, 16, dtype=wide())[..., ::2],
        lambda: torch.randn(8, 4, dtype=wide()).t(),
        lambda: torch.randn(1, 8, dtype=wide()).expand(5, 8),
        lambda: torch.randn(4, 9, dtype=wide())[:, 1:],
        lambda: torch.randn(2, 8, 3, dtype=wide()).transpose(1, 2),
    ],
)
def test_any_strides(view):
    """Strided logits and expanded labels give what contiguous ones give, gradients included."""
    torch.manual_seed(0)
    x = view()
    labels = torch.tensor(3).expand(x.shape[:-1])
    results = []
    for logits, y in ((x, labels), (x.contiguous(), labels.contiguous())):
        leaf = logits.detach().requires_grad_()
        out, entropy = mk.token_logprobs(leaf, y, return_entropy=True)
        (gradient,) = torch.autograd.grad([out, entropy], leaf, [upstream(out, 1), upstream(entropy, 2)])
        results.append((out, entropy, gradient))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, scale=1.0)


def test_labels_at_odd_alignment():
    """`y[1:1+N]` starts 8 bytes off a 16-byte border."""
    x = torch.tensor(noise(5, 7), dtype=wide())
    y = torch.tensor([99, 0, 1, 2, 3, 4])[1:]
    assert_same_bits(mk.token_logprobs(x, y), mk.token_logprobs(x, y.clone()))


def test_logits_are_not_overwritten():
    """Two losses may share one leaf: logits keep their bits, and backward can run twice."""
    x = torch.tensor(noise(3, 9), dtype=torch.float32)
    leaf = x.clone().requires_grad_()
    y = torch.tensor([0, 1, 2])
    out = mk.token_logprobs(leaf, y)
    other, entropy = mk.token_logprobs(leaf, y, return_entropy=True)
    out.sum().backward(retain_graph=True)
    first = leaf.grad.clone()
    leaf.grad = None
    entropy.sum().backward(retain_graph=True)
    leaf.grad = None
    out.sum().backward()
    assert_same_bits(leaf.grad, first)
    leaf.grad = None
    other.sum().backward()
    assert_close(leaf.grad, first, torch.float32)
    assert_same_bits(leaf.detach(), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inplace_backward(dtype):
    """On request the gradient is written into the logits' memory: same numbers, and the caller's buffer is used."""
    x, y = torch.tensor(noise(6, 17)).to(dtype), torch.tensor([0, 16, 3, -1, 5, 8])
    gradients = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        # A non-leaf, as the output of a model's head is.
        logits = leaf * 1.0
        out, entropy = mk.token_logprobs(logits, y, return_entropy=True, inplace_backward=inplace)
        torch.autograd.backward([out, entropy], [upstream(out, 1), upstream(entropy, 2)])
        gradients.append(leaf.grad)
    assert_same_bits(gradients[0], gradients[1])


FRESH = """
import torch, marlhf_kernels as mk
torch.manual_seed(0)
device = "{device}"
x, y = torch.randn(64, 300, device=device), torch.arange(64, device=device)
with mk.use_backend("{backend}"):
    gradients = []
    for inplace in (True, True, False):
        leaf = x.clone().requires_grad_()
        mk.token_logprobs(leaf * 1.0, y, inplace_backward=inplace).backward(torch.linspace(-2, 3, 64, device=device))
        gradients.append(leaf.grad)
    print(all(torch.equal(g, gradients[2]) for g in gradients), mk.backends()["{backend}"].available)
"""


def test_the_first_inplace_backward_of_a_process(backend):
    """Whatever a backend tries out or compiles at its first call, it does so once: the gradient is not taken twice."""
    if "token_logprobs_backward_" not in mk.backends()[backend.name].ops:
        pytest.skip(f"the {backend.name} backend has no token_logprobs_backward_ yet")
    code = FRESH.format(device=backend.device, backend=backend.name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_run_and_the_same_numbers_row_by_row(dtype):
    """Twice the same logits: the same bits. One row at a time: the same to float32 rounding."""
    x, y = torch.tensor(noise(9, 65)).to(dtype), torch.arange(9)
    results = []
    for rows in ([slice(0, 9)], [slice(0, 9)], [slice(n, n + 1) for n in range(9)]):
        leaf = x.clone().requires_grad_()
        parts = [mk.token_logprobs(leaf[part], y[part], return_entropy=True) for part in rows]
        outputs = [torch.cat(o) for o in zip(*parts, strict=True)]
        torch.autograd.backward(outputs, [upstream(o, i) for i, o in enumerate(outputs)])
        results.append((*outputs, leaf.grad))
    for first, second, alone in zip(*results, strict=True):
        assert_same_bits(first, second)
        assert_close(alone, first, torch.float32, scale=8.0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :-1],
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :2].transpose(0, 1),
        lambda x: x.flatten()[:28].view(2, 2, 7).transpose(0, 1),
    ],
    ids=["cut", "turned", "cut and turned", "a turned pair of pairs"],
)
def test_inplace_backward_of_strided_logits(view):
    """Logits that are a part of a larger tensor, or transposed: the gradient is written where they lie."""
    # With all sizes alike a wrong comparison of strides takes a part for the whole.
    x = torch.tensor(noise(49, 7), dtype=wide()).reshape(7, 7, 7)
    gradients = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        logits = view(leaf * 1.0)
        out = mk.token_logprobs(logits, torch.arange(logits[..., 0].numel()).view(logits.shape[:2]) % 7,
                                inplace_backward=inplace)  # fmt: skip
        out.backward(upstream(out))
        gradients.append(leaf.grad)
    assert_same_bits(gradients[0], gradients[1])


@pytest.mark.parametrize(("rows", "vocab"), [(40000, 8), (3, 300000)])
def test_more_logits_than_are_taken_at_a_time(rows, vocab, backend):
    """Many rows, each with a temperature of its own, and rows longer than a block."""
    if rows > 1000 and "edge" not in backend.grids:
        pytest.skip("a program for each of 40,000 rows takes Triton's interpreter many minutes")
    torch.manual_seed(0)
    x, y, t = torch.randn(rows, vocab), torch.randint(0, vocab, (rows,)), 0.5 + torch.rand(rows)
    results = []
    for dtype in (None, torch.float32, torch.float64):
        leaf = x.to(dtype or x.dtype).clone().requires_grad_()
        if dtype is None:
            out = mk.token_logprobs(leaf, y, temperature=t)
        else:
            out = (leaf / t.to(dtype)[:, None]).log_softmax(-1).gather(-1, y[:, None])[:, 0]
        out.backward(torch.linspace(-1.0, 2.0, rows, dtype=out.dtype))
        results.append((out, leaf.grad))
    for got, eager_result, exact_result in zip(*results, strict=True):
        budget = 2e-6 * exact_result.abs().max() + (eager_result.double() - exact_result).abs().max()
        assert (got.double() - exact_result).abs().max() <= budget


def test_a_vocabulary_of_one_token():
    """Its log-probability is 0; ignored, it is 0 too."""
    lp, entropy = mk.token_logprobs(numbers([3.0], [NAN]), torch.tensor([0, -1]), return_entropy=True)
    assert lp.tolist() == entropy.tolist() == [0.0, 0.0]


def test_backward_can_be_left_out():
    """Without a gradient wanted the result is a plain tensor."""
    x = torch.tensor(noise(2, 5))
    assert not mk.token_logprobs(x, torch.tensor([0, 1])).requires_grad
    with torch.no_grad():
        assert not mk.token_logprobs(x.requires_grad_(), torch.tensor([0, 1])).requires_grad


@pytest.mark.parametrize("use", [(True, False), (False, True)])
def test_one_of_two_outputs_used(use):
    """Only the log-probability or only the entropy may be differentiated."""
    x, y = torch.tensor(noise(3, 9), dtype=wide()), [0, 8, 4]
    leaf = x.clone().requires_grad_()
    outputs = mk.token_logprobs(leaf, torch.tensor(y), return_entropy=True)
    (outputs[0] if use[0] else outputs[1]).sum().backward()
    want = [
        oracle.token_logprob_gradient(r, n, float(use[0]), float(use[1])) for r, n in zip(x.tolist(), y, strict=True)
    ]
    assert_close(leaf.grad, want)


@pytest.mark.parametrize("autocast", [torch.bfloat16])
def test_autocast_is_ignored(autocast):
    """Under autocast the op gives the same bits."""
    x, y = torch.tensor(noise(3, 9), dtype=torch.float32), torch.tensor([0, 8, 4])
    plain = mk.token_logprobs(x, y)
    with torch.autocast("cpu", dtype=autocast):
        assert_same_bits(mk.token_logprobs(x, y), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_production_vocabulary(dtype, backend):
    """V = 50257 and 128256, logits near -200 among them."""
    if "production" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the production grid")
    for vocab, centre in ((50257, 0.0), (128256, -200.0)):
        case = rows_of_logits._random("production", 2, vocab, centre)
        test_oracle(case, dtype)


def test_rows_further_apart_than_31_bits(backend):
    """A row stride of 2^31 elements: offsets are 64-bit."""
    if "edge" not in backend.grids:
        pytest.skip(f"{backend.name} has no use for this under an interpreter")
    stride, vocab = 2**31, 8
    try:
        # Untouched pages cost nothing: only the two rows are ever written.
        storage = torch.UntypedStorage(2 * (stride + vocab))
    except RuntimeError:
        pytest.skip("4 GB of address space are not to be had here")
    far = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (2, vocab), (stride, 1))
    near = torch.tensor(noise(2, vocab), dtype=torch.bfloat16)
    far.copy_(near)
    labels = torch.tensor([3, 7])
    for a, b in zip(*(mk.token_logprobs(x, labels, return_entropy=True) for x in (far, near)), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("shape", [(1, 65536, 8), (65537, 1, 3)])
def test_more_rows_than_a_grid_axis_holds(shape, backend):
    """T past 65535 with a tiny vocabulary."""
    if "edge" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for 65536 rows")
    torch.manual_seed(0)
    x = torch.randn(shape)
    y = torch.randint(0, shape[-1], shape[:-1])
    out = mk.token_logprobs(x, y)
    assert_close(out, x.log_softmax(-1).gather(-1, y[..., None])[..., 0], torch.float32, scale=8.0)
