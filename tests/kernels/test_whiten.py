"""masked_whiten, in one process and over ranks."""

import math
import random

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import oracle
from tests.cases.compare import assert_close
from tests.cases.precision import wide
from tests.cases.ranks import run_ranks
from tests.cases.tensors import numbers

pytestmark = pytest.mark.usefixtures("backend")
NAN = math.nan


@pytest.mark.parametrize(("unbiased", "expected"), [(False, [-1.2247, 0.0, 1.2247]), (True, [-1.0, 0.0, 1.0])])
def test_by_hand(unbiased, expected):
    """[1, 2, 3 | 100]: biased [-1.2247, 0, 1.2247], unbiased [-1, 0, 1]; 0 where masked."""
    x = torch.tensor([[1.0, 2.0, 3.0, 100.0]], dtype=wide())
    mask = torch.tensor([[True, True, True, False]])
    out = mk.masked_whiten(x, mask, unbiased=unbiased)
    assert out[0].tolist() == pytest.approx([*expected, 0.0], abs=5e-5)


def test_mean_is_added_back():
    """shift_mean=False keeps the mean: [1, 2, 3] -> 2 + [-1.2247, 0, 1.2247]; masked places stay 0."""
    x = torch.tensor([1.0, 2.0, 3.0, NAN], dtype=wide())
    out = mk.masked_whiten(x, torch.tensor([True, True, True, False]), shift_mean=False)
    assert out.tolist() == pytest.approx([0.77526, 2.0, 3.22474, 0.0], abs=5e-5)


@pytest.mark.parametrize("unbiased", [False, True])
def test_one_token_stays_finite(unbiased):
    """One token: variance 0, result 0 (or the token itself when the mean is added back)."""
    x, mask = torch.tensor([[7.0, NAN]], dtype=wide()), torch.tensor([[True, False]])
    assert mk.masked_whiten(x, mask, unbiased=unbiased).tolist() == [[0.0, 0.0]]
    assert mk.masked_whiten(x, mask, unbiased=unbiased, shift_mean=False).tolist() == [[7.0, 0.0]]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (0,), (2, 0)])
def test_nothing_real(shape):
    """An all-masked or empty batch gives zeros of its shape."""
    out = mk.masked_whiten(torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool))
    assert out.shape == shape
    assert not out.any()


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 7), (64, 33), (1000,)])
def test_oracle(shape, dtype, unbiased, shift_mean):
    """Equal to the two-pass loop for every option; masked NaN unused; output float32 (float64 for float64)."""
    rng = random.Random(len(shape) * shape[0])
    n = math.prod(shape)
    mask = torch.tensor([rng.random() < 0.7 for _ in range(n)]).reshape(shape)
    x = torch.tensor([rng.gauss(3.0, 2.0) for _ in range(n)], dtype=dtype).reshape(shape)
    x = torch.where(mask, x, NAN)
    out = mk.masked_whiten(x, mask, unbiased=unbiased, shift_mean=shift_mean)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want = oracle.masked_whiten(
        x.double().flatten().tolist(), mask.flatten().tolist(), shift_mean=shift_mean, unbiased=unbiased
    )
    assert_close(out, want, dtype, scale=4.0)


def test_large_mean_does_not_cancel():
    """Mean 1000, spread 1e-2 in float32: the variance comes from differences, not from E[x^2] - E[x]^2."""
    rng = random.Random(0)
    x = torch.tensor([1000.0 + 1e-2 * rng.gauss(0, 1) for _ in range(4096)])
    out = mk.masked_whiten(x, torch.ones(4096, dtype=torch.bool))
    want = oracle.masked_whiten(x.double().tolist(), [True] * 4096)
    # One float32 step at 1000 is 6e-5, 6e-3 of the spread; the mean can err by a part of that.
    assert max(abs(a - b) for a, b in zip(out.tolist(), want, strict=True)) < 1e-2


def test_two_tokens_unbiased():
    """[1, 3]: the unbiased variance is 2, the result -+1/sqrt(2)."""
    out = mk.masked_whiten(numbers([1.0, 3.0]), torch.ones(1, 2, dtype=torch.bool), unbiased=True)
    assert out[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-6)


