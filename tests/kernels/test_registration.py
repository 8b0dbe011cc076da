"""Every op is a well-made torch.library op: opcheck, gradcheck, no double backward, fakes without a device."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from marlhf_kernels.backends import _backends
from tests.cases import calls, oracle, shapes
from tests.cases.batches import make_batch
from tests.cases.calls import MACRO, SCALAR, TOKEN
from tests.cases.checks import run_with_gradient
from tests.cases.logits import noise
from tests.cases.precision import wide
from tests.cases.recorder import RecordOps

pytestmark = pytest.mark.usefixtures("backend")
IDS = shapes.BY_HAND["holes inside macro actions"]


@pytest.fixture
def float64(backend):
    """Skips where the backend has no float64: a numeric gradient means nothing in float32."""
    if backend.widest != torch.float64:
        pytest.skip("numeric gradients need float64, which runs on the reference")


def opcheck_all(run):
    """opcheck every marlhf op that `run` calls; there must be one."""
    with RecordOps() as recorder:
        run()
    assert recorder.calls
    for op, args, kwargs in recorder.calls:
        torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
@pytest.mark.parametrize("layout", ["mixed", "packed"])
@pytest.mark.parametrize("learning", [True, False])
def test_opcheck_macro_ops(call, layout, learning):
    """Schema, fake kernel, autograd registration and AOT dispatch of every macro op, with and without a gradient."""
    batch = make_batch(IDS, layout, poison=0.5)
    if learning:
        if call.learns is None:
            pytest.skip("no input of this op has a gradient")
        batch = batch.with_fields(**{call.learns: batch[call.learns].clone().requires_grad_()})
    opcheck_all(lambda: call.run(batch))


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_entropy": True},
        {"temperature": 0.7, "logit_softcap": 5.0, "return_entropy": True},
        {"temperature": "tensor"},
    ],
    ids=str,
)
def test_opcheck_token_logprobs(options, learning):
    """The same for token_logprobs."""
    x = torch.tensor(noise(6, 11), dtype=wide(), requires_grad=learning)
    y = torch.tensor([0, 10, 3, -1, 5, 2])
    if options.get("temperature") == "tensor":
        options = {"temperature": torch.linspace(0.5, 2.0, 6, dtype=wide())}
    opcheck_all(lambda: mk.token_logprobs(x, y, **options))


@pytest.mark.parametrize("name", ["token", "whole", "fixed"])
@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_opcheck_segmentation(name, layout):
    """The same for the builders."""
    batch = make_batch(IDS, layout)
    build = {
        "token": segmentation.token,
        "whole": segmentation.whole,
        "fixed": lambda m, **kw: segmentation.fixed_ngram(m, 2, **kw),
    }[name]
    opcheck_all(lambda: build(batch.mask, **batch.keywords))


def test_opcheck_whiten():
    """The same for masked_whiten without a group."""
    opcheck_all(lambda: mk.masked_whiten(torch.randn(3, 5), torch.rand(3, 5) < 0.5))


@pytest.mark.parametrize("call", [c for c in calls.ALL if c.learns], ids=str)
@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_gradcheck_macro_ops(call, layout, float64):
    """Analytic against numeric gradients in float64 of every op with a gradient and every option set."""
    batch = make_batch(IDS, layout, poison=0.5, seed=7)

    def first_output(x):
        return call.run(batch.with_fields(**{call.learns: x}))[0]

    assert torch.autograd.gradcheck(first_output, (batch[call.learns].clone().requires_grad_(),))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"logit_softcap": 3.0}, {"temperature": 0.7, "logit_softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("return_entropy", [False, True])
def test_gradcheck_token_logprobs(options, return_entropy, float64):
    """The same for log-probability and entropy."""
    x = torch.tensor(noise(4, 7), dtype=wide(), requires_grad=True)
    y = torch.tensor([0, 6, -1, 3])
    assert torch.autograd.gradcheck(lambda x: mk.token_logprobs(x, y, return_entropy=return_entropy, **options), (x,))


def second_derivative(out, x):
    """Differentiates the gradient of `out` once more."""
    (gradient,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    gradient.sum().backward()


@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if c.learns], ids=str)
def test_double_backward_raises(call):
    """A second derivative is an error, never a silent zero."""
    batch = make_batch(IDS, poison=0.5)
    leaf = batch[call.learns].clone().requires_grad_()
    out = call.run(batch.with_fields(**{call.learns: leaf}))[0]
    with pytest.raises(RuntimeError):
        second_derivative(out, leaf)


def test_double_backward_raises_for_logprobs():
    """The same for token_logprobs."""
    x = torch.tensor(noise(2, 5), dtype=wide(), requires_grad=True)
    out = mk.token_logprobs(x, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError):
        second_derivative(out, x)


def as_fake(batch, mode, device):
    """The batch as fake tensors that claim to live on `device`."""

    def fake(x):
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    with mode:
        moved = type(batch)(batch.layout, fake(batch.macro_ids), {n: fake(x) for n, x in batch.fields.items()})
    return moved


@pytest.mark.parametrize(
    "call", [*calls.ONE_EACH, calls.reduce_call(num_macros=5), calls.lengths_call(num_macros=5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_on_a_gpu_that_is_not_there(call, dtype):
    """Shapes, dtypes and devices come from the fake kernel alone: nothing touches a device."""
    if call.outputs == (MACRO,) and "num_macros" not in str(call):
        pytest.skip("K depends on the data unless num_macros is given")
    batch = as_fake(make_batch(IDS, "right", dtype), mode := FakeTensorMode(), "cuda")
    with mode:
        outputs = call.run(batch)
    for kind, out in zip(call.outputs, outputs, strict=True):
        assert out.device.type == "cuda"
        want = {TOKEN: batch.macro_ids.shape, SCALAR: torch.Size(), MACRO: torch.Size((2, 5))}[kind]
        assert out.shape == want
        assert out.dtype == {"macro_broadcast": dtype, "macro_lengths": torch.int32}.get(call.op, torch.float32)


@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if c.learns and c.op != "macro_reduce"], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_backward(call, device):
    """The backward has a fake kernel too (PyTorch without CUDA records no graph on a fake GPU: hence these devices)."""
    batch = as_fake(make_batch(IDS, "right", torch.bfloat16), mode := FakeTensorMode(), device)
    with mode:
        leaf = batch[call.learns].requires_grad_()
        call.run(batch)[0].sum().backward()
        assert leaf.grad.shape == leaf.shape
        assert (leaf.grad.dtype, leaf.grad.device.type) == (torch.bfloat16, device)


def test_fake_logprobs():
    """The same for token_logprobs: forward on a fake GPU, backward on a fake CPU."""
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            x = torch.empty(4, 3, 50257, dtype=torch.bfloat16, device=device, requires_grad=device == "cpu")
            y = torch.empty(4, 3, dtype=torch.int64, device=device)
            out, entropy = mk.token_logprobs(x, y, return_entropy=True, temperature=0.7)
            for o in (out, entropy):
                assert (o.shape, o.dtype, o.device.type) == ((4, 3), torch.float32, device)
            if device == "cpu":
                (out + entropy).sum().backward()
                assert (x.grad.shape, x.grad.dtype) == (x.shape, torch.bfloat16)


def test_fake_segmentation_and_whitening_on_a_gpu_that_is_not_there():
    """The same for builders and whitening."""
    with FakeTensorMode():
        mask = torch.empty(4, 9, dtype=torch.bool, device="cuda")
        for ids in (segmentation.token(mask), segmentation.whole(mask), segmentation.fixed_ngram(mask, math.inf)):
            assert (ids.shape, ids.dtype, ids.device.type) == ((4, 9), torch.int32, "cuda")
        white = mk.masked_whiten(torch.empty(4, 9, dtype=torch.bfloat16, device="cuda"), mask)
        assert (white.shape, white.dtype, white.device.type) == ((4, 9), torch.float32, "cuda")


@pytest.mark.parametrize("weights", oracle.REWARD_WEIGHTS)
def test_meta_tensors(weights):
    """Meta tensors give meta outputs of the right shape."""
    out = mk.macro_reduce(
        torch.empty(3, 5, device="meta"),
        torch.empty(3, 5, dtype=torch.int32, device="meta"),
        weights=weights,
        num_macros=4,
    )
    assert (out.shape, out.device.type) == ((3, 4), "meta")


def on_no_cpu(run):
    """Run the reference's implementation of every op that `run` calls on fake tensors that lie on no CPU.

    PyTorch without CUDA indexes no fake CUDA tensor: the device is `meta`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with RecordOps() as recorder:
        run()
    assert recorder.calls
    for op, args, kwargs in recorder.calls:
        assert not kwargs
        name = op._schema.name.partition("::")[2]
        with mode:
            # Coefficients stay on the CPU, as numbers become tensors there.
            moved = [
                torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) and x.dim() else x
                for x in args
            ]
            results = REFERENCE[name](*moved)
        for out in results if isinstance(results, tuple) else (results,):
            assert out is None or out.device.type == "meta"


