"""torch.compile with fullgraph: right numbers, one compilation whatever the coefficients, few for many lengths."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases import calls, shapes
from tests.cases.batches import make_batch, upstream
from tests.cases.calls import MACRO
from tests.cases.checks import check_call, run_with_gradient
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.logits import noise

pytestmark = pytest.mark.usefixtures("backend")
IDS = shapes.BY_HAND["holes inside macro actions"]
NAMES = ("scores", "logprobs", "ref_logprobs", "values")


class Counter:
    """A compiler backend that counts the graphs it is given and runs them through AOT autograd."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call, backend):
    """The call with its op compiled; ids and fields are the graph's inputs."""
    function = torch.compile(lambda batch: call.run(batch), fullgraph=True, backend=backend)
    return type(call)(call.op, call.options, call.outputs, function, call.exact, call.learns, call.exact_gradient)


@pytest.mark.parametrize(
    "call",
    [
        *(c for c in calls.ONE_EACH if MACRO not in c.outputs),
        calls.reduce_call(num_macros=5),
        calls.lengths_call(num_macros=5),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["mixed", "packed"])
def test_fullgraph(call, layout):
    """Every macro op compiles without a graph break; values and gradients equal the loop oracle."""
    counter = Counter()
    check_call(compiled(call, counter), make_batch(IDS, layout, torch.float32))
    assert counter.graphs == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_softcap": 5.0}], ids=str)
def test_fullgraph_logprobs(options):
    """token_logprobs: a quarter of the rows ignored, uninitialised memory poisoned, float32 kept float32."""
    x = torch.tensor(noise(8, 11))
    y = torch.tensor([0, -1, 3, 10, -100, 2, 1, 5])

    def both(x, y):
        return mk.token_logprobs(x, y, return_entropy=True, **options)

    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend=Counter())):
        leaf = x.clone().requires_grad_()
        outputs = function(leaf, y)
        torch.autograd.backward(outputs, [upstream(o) for o in outputs])
        assert {o.dtype for o in outputs} == {torch.float32}
        results.append((*outputs, leaf.grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_five_values_of_kl_coef_compile_once(dtype):
    """kl_coef as a 0-d tensor: one graph for all values, each with its own numbers."""
    batch = make_batch(IDS, poison=0.5)
    counter = Counter()

    @torch.compile(fullgraph=True, backend=counter)
    def step(kl_coef, *tensors):
        return mk.rollout_advantages(*tensors, batch.macro_ids, kl_coef=kl_coef)

    tensors = [batch[n] for n in NAMES]
    graphs = []
    for value in (0.0, 0.01, 0.05, 0.3, 2.0):
        coefficient = torch.tensor(value, dtype=dtype)
        out = step(coefficient, *tensors)
        want = calls.rollout_call(kl_coef=coefficient.item()).exact(batch)
        for got, expected in zip(out, want, strict=True):
            assert_close(batch.layout.rows(got), expected)
        graphs.append(counter.graphs)
    # Dynamo hands the graph of a float64 scalar to its backend twice within the first compilation.
    assert graphs == [1 if dtype == torch.float32 else graphs[0]] * 5


def test_five_numbers_of_kl_coef_compile_at_most_twice():
    """kl_coef as a Python number: the compiler makes it an input after the first change, and then stays."""
    batch = make_batch(IDS, poison=0.5)
    counter = Counter()

    @torch.compile(fullgraph=True, backend=counter)
    def step(kl_coef, *tensors):
        return mk.rollout_advantages(*tensors, batch.macro_ids, kl_coef=kl_coef)

    tensors = [batch[n] for n in NAMES]
    for value in (0.25, 0.01, 0.05, 0.3, 2.0):
        out = step(value, *tensors)
        want = calls.rollout_call(kl_coef=value).exact(batch)
        for got, expected in zip(out, want, strict=True):
            assert_close(batch.layout.rows(got), expected)
    assert counter.graphs <= 2


def test_no_coefficient_recompiles():
    """gamma, lam, both clips, dual clip, value clip and normalizer as 0-d tensors: one graph."""
    batch = make_batch(IDS, poison=0.5)
    counter = Counter()

    @torch.compile(fullgraph=True, backend=counter)
    def losses(logprobs, values, gamma, lam, low, high, dual, clip, count):
        gae = mk.macro_gae(batch["rewards"], batch["old_values"], batch.macro_ids, gamma=gamma, lam=lam)
        policy = mk.macro_policy_loss(
            logprobs, batch["old_logprobs"], gae.advantages, batch.macro_ids,
            clip_low=low, clip_high=high, dual_clip=dual, normalizer=count,
        )  # fmt: skip
        value = mk.macro_value_loss(
            values, batch["old_values"], gae.returns, batch.macro_ids, clip=clip, normalizer=count
        )
        return policy.loss + value.loss

    totals = set()
    for i in range(5):
        numbers = [torch.tensor(v + 0.01 * i) for v in (0.9, 0.8, 0.1, 0.2, 2.0, 0.1, 3.0)]
        lp, v = (batch[n].clone().requires_grad_() for n in ("logprobs", "values"))
        out = losses(lp, v, *numbers)
        out.backward()
        assert lp.grad.any()
        assert v.grad.any()
        totals.add(out.item())
    assert len(totals) == 5
    assert counter.graphs == 1


@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if MACRO not in c.outputs], ids=str)
def test_many_lengths_compile_a_bounded_number_of_times(call):
    """Fifty batch shapes: at most one graph for the first shape and few dynamic ones for the rest."""
    counter = Counter()
    function = torch.compile(
        lambda ids, fields: call.run(type(template)(template.layout, ids, fields)), fullgraph=True, backend=counter
    )
    template = make_batch(IDS, poison=0.5)
    for length in range(4, 54):
        batch = make_batch(shapes.random_rows(3, length, seed=length), "right", poison=0.5)
        got, want = function(batch.macro_ids, batch.fields), call.run(batch)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, scale=1.0)
    assert counter.graphs <= 4


def test_segmentation_and_whitening_in_one_graph():
    """Builders and whitening compile inside a user's function."""

    def function(mask, x):
        ids = segmentation.fixed_ngram(mask, 2)
        return ids, mk.masked_whiten(mk.macro_broadcast(mk.macro_reduce(x, ids, num_macros=8), ids), ids >= 0)

    torch.manual_seed(0)
    mask, x = torch.rand(3, 9) < 0.7, torch.randn(3, 9)
    counter = Counter()
    got = torch.compile(function, fullgraph=True, backend=counter)(mask, x)
    for a, b in zip(got, function(mask, x), strict=True):
        assert_same_bits(a, b)
    assert counter.graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("call", [c for c in calls.ONE_EACH if MACRO not in c.outputs], ids=str)
def test_inductor(call):
    """The default compiler: the same numbers, forward and backward."""
    batch = make_batch(IDS, "mixed", torch.float32)
    got, want = run_with_gradient(compiled(call, "inductor"), batch), run_with_gradient(call, batch)
    for a, b in zip(got[0], want[0], strict=True):
        assert_close(a, b, torch.float32)
    if want[1] is not None:
        assert_close(got[1], want[1], torch.float32)
