"""linear_token_logprobs and linear_macro_policy_loss."""

import math
import random
import subprocess
import sys

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import oracle, shapes
from tests.cases.batches import INF, NAN, make_batch, upstream
from tests.cases.calls import POLICY_STATISTICS
from tests.cases.compare import assert_close, assert_same_bits, largest
from tests.cases.layouts import LAYOUTS
from tests.cases.precision import wide
from tests.cases.ranks import run_ranks
from tests.cases.recorder import RecordOps

pytestmark = pytest.mark.usefixtures("backend")

HIDDEN, VOCAB = 3, 7
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def gauss(*shape, seed=0, dtype=None):
    """Normal numbers of a shape, rounded to the dtype (by default the widest)."""
    rng = random.Random(seed)
    numbers = [rng.gauss(0.0, 1.0) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(numbers, dtype=dtype or wide()).reshape(shape)


def leaves(*tensors):
    return [None if x is None else x.clone().requires_grad_() for x in tensors]


def exact_logprobs(hidden, weight, labels, bias=None, **options):
    """The oracle's log-probabilities, entropies, and a function from upstream gradients to the three gradients."""
    h, w = hidden.double().flatten(0, -2).tolist(), weight.double().tolist()
    y = labels.flatten().tolist()
    b = None if bias is None else bias.double().tolist()
    h = [[0.0] * len(row) if label < 0 else row for row, label in zip(h, y, strict=True)]
    logits = oracle.linear_logits(h, w, b)
    pairs = [oracle.token_logprob(row, label, **options) for row, label in zip(logits, y, strict=True)]

    def backward(g, e):
        d = [
            oracle.token_logprob_gradient(row, label, a, c, **options)
            for row, label, a, c in zip(logits, y, g, e, strict=True)
        ]
        return oracle.linear_gradients(h, w, d)

    return [p[0] for p in pairs], [p[1] for p in pairs], backward


def eager_logprobs(hidden, weight, labels, bias, temperature=1.0, logit_softcap=None):
    """What plain PyTorch gives on inputs raised to float32: the measure of the error budget."""
    h = torch.where(labels.flatten()[:, None] < 0, 0.0, hidden.detach().float().flatten(0, -2)).requires_grad_()
    w = weight.detach().float().requires_grad_()
    b = torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
    b.requires_grad_()
    x = h @ w.t() + b
    if logit_softcap is not None:
        x = logit_softcap * torch.tanh(x / logit_softcap)
    logp = torch.log_softmax(x / temperature, -1)
    keep = labels.flatten() >= 0
    picked = logp.gather(-1, labels.flatten().clamp(min=0)[:, None])[:, 0]
    return torch.where(keep, picked, 0.0), torch.where(keep, -(logp.exp() * logp).sum(-1), 0.0), (h, w, b)


LABELS = torch.tensor([[0, 6, -1, 3], [2, -100, 5, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"temperature": 0.6, "logit_softcap": 1.5}], ids=str)
def test_logprobs_oracle(dtype, with_bias, options):
    """Log-probability, entropy and all three gradients equal the loop oracle within the error budget."""
    hidden, weight = gauss(2, 4, HIDDEN, dtype=dtype), gauss(VOCAB, HIDDEN, seed=1, dtype=dtype)
    bias = gauss(VOCAB, seed=2, dtype=dtype) if with_bias else None
    hidden[0, 2], hidden[1, 1] = NAN, INF
    h, w, b = leaves(hidden, weight, bias)
    lp, entropy = mk.linear_token_logprobs(h, w, LABELS, bias=b, return_entropy=True, **options)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert (lp.dtype, entropy.dtype, lp.shape) == (out_dtype, out_dtype, LABELS.shape)
    want_lp, want_entropy, backward = exact_logprobs(hidden, weight, LABELS, bias, **options)
    low = dtype != torch.float64
    eager_lp, eager_entropy, eager_leaves = eager_logprobs(hidden, weight, LABELS, bias, **options)
    assert_close(lp, want_lp, dtype, eager=eager_lp if low else None, what="logprob")
    assert_close(entropy, want_entropy, dtype, eager=eager_entropy if low else None, what="entropy")
    g, e = upstream(lp, 1), upstream(entropy, 2)
    torch.autograd.backward([lp, entropy], [g, e])
    torch.autograd.backward([eager_lp, eager_entropy], [g.float().flatten(), e.float().flatten()])
    want = backward(g.double().flatten().tolist(), e.double().flatten().tolist())
    for leaf, exact, eager in zip((h, w, b), want, eager_leaves, strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == dtype
            assert leaf.grad.shape == leaf.shape
            assert_close(leaf.grad, exact, dtype, eager=eager.grad if low else None, what="gradient")


@pytest.mark.parametrize("chunk_tokens", [None, 1, 2, 3, 5, 7, 8, 9, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logprobs_equal_the_materialised_way(chunk_tokens, with_bias):
    """For every chunk size: token_logprobs of hidden W^T + bias, in value and all gradients."""
    hidden, weight = gauss(2, 4, HIDDEN), gauss(VOCAB, HIDDEN, seed=1)
    bias = gauss(VOCAB, seed=2) if with_bias else None
    results = []
    for fused in (True, False):
        h, w, b = leaves(hidden, weight, bias)
        if fused:
            out = mk.linear_token_logprobs(h, w, LABELS, bias=b, return_entropy=True, chunk_tokens=chunk_tokens)
        else:
            logits = h @ w.t() + (0.0 if b is None else b)
            out = mk.token_logprobs(logits, LABELS, return_entropy=True)
        torch.autograd.backward(out, [upstream(o, i) for i, o in enumerate(out)])
        results.append([*out, h.grad, w.grad, *([b.grad] if with_bias else [])])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, scale=4.0)


def test_logprobs_temperature_per_token():
    """temperature may be one number a row, each for its own row, and gets no gradient."""
    hidden, weight = gauss(4, HIDDEN), gauss(VOCAB, HIDDEN, seed=1)
    labels, temperatures = torch.tensor([0, 6, 2, 3]), [0.5, 1.0, 2.0, 0.7]
    h, w, t = leaves(hidden, weight, torch.tensor(temperatures, dtype=wide()))
    lp = mk.linear_token_logprobs(h, w, labels, temperature=t, chunk_tokens=3)
    g = upstream(lp)
    lp.backward(g)
    assert t.grad is None
    h_rows, w_rows = hidden.double().tolist(), weight.double().tolist()
    logits = oracle.linear_logits(h_rows, w_rows)
    rows = list(zip(logits, labels.tolist(), t.tolist(), g.tolist(), strict=True))
    assert_close(lp, [oracle.token_logprob(x, y, s)[0] for x, y, s, _ in rows])
    d = [oracle.token_logprob_gradient(x, y, a, temperature=s) for x, y, s, a in rows]
    for leaf, want in zip((h, w), oracle.linear_gradients(h_rows, w_rows, d), strict=False):
        assert_close(leaf.grad, want, scale=4.0)


def test_labels_of_both_integer_types():
    """int32 labels give what int64 labels give, in both ops."""
    hidden, weight = gauss(2, 4, HIDDEN), gauss(VOCAB, HIDDEN, seed=1)
    assert_same_bits(
        mk.linear_token_logprobs(hidden, weight, LABELS.int()), mk.linear_token_logprobs(hidden, weight, LABELS)
    )
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed")
    narrow = {**data, "labels": data["labels"].int()}
    names = ("hidden", "weight", "bias")
    for a, b in zip(*(run_linear(d, *(d[n] for n in names), {}) for d in (narrow, data)), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("chunk_tokens", [None, 1])
def test_banned_vocabulary(chunk_tokens):
    """A bias of -inf bans a token: its log-probability is -inf, the entropy ln 2 and every gradient finite."""
    h, w = leaves(torch.zeros(2, HIDDEN, dtype=wide()), gauss(3, HIDDEN))
    b = torch.tensor([0.0, 0.0, -INF], dtype=wide()).requires_grad_()
    lp, entropy = mk.linear_token_logprobs(
        h, w, torch.tensor([0, 2]), bias=b, return_entropy=True, chunk_tokens=chunk_tokens
    )
    assert lp[1].item() == -INF
    assert_close([lp[0], *entropy], [-math.log(2.0), *[math.log(2.0)] * 2])
    (lp[0] + entropy.sum()).backward()
    assert_close(b.grad, [0.5, -0.5, 0.0])
    assert h.grad.isfinite().all()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("reduce", [lambda o: o.sum(), lambda o: o[:, ::2].sum(), lambda o: (o.t() * 2.0)[1:].sum()])
def test_strided_upstream_gradients(reduce):
    """Zero-stride, strided and transposed upstream gradients equal those through logits that are there."""
    gradients = []
    for fused in (True, False):
        h, w = leaves(gauss(2, 4, HIDDEN), gauss(VOCAB, HIDDEN, seed=1))
        if fused:
            outputs = mk.linear_token_logprobs(h, w, LABELS, return_entropy=True, chunk_tokens=3)
        else:
            outputs = mk.token_logprobs(h @ w.t(), LABELS, return_entropy=True)
        sum(reduce(o) for o in outputs).backward()
        gradients.append((h.grad, w.grad))
    for a, b in zip(*gradients, strict=True):
        assert a.any()
        assert_close(a, b, scale=4.0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1,), ()])
def test_logprobs_of_few_rows(shape):
    """No row at all, one row, a single vector: gradients are zeros or right, never missing."""
    h, w = leaves(gauss(*shape, HIDDEN), gauss(VOCAB, HIDDEN, seed=1))
    out = mk.linear_token_logprobs(h, w, torch.zeros(shape, dtype=torch.int64))
    assert out.shape == torch.Size(shape)
    out.sum().backward()
    assert h.grad.shape == h.shape
    assert w.grad.shape == w.shape
    assert w.grad.isfinite().all()
    assert w.grad.any() == (torch.Size(shape).numel() > 0)


def test_a_vocabulary_larger_than_a_chunk():
    """More tokens than logits are made at a time: one row after the other."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 1), torch.randn(2**21 + 1, 1)
    labels = torch.tensor([2**21, 5])
    want = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert_close(mk.linear_token_logprobs(hidden, weight, labels), want, torch.float32, scale=20.0)


def test_frozen_parts_get_no_gradient():
    """Only what wants a gradient gets one: hidden alone, weight alone, bias alone."""
    for i in range(3):
        tensors = [gauss(4, HIDDEN), gauss(VOCAB, HIDDEN, seed=1), gauss(VOCAB, seed=2)]
        tensors[i] = tensors[i].requires_grad_()
        labels = torch.tensor([0, 1, 2, 3])
        mk.linear_token_logprobs(tensors[0], tensors[1], labels, bias=tensors[2], chunk_tokens=3).sum().backward()
        want = mk.token_logprobs(tensors[0] @ tensors[1].t() + tensors[2], labels).sum()
        (gradient,) = torch.autograd.grad(want, tensors[i])
        assert_close(tensors[i].grad, gradient, scale=4.0)


def test_weight_gradient_does_not_drift_in_bf16():
    """16384 equal rows in small chunks: the bf16 weight gradient is 16384 times one row's, to one rounding."""
    rows = 16384
    one = gauss(1, 8, dtype=torch.bfloat16)
    weight = gauss(5, 8, seed=1, dtype=torch.bfloat16)
    gradients = []
    for n in (1, rows):
        w = weight.clone().requires_grad_()
        bias = torch.zeros(5, dtype=torch.bfloat16, requires_grad=True)
        out = mk.linear_token_logprobs(
            one.expand(n, -1), w, torch.ones(n, dtype=torch.int64), bias=bias, chunk_tokens=64
        )
        out.backward(torch.ones(n))
        gradients.append((w.grad.double() * (rows / n), bias.grad.double() * (rows / n)))
    for single, many in zip(*gradients, strict=True):
        assert_close(many, single, torch.float32, scale=0.0 + single.abs().max().item() * 2.0**-8 / 2e-6)


def test_strided_weight_and_hidden():
    """A transposed weight, an expanded hidden state and strided labels give what contiguous ones give."""
    hidden, weight = gauss(4, 2, HIDDEN).transpose(0, 1), gauss(HIDDEN, VOCAB, seed=1).t()
    labels = torch.tensor([[0, 9], [6, 9], [2, 9], [3, 9], [1, 9], [5, 9], [4, 9], [0, 9]])[:, 0].reshape(2, 4)
    results = []
    for make in (lambda x: x, lambda x: x.contiguous()):
        h, w = (make(x).detach().requires_grad_() for x in (hidden, weight))
        out = mk.linear_token_logprobs(h, w, labels, chunk_tokens=3)
        results.append((out, *torch.autograd.grad(out, (h, w), upstream(out))))
    for a, b in zip(*results, strict=True):
        assert_close(a, b, scale=4.0)


@pytest.mark.slow
def test_production_vocabulary(backend):
    """V = 50257 from 16-bit hidden states and weights, against the logits in float64, within eager float32's error."""
    if "production" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the production grid")
    torch.manual_seed(0)
    hidden, weight = torch.randn(96, 64).bfloat16(), (0.2 * torch.randn(50257, 64)).bfloat16()
    labels = torch.randint(0, 50257, (96,))
    results = []
    for dtype in (None, torch.float32, torch.float64):
        h, w = (x.to(dtype or x.dtype).clone().requires_grad_() for x in (hidden, weight))
        if dtype is None:
            lp = mk.linear_token_logprobs(h, w, labels)
        else:
            lp = (h @ w.t()).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        lp.sum().backward()
        results.append((lp, h.grad, w.grad))
    for fused, eager, exact in zip(*results, strict=True):
        assert_close(fused, exact, torch.float32, eager=eager)


def test_autocast_casts_the_linear_ops():
    """Under autocast hidden, weight and bias are taken in its dtype; the gradient has the input's own."""
    h, w, b = leaves(
        gauss(4, HIDDEN, dtype=torch.float32),
        gauss(VOCAB, HIDDEN, seed=1, dtype=torch.float32),
        gauss(VOCAB, seed=2, dtype=torch.float32),
    )
    labels = torch.tensor([0, 1, 2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mk.linear_token_logprobs(h, w, labels, bias=b)
    out.sum().backward()
    assert {x.grad.dtype for x in (h, w, b)} == {torch.float32}
    cast = [x.detach().bfloat16() for x in (h, w, b)]
    assert_same_bits(out.detach(), mk.linear_token_logprobs(cast[0], cast[1], labels, bias=cast[2]))
    assert not torch.equal(out, mk.linear_token_logprobs(h, w, labels, bias=b))


def test_autocast_casts_the_linear_loss():
    """The same for linear_macro_policy_loss; advantages and old log-probabilities stay as they are."""
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed", torch.float32)
    names = ("hidden", "weight", "bias")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run_linear(data, *(data[n] for n in names), {"entropy_coef": 0.1})
    want = run_linear(data, *(data[n].bfloat16() for n in names), {"entropy_coef": 0.1})
    for a, b in zip(out, want, strict=True):
        assert_same_bits(a, b)


MEMORY = """
import resource, torch, marlhf_kernels as mk
torch.set_num_threads(1)
N, V, H = 2048, 16384, 8
hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
labels, ids = torch.zeros(1, N, dtype=torch.int64), torch.zeros(1, N, dtype=torch.int32)
zeros = torch.zeros(1, N)
def run(n):
    h = hidden[:n]
    mk.linear_token_logprobs(h, weight, labels[0, :n], return_entropy=True, chunk_tokens=32)[0].sum().backward()
    args = (labels[:, :n], zeros[:, :n], zeros[:, :n] + 1, ids[:, :n])
    options = dict(entropy_coef=0.1, ref_logprobs=zeros[:, :n], kl_loss_coef=0.1, chunk_tokens=32)
    mk.linear_macro_policy_loss(h[None], weight, *args, **options).loss.backward()
run(32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(N)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read the way Linux reports it")
def test_logits_are_never_there_for_all_tokens():
    """2048 x 16384 float32 logits are 128 MB; forward and backward of both ops grow by less than 32 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 32.0


OPTIONS = [
    {},
    {"temperature": 0.7, "logit_softcap": 2.0},
    {"ratio_level": "macro"},
    {"ratio_level": "macro_mean", "normalize_by": "sequences"},
    {"ratio_level": "macro", "dual_clip": 1.5, "clip_low": 0.1, "clip_high": 0.3, "normalizer": 5.0},
    {"entropy_coef": 0.3},
    {"kl_loss_coef": 0.5},
    {"entropy_coef": 0.3, "kl_loss_coef": 0.5, "token_normalizer": 11.0},
    {"entropy_coef": 0.3, "kl_loss_coef": 0.5, "normalizer": 5.0, "ratio_level": "macro"},
]


def linear_batch(ids, layout, dtype=None, poison=NAN, with_bias=True):
    """Arguments of linear_macro_policy_loss: near-policy old log-probabilities, poison wherever no action is."""
    batch = make_batch(ids, layout, dtype, poison)
    dtype = dtype or wide()
    rng = random.Random(5)
    weight, bias = gauss(VOCAB, HIDDEN, seed=1, dtype=dtype), gauss(VOCAB, seed=2, dtype=dtype)
    hidden, labels, old, ref = [], [], [], []
    for row in ids:
        h = [[rng.gauss(0.0, 1.0) for _ in range(HIDDEN)] for _ in row]
        y = [rng.randrange(VOCAB) for _ in row]
        real = [0 <= k <= t for t, k in enumerate(row)]
        lp = [oracle.token_logprob(x, n)[0] for x, n in zip(_logits(h, weight, bias), y, strict=True)]
        noisy = [[v + rng.gauss(0.0, 0.3) for v in lp] for _ in range(2)]
        hidden.append([v if r else [poison] * HIDDEN for v, r in zip(h, real, strict=True)])
        # A label at a masked place is as unused as the rest: out of range on purpose.
        labels.append([n if r else VOCAB + 1000 for n, r in zip(y, real, strict=True)])
        old.append([v if r else poison for v, r in zip(noisy[0], real, strict=True)])
        ref.append([v if r else poison for v, r in zip(noisy[1], real, strict=True)])
    lay = batch.layout.lay
    stacked = torch.stack([lay([[v[i] for v in row] for row in hidden], poison, dtype) for i in range(HIDDEN)], dim=-1)
    return {
        "batch": batch,
        "hidden": stacked,
        "weight": weight,
        "bias": bias if with_bias else None,
        "labels": lay(labels, VOCAB + 1000, torch.int64),
        "old": lay(old, poison, dtype),
        "ref": lay(ref, poison, dtype),
    }


def _logits(hidden, weight, bias):
    return oracle.linear_logits(hidden, weight.double().tolist(), bias.double().tolist())


def run_linear(data, h, w, b, options):
    batch = data["batch"]
    return mk.linear_macro_policy_loss(
        h, w, data["labels"], data["old"], batch["advantages"], batch.macro_ids,
        bias=b, ref_logprobs=data["ref"], **options, **batch.keywords,
    )  # fmt: skip


def exact_linear(data, options):
    batch = data["batch"]
    rows = [batch.layout.rows(data["hidden"][..., i]) for i in range(HIDDEN)]
    hidden = [[list(v) for v in zip(*(part[b] for part in rows), strict=True)] for b in range(len(batch.ids))]
    return oracle.linear_macro_policy_loss(
        hidden, data["weight"].double().tolist(), [[int(v) for v in row] for row in batch.layout.rows(data["labels"])],
        batch.layout.rows(data["old"]), batch.lists("advantages"), batch.ids,
        bias=None if data["bias"] is None else data["bias"].double().tolist(),
        ref_logprobs=batch.layout.rows(data["ref"]), **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_oracle(options, layout, dtype):
    """Loss, statistics and all gradients of every option set equal the loop oracle, in every layout."""
    names = (
        "ragged",
        "holes inside macro actions",
        "a row without actions among others",
        "no action at all",
        "no rows",
    )
    for name in names:
        data = linear_batch(shapes.BY_HAND[name], layout, dtype)
        h, w, b = leaves(data["hidden"], data["weight"], data["bias"])
        out = run_linear(data, h, w, b, {**options, "chunk_tokens": 3})
        want = exact_linear(data, options)
        assert_close([out.loss], [want.loss], dtype, scale=4.0, what=name)
        statistics = [getattr(out, s) for s in POLICY_STATISTICS]
        exact = [want.statistics[s] for s in POLICY_STATISTICS]
        assert_close(statistics, exact, dtype, scale=max(4.0, largest(exact)), what=name)
        (out.loss * -2.0).backward()
        lay = data["batch"].layout.lay
        for i in range(HIDDEN):
            part = lay([[-2.0 * v[i] for v in row] for row in want.hidden], 0.0)
            assert_close(h.grad[..., i], part, dtype, scale=1.0, what=f"{name} hidden")
        assert_close(w.grad, [[-2.0 * v for v in row] for row in want.weight], dtype, scale=4.0, what=f"{name} weight")
        assert_close(b.grad, [-2.0 * v for v in want.bias], dtype, scale=4.0, what=f"{name} bias")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 2, 4, 14, 15, 100])
def test_loss_equals_the_materialised_way(options, chunk_tokens):
    """For every chunk size: logits, token_logprobs, macro_policy_loss and the penalties written out in PyTorch."""
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed", poison=0.5)
    batch = data["batch"]
    mask = batch.mask
    labels = torch.where(mask, data["labels"], -1)
    results = []
    for fused in (True, False):
        h, w, b = leaves(data["hidden"], data["weight"], data["bias"])
        if fused:
            out = run_linear(data, h, w, b, {**options, "chunk_tokens": chunk_tokens})
            loss, statistics = out.loss, out[1:]
        else:
            rest = dict(options)
            softmax = {k: rest.pop(k) for k in ("temperature", "logit_softcap") if k in rest}
            entropy_coef, kl_coef = rest.pop("entropy_coef", 0.0), rest.pop("kl_loss_coef", 0.0)
            count = rest.pop("token_normalizer", mask.sum())
            lp, entropy = mk.token_logprobs(h @ w.t() + b, labels, return_entropy=True, **softmax)
            out = mk.macro_policy_loss(lp, data["old"], batch["advantages"], batch.macro_ids, **rest)
            d = torch.where(mask, lp - data["ref"], 0.0)
            loss = out.loss + kl_coef * (d * d / 2).sum() / count - entropy_coef * entropy.sum() / count
            statistics = out[1:]
        loss.backward()
        results.append([loss, *statistics, h.grad, w.grad, b.grad])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, scale=4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_sixteen_bit_inputs(dtype):
    """16-bit hidden states and weights: float32 loss within the budget, gradients in the inputs' dtype."""
    data = linear_batch(shapes.random_rows(3, 20, seed=2), "mixed", dtype)
    h, w, b = leaves(data["hidden"], data["weight"], data["bias"])
    out = run_linear(data, h, w, b, {"ratio_level": "macro_mean", "entropy_coef": 0.1})
    out.loss.backward()
    want = exact_linear(data, {"ratio_level": "macro_mean", "entropy_coef": 0.1})
    assert out.loss.dtype == torch.float32
    assert_close([out.loss], [want.loss], torch.float32, scale=4.0)
    assert {x.grad.dtype for x in (h, w, b)} == {dtype}
    assert_close(w.grad, want.weight, torch.float32)
    assert_close(b.grad, want.bias, torch.float32)


@pytest.mark.parametrize("options", OPTIONS[-2:], ids=str)
@pytest.mark.parametrize("layout", ["mixed", "packed with a tail"])
def test_masked_places_are_never_used(options, layout):
    """NaN, inf and labels out of range where the id is -1 change no bit of loss and gradients."""
    results = []
    for poison in (0.5, NAN, INF, -INF):
        data = linear_batch(shapes.BY_HAND["holes inside macro actions"], layout, poison=poison)
        h, w, b = leaves(data["hidden"], data["weight"], data["bias"])
        out = run_linear(data, h, w, b, options)
        out.loss.backward()
        results.append([*out, h.grad, w.grad, b.grad])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_same_bits(a.detach(), b.detach())


def test_kl_as_a_loss_by_hand():
    """Policy (.8, .2), reference (.5, .5), tokens drawn by their probabilities: half of d^2/2 is .0862, dKL .2218."""
    # Two labels, weighted .8 and .2 by the number of their tokens: the mean over the policy's own tokens.
    labels = torch.tensor([[0, 0, 0, 0, 1]])
    weight = torch.tensor([[0.8], [0.2]], dtype=wide()).log().requires_grad_()
    hidden = torch.ones(1, 5, 1, dtype=wide())
    zeros = torch.zeros(1, 5, dtype=wide())
    ref = torch.full((1, 5), 0.5, dtype=wide()).log()
    ids = torch.arange(5, dtype=torch.int32)[None]
    out = mk.linear_macro_policy_loss(hidden, weight, labels, zeros, zeros, ids, ref_logprobs=ref, kl_loss_coef=0.5)
    out.loss.backward()
    # d is ln 1.6 = .4700 four times and ln .4 = -.9163 once: (4 * .11045 + .41980) / 5 = .17232, of which a half.
    assert out.loss.item() == pytest.approx(0.5 * 0.17232, abs=5e-6)
    assert weight.grad.flatten().tolist() == pytest.approx([0.5 * 0.2218, -0.5 * 0.2218], abs=2e-5)


def test_entropy_bonus_by_hand():
    """Probabilities (.8, .2): loss is -coef * H, and a step against its gradient flattens the distribution."""
    weight = torch.tensor([[0.8], [0.2]], dtype=wide()).log().requires_grad_()
    zeros = torch.zeros(1, 2, dtype=wide())
    out = mk.linear_macro_policy_loss(
        torch.ones(1, 2, 1, dtype=wide()), weight, torch.tensor([[0, 1]]), zeros, zeros,
        torch.tensor([[0, 1]], dtype=torch.int32), entropy_coef=0.5,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(-0.5 * 0.5004, abs=5e-5)
    out.loss.backward()
    assert weight.grad.flatten().tolist() == pytest.approx([0.5 * 0.2218, -0.5 * 0.2218], abs=5e-5)


def test_both_penalties_add_up():
    """The KL loss and the entropy bonus of the two tests above, at once."""
    weight = torch.tensor([[0.8], [0.2]], dtype=wide()).log().requires_grad_()
    zeros = torch.zeros(1, 5, dtype=wide())
    out = mk.linear_macro_policy_loss(
        torch.ones(1, 5, 1, dtype=wide()), weight, torch.tensor([[0, 0, 0, 0, 1]]), zeros, zeros,
        torch.arange(5, dtype=torch.int32)[None], ref_logprobs=torch.full((1, 5), 0.5, dtype=wide()).log(),
        kl_loss_coef=0.5, entropy_coef=0.25,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(0.5 * 0.17232 - 0.25 * 0.5004, abs=5e-5)
    out.loss.backward()
    assert weight.grad.flatten().tolist() == pytest.approx([0.75 * 0.2218, -0.75 * 0.2218], abs=5e-5)


@pytest.mark.parametrize("token_normalizer", [None, 0, 5.0])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_no_action_token(shape, token_normalizer):
    """No action at all: loss 0 and zero gradients with every penalty on."""
    h, w = leaves(torch.full((*shape, HIDDEN), NAN, dtype=wide()), gauss(VOCAB, HIDDEN))
    nothing = torch.full(shape, NAN, dtype=wide())
    out = mk.linear_macro_policy_loss(
        h, w, torch.zeros(shape, dtype=torch.int64), nothing, nothing, torch.full(shape, -1, dtype=torch.int32),
        ref_logprobs=nothing, kl_loss_coef=0.5, entropy_coef=0.5, token_normalizer=token_normalizer, normalizer=0,
    )  # fmt: skip
    out.loss.backward()
    assert [x.item() for x in out] == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert not h.grad.any()
    assert not w.grad.any()


def test_microbatches_add_up():
    """With both normalizers given, the gradients of any split into microbatches add up to the whole's."""
    data = linear_batch(shapes.BY_HAND["ragged"], "right", poison=0.5)
    batch = data["batch"]
    options = {"entropy_coef": 0.3, "kl_loss_coef": 0.5, "normalizer": 7.0, "token_normalizer": 13.0}
    gradients = []
    for size in (1, 3):
        w = data["weight"].clone().requires_grad_()
        for at in range(0, 3, size):
            part = slice(at, at + size)
            mk.linear_macro_policy_loss(
                data["hidden"][part], w, data["labels"][part], data["old"][part], batch["advantages"][part],
                batch.macro_ids[part], ref_logprobs=data["ref"][part], **options,
            ).loss.backward()  # fmt: skip
        gradients.append(w.grad)
    assert_close(*gradients, scale=1.0)


def test_coefficients_may_be_tensors():
    """entropy_coef, kl_loss_coef and token_normalizer as 0-d tensors give what numbers give; 0 as a tensor too."""
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed")
    for numbers in (
        {"entropy_coef": 0.3, "kl_loss_coef": 0.5, "token_normalizer": 11.0},
        {"entropy_coef": 0.0, "kl_loss_coef": 0.0},
    ):
        tensors = {k: torch.tensor(v, dtype=wide()) for k, v in numbers.items()}
        a, b = (run_linear(data, *leaves(data["hidden"], data["weight"], data["bias"]), o) for o in (numbers, tensors))
        for x, y in zip(a, b, strict=True):
            assert_close([x], [y], scale=4.0)


def test_the_same_bits_every_run():
    """Twice the same inputs: the same bits."""
    data = linear_batch(shapes.random_rows(4, 33), "mixed", torch.float32)
    results = []
    for _ in range(2):
        h, w, b = leaves(data["hidden"], data["weight"], data["bias"])
        out = run_linear(data, h, w, b, {"chunk_tokens": 7, "entropy_coef": 0.1})
        out.loss.backward()
        results.append([*out, h.grad, w.grad, b.grad])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_opcheck():
    """Both ops are well-made torch.library ops, with and without gradients."""
    for learning in (True, False):
        data = linear_batch(shapes.BY_HAND["holes inside macro actions"], "mixed", poison=0.5)
        h, w, b = (data[n].clone().requires_grad_(learning) for n in ("hidden", "weight", "bias"))
        with RecordOps() as recorder:
            run_linear(data, h, w, b, {"entropy_coef": 0.1, "kl_loss_coef": 0.2, "chunk_tokens": 3})
            mk.linear_token_logprobs(h, w, data["labels"] % VOCAB, bias=b, return_entropy=True, chunk_tokens=3)
        assert len(recorder.calls) >= 2
        for op, args, kwargs in recorder.calls:
            torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(options, backend):
    """Analytic against numeric gradients of hidden, weight and bias."""
    if backend.widest != torch.float64:
        pytest.skip("numeric gradients need float64, which runs on the reference")
    data = linear_batch(shapes.BY_HAND["holes inside macro actions"], "mixed", poison=0.5)
    tensors = leaves(data["hidden"], data["weight"], data["bias"])
    assert torch.autograd.gradcheck(lambda h, w, b: run_linear(data, h, w, b, options).loss, tensors)


@pytest.mark.parametrize("op", ["logprobs", "loss", "penalties"])
def test_double_backward_raises(op):
    """A second derivative is an error."""
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed", poison=0.5)
    h, w, b = leaves(data["hidden"], data["weight"], data["bias"])
    if op == "logprobs":
        out = mk.linear_token_logprobs(h, w, data["labels"] % VOCAB, bias=b)
    else:
        options = {"entropy_coef": 0.1, "kl_loss_coef": 0.2} if op == "penalties" else {}
        out = run_linear(data, h, w, b, options).loss
    (gradient,) = torch.autograd.grad((out**2).sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        gradient.sum().backward()


def test_only_the_head_learns():
    """Gradients flow to hidden, weight and bias; to old and reference log-probabilities and advantages none."""
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed", poison=0.5)
    h, w, b, old, ref, advantages = leaves(
        *(data[n] for n in ("hidden", "weight", "bias", "old", "ref")), data["batch"]["advantages"]
    )
    frozen = {**data, "old": old, "ref": ref, "batch": data["batch"].with_fields(advantages=advantages)}
    out = run_linear(frozen, h, w, b, {"entropy_coef": 0.1, "kl_loss_coef": 0.2})
    assert [x.requires_grad for x in out] == [True, False, False, False, False]
    out.loss.backward()
    assert all(x.grad.any() for x in (h, w, b))
    assert [x.grad for x in (old, ref, advantages)] == [None] * 3
    assert not run_linear(frozen, h.detach(), w.detach(), b.detach(), {"kl_loss_coef": 0.2}).loss.requires_grad


@pytest.mark.parametrize("hint", [0, 1, 5, 10**6])
def test_max_seqlen_is_only_a_hint(hint):
    """max_seqlen may be anything, too small too."""
    data = linear_batch(shapes.BY_HAND["holes inside macro actions"], "packed", poison=0.5)
    names, options = ("hidden", "weight", "bias"), {"ratio_level": "macro", "entropy_coef": 0.1, "kl_loss_coef": 0.2}
    want = run_linear(data, *(data[n] for n in names), options)
    got = run_linear(data, *(data[n] for n in names), {**options, "max_seqlen": hint})
    for a, b in zip(got, want, strict=True):
        assert_close([a], [b], scale=4.0)


def test_five_values_of_both_coefficients_compile_once():
    """entropy_coef and kl_loss_coef as 0-d tensors: fullgraph, one graph, right numbers."""
    from tests.kernels.test_compile import Counter

    torch._dynamo.reset()
    data = linear_batch(shapes.BY_HAND["ragged"], "mixed", torch.float32, poison=0.5)
    counter = Counter()

    def step(entropy_coef, kl_coef, h, w, b):
        options = {"entropy_coef": entropy_coef, "kl_loss_coef": kl_coef, "chunk_tokens": 4}
        return run_linear(data, h, w, b, options).loss

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for i in range(5):
        numbers = (torch.tensor(0.1 * i), torch.tensor(0.2 * i))
        tensors = [leaves(data["hidden"], data["weight"], data["bias"]) for _ in range(2)]
        got, want = compiled(*numbers, *tensors[0]), step(*numbers, *tensors[1])
        got.backward()
        want.backward()
        assert_close([got], [want], torch.float32, scale=4.0)
        for a, b in zip(*tensors, strict=True):
            assert_close(a.grad, b.grad, torch.float32)
    assert counter.graphs == 1


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("banned", [False, True])
def test_slices_of_the_vocabulary_merge(with_entropy, banned):
    """What two ranks with a slice each compute, and what comes of it: the whole vocabulary's results and gradients."""
    labels = torch.tensor([0, 3, 4, 6, -1, 2])
    hidden, weight, bias = gauss(6, HIDDEN), gauss(VOCAB, HIDDEN, seed=1), gauss(VOCAB, seed=2)
    hidden[4] = NAN
    if banned:
        bias[SLICES[1]] = -INF
        labels[labels >= 4] = 1
    one = torch.ones((), dtype=torch.float64)
    rest = [(torch.tensor(part.start), weight[part], bias[part]) for part in SLICES]
    forward = torch.ops.marlhf.linear_token_logprobs
    parts = []
    for first, w, b in rest:
        lp, entropy, maximum, log_sum = forward(hidden, w, labels, b, one, None, with_entropy, 4, first)
        parts.append(torch.stack([lp, *([entropy] if with_entropy else []), maximum, log_sum]))
    lp, entropy, maximum, log_sum = torch.ops.marlhf.merge_slices(torch.stack(parts), labels, with_entropy)
    want_lp, want_entropy, backward = exact_logprobs(hidden, weight, labels, bias)
    assert_close(lp, want_lp, scale=8.0)
    if with_entropy:
        assert_close(entropy, want_entropy, scale=8.0)
    else:
        assert entropy.numel() == 0
    assert not any(x[4].any() for x in (lp, maximum, log_sum))
    g = upstream(lp)
    e = upstream(lp, 2) if with_entropy else torch.zeros_like(lp)
    d_hidden, d_weight, d_bias = backward(g.double().tolist(), e.double().tolist())
    total = torch.zeros_like(hidden)
    for (first, w, b), part in zip(rest, SLICES, strict=True):
        grads = torch.ops.marlhf.linear_token_logprobs_backward(
            g, e if with_entropy else None, hidden, w, labels, b, one, None, 4, first, maximum, log_sum, entropy,
            True, True, True,
        )  # fmt: skip
        total += grads[0]
        assert_close(grads[1], d_weight[part], scale=8.0)
        assert_close(grads[2], d_bias[part], scale=8.0)
    assert_close(total, d_hidden, scale=8.0)


# The vocabulary in two unequal slices, in rank order.
SLICES = (slice(0, 4), slice(4, VOCAB))


def _on_rank(rank, world):
    group = torch.distributed.group.WORLD
    hidden, weight, bias = (x.double() for x in (gauss(8, HIDDEN), gauss(VOCAB, HIDDEN, seed=1), gauss(VOCAB, seed=2)))
    labels = LABELS.flatten()
    h, w, b = leaves(hidden, weight[SLICES[rank]], bias[SLICES[rank]])
    out = mk.linear_token_logprobs(
        h, w, labels, bias=b, return_entropy=True, temperature=0.7, logit_softcap=3.0, chunk_tokens=3, vocab_group=group
    )
    torch.autograd.backward(out, [upstream(o, i) for i, o in enumerate(out)])
    first = [x.tolist() for x in (*out, h.grad, w.grad, b.grad)]
    data = linear_batch(shapes.BY_HAND["holes inside macro actions"], "mixed")
    h, w, b = leaves(data["hidden"], data["weight"][SLICES[rank]], data["bias"][SLICES[rank]])
    options = {"entropy_coef": 0.3, "kl_loss_coef": 0.5, "ratio_level": "macro", "chunk_tokens": 3}
    out = run_linear(data, h, w, b, {**options, "vocab_group": group})
    out.loss.backward()
    return first, [x.tolist() for x in (*out, h.grad, w.grad, b.grad)]


def test_vocabulary_over_two_ranks(backend):
    """Slices of the weight on two ranks: everyone's results, the whole hidden gradient, each slice's own gradient."""
    if backend.widest != torch.float64:
        pytest.skip("the ranks compute in float64, which runs on the reference")
    results = run_ranks(_on_rank, 2)
    hidden, weight, bias = gauss(8, HIDDEN), gauss(VOCAB, HIDDEN, seed=1), gauss(VOCAB, seed=2)
    options = {"temperature": 0.7, "logit_softcap": 3.0}
    lp, entropy, backward = exact_logprobs(hidden, weight, LABELS.flatten(), bias, **options)
    g, e = (upstream(torch.zeros(8, dtype=torch.float64), i).tolist() for i in range(2))
    d_hidden, d_weight, d_bias = backward(g, e)
    data = linear_batch(shapes.BY_HAND["holes inside macro actions"], "mixed")
    want = exact_linear(data, {"entropy_coef": 0.3, "kl_loss_coef": 0.5, "ratio_level": "macro"})
    for rank, (first, second) in enumerate(results):
        part = SLICES[rank]
        for got, exact in zip(first, (lp, entropy, d_hidden, d_weight[part], d_bias[part]), strict=True):
            assert_close(got, exact, scale=4.0)
        statistics = [want.statistics[s] for s in POLICY_STATISTICS]
        assert_close(second[:5], [want.loss, *statistics], scale=4.0)
        assert_close(second[6:], [want.weight[part], want.bias[part]], scale=4.0)
        for i in range(HIDDEN):
            laid = data["batch"].layout.lay([[v[i] for v in row] for row in want.hidden], 0.0)
            assert_close(torch.tensor(second[5], dtype=torch.float64)[..., i], laid, scale=4.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": torch.zeros(VOCAB, HIDDEN + 1)}, "weight"),
        ({"weight": torch.zeros(VOCAB)}, "weight"),
        ({"weight": torch.zeros(VOCAB, HIDDEN).long()}, r"weight.*int64"),
        ({"hidden": torch.zeros(2, 4, HIDDEN).long()}, r"hidden.*int64"),
        ({"hidden": torch.zeros(2, 5, HIDDEN)}, "labels"),
        ({"bias": torch.zeros(VOCAB + 1)}, "bias"),
        ({"bias": torch.zeros(1, VOCAB)}, "bias"),
        ({"labels": LABELS.float()}, r"labels.*float32"),
        ({"temperature": 0.0}, "temperature"),
        ({"logit_softcap": -1.0}, "logit_softcap"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": -3}, "chunk_tokens"),
        ({"chunk_tokens": 2.5}, "chunk_tokens"),
        ({"weight": torch.zeros(VOCAB, HIDDEN, device="meta")}, r"weight.*meta"),
    ],
    ids=str,
)
def test_errors(change, match):
    """Bad shapes, dtypes, devices and numbers are named, by both ops."""
    good = {"hidden": torch.zeros(2, 4, HIDDEN), "weight": torch.zeros(VOCAB, HIDDEN), "labels": LABELS, **change}
    with pytest.raises((ValueError, TypeError), match=match):
        mk.linear_token_logprobs(**good)
    ids, zeros = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4)
    with pytest.raises((ValueError, TypeError), match=match):
        mk.linear_macro_policy_loss(**good, old_logprobs=zeros, advantages=zeros, macro_ids=ids)


def test_a_kl_loss_needs_a_reference():
    """kl_loss_coef without ref_logprobs is refused."""
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="ref_logprobs"):
        mk.linear_macro_policy_loss(
            torch.zeros(1, 2, HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.zeros(1, 2, dtype=torch.int64),
            zeros, zeros, torch.zeros(1, 2, dtype=torch.int32), kl_loss_coef=0.1,
        )  # fmt: skip


def test_label_out_of_range(backend):
    """On a CPU a label >= V of an action token is an error."""
    if backend.name == "gpu":
        pytest.skip("on a GPU it cannot be read without a host sync")
    with pytest.raises((ValueError, IndexError), match="7"):
        mk.linear_token_logprobs(torch.zeros(1, HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.tensor([7]))