REFERENCE = _backends["reference"].implementations


@pytest.mark.parametrize(
    "call",
    [*(c for c in calls.ONE_EACH if MACRO not in c.outputs), calls.reduce_call(num_macros=5), calls.LENGTHS[1]],
    ids=str,
)
@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_the_reference_waits_for_no_gpu(call, layout):
    """On a GPU the reference reads nothing back: a fake tensor has nothing to read."""
    batch = make_batch(IDS, layout, poison=0.5)
    on_no_cpu(lambda: run_with_gradient(call, batch))


def test_the_reference_of_logprobs_waits_for_no_gpu():
    """The same for token_logprobs, forward and backward, labels and temperatures unread."""
    x, y = torch.tensor(noise(4, 7), dtype=wide(), requires_grad=True), torch.tensor([0, 6, -1, 3])
    temperature = torch.ones(4, dtype=wide())
    on_no_cpu(lambda: mk.token_logprobs(x, y, logit_softcap=3.0, temperature=temperature).sum().backward())


def test_the_reference_of_builders_waits_for_no_gpu():
    """The same for builders and whitening; perplexity of packed sequences alone needs their greatest length."""
    mask, ref = torch.rand(3, 9) < 0.7, torch.randn(3, 9)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def run():
        for keywords, m, x in (({}, mask, ref), ({"cu_seqlens": cu}, mask[0], ref[0])):
            ids = segmentation.fixed_ngram(m, 2, **keywords)
            segmentation.isolate_last(ids, **keywords)
            segmentation.from_ends(m, m, **keywords)
            segmentation.randomized_ngram(m, **keywords)
            mk.masked_whiten(x, m)
        for rule in ("running_mean", "neighbour"):
            segmentation.perplexity(mask, ref, rule=rule)

    on_no_cpu(run)