def test_epsilon_stands_under_the_root():
    """[0, 2e-4] has variance 1e-8: as much as the 1e-8 added to it, so the result is -+1/sqrt(2)."""
    out = mk.masked_whiten(numbers([0.0, 2e-4]), torch.ones(1, 2, dtype=torch.bool))
    assert out[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-6)


def test_equal_numbers_whiten_to_zero():
    """Variance 0: the 1e-8 under the root keeps the result 0, not NaN."""
    out = mk.masked_whiten(torch.full((3, 4), 0.5), torch.ones(3, 4, dtype=torch.bool))
    assert not out.any()


def test_detached():
    """Advantages are data: no gradient flows through the whitening."""
    x = torch.randn(4, requires_grad=True)
    assert not mk.masked_whiten(x, torch.ones(4, dtype=torch.bool)).requires_grad


def test_any_strides():
    """A transposed input gives what its contiguous copy gives."""
    torch.manual_seed(0)
    x, mask = torch.randn(6, 4).t(), (torch.rand(6, 4) < 0.5).t()
    assert_close(mk.masked_whiten(x, mask), mk.masked_whiten(x.contiguous(), mask.contiguous()), torch.float32)


# What the ranks hold, and the options: all of them run in one pair of processes.
RANK_CASES = {
    "by hand": ([[1.0, 2.0], [3.0, 4.0]], {}),
    "uneven": ([[5.0], [1.0, 2.0, 6.0]], {}),
    "uneven unbiased": ([[5.0], [1.0, 2.0, 6.0]], {"unbiased": True}),
    "uneven with the mean": ([[5.0], [1.0, 2.0, 6.0]], {"shift_mean": False}),
    "an empty rank": ([[], [1.0, 2.0, 3.0]], {}),
    "a masked rank": ([[NAN, NAN], [1.0, 2.0, 3.0]], {}),
    "nothing anywhere": ([[], []], {}),
    "one token anywhere": ([[], [7.0]], {"unbiased": True}),
}


def _whiten_on_rank(rank, world):
    out = {}
    for name, (rows, options) in RANK_CASES.items():
        x = torch.tensor(rows[rank], dtype=wide())
        group = torch.distributed.group.WORLD
        out[name] = mk.masked_whiten(x, ~x.isnan(), group=group, **options).tolist()
    # Only rank 0 does this: were a collective inside, it would wait for rank 1 until the time-out.
    if rank == 0:
        out["alone"] = mk.masked_whiten(torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.bool)).tolist()
    return out


@pytest.fixture(scope="module")
def ranks():
    """The results of RANK_CASES on two gloo ranks."""
    return run_ranks(_whiten_on_rank, 2)


def test_two_ranks_by_hand(ranks):
    """Ranks [1, 2] and [3, 4] -> [-1.3416, -.4472, .4472, 1.3416]: statistics of all tokens, not of each rank."""
    both = ranks[0]["by hand"] + ranks[1]["by hand"]
    assert both == pytest.approx([-1.3416, -0.4472, 0.4472, 1.3416], abs=5e-5)


@pytest.mark.parametrize("case", ["by hand", "uneven", "uneven unbiased", "uneven with the mean", "one token anywhere"])
def test_ranks_are_weighted_by_their_tokens(ranks, case):
    """However the tokens lie on the ranks, the result is that of one process with all of them."""
    held, options = RANK_CASES[case]
    everything = held[0] + held[1]
    want = oracle.masked_whiten(everything, [True] * len(everything), **options)
    assert_close(ranks[0][case] + ranks[1][case], want)


def test_an_empty_rank_does_not_hang(ranks):
    """A rank without real tokens takes part; the other's result is as if it were alone."""
    alone = [-1.2247, 0.0, 1.2247]
    assert ranks[0]["an empty rank"] == []
    assert ranks[1]["an empty rank"] == pytest.approx(alone, abs=5e-5)
    assert ranks[0]["a masked rank"] == [0.0, 0.0]
    assert ranks[1]["a masked rank"] == pytest.approx(alone, abs=5e-5)
    assert ranks[0]["nothing anywhere"] == ranks[1]["nothing anywhere"] == []


def test_no_group_is_this_process_alone(ranks):
    """group=None does not communicate, even where a default group exists."""
    assert ranks[0]["alone"] == pytest.approx([-1.0, 1.0], abs=1e-6)