def test_perplexity_of_packed_sequences_waits():
    """The one builder that has to ask its device, for the greatest length of the sequences."""
    mask = torch.ones(9).bool()
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(DataDependentOutputException):
        on_no_cpu(lambda: segmentation.perplexity(mask, torch.randn(9), cu_seqlens=cu))


def test_what_is_not_asked_for_is_empty(backend):
    """No entropy, and no gradient that nobody needs: outputs of size 0, as the fake kernels say."""
    hidden, weight, bias = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
    labels, one, none = torch.tensor([0, 4, -1, 2]), torch.ones((), dtype=torch.float64), torch.Size((0,))
    ops = torch.ops.marlhf
    assert ops.token_logprobs(hidden @ weight.t(), labels, one, None, False, False)[1].shape == none
    lp, entropy, maximum, log_sum = ops.linear_token_logprobs(hidden, weight, labels, bias, one, None, False, 2, None)
    assert entropy.shape == none
    for i in range(3):
        needed = [j == i for j in range(3)]
        gradients = ops.linear_token_logprobs_backward(
            torch.ones(4), None, hidden, weight, labels, bias, one, None, 2, None, maximum, log_sum, entropy, *needed
        )
        shapes_of = [hidden.shape, weight.shape, bias.shape]
        assert [g.shape for g in gradients] == [s if need else none for s, need in zip(shapes_of, needed, strict=True)]
    ids = torch.arange(4, dtype=torch.int32)[None]
    assert ops.policy_penalty(lp[None], None, lp[None], ids, one, one, None, None, None)[2].shape == none
