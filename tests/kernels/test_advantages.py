"""kl_penalized_rewards, macro_gae, rollout_advantages."""

import math

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import calls, oracle, shapes
from tests.cases.batches import make_batch
from tests.cases.checks import check_call, check_everywhere
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.layouts import LAYOUTS
from tests.cases.precision import tight, wide
from tests.cases.tensors import ids_of, numbers

pytestmark = pytest.mark.usefixtures("backend")
NAN = math.nan


@pytest.mark.parametrize(
    ("estimator", "expected", "tolerance"),
    [("k1", [0.5, -1.0], 0), ("k2", [0.125, 0.5], 0), ("k3", [0.10653, 0.71828], 5e-6)],
)
def test_kl_estimators_by_hand(estimator, expected, tolerance):
    """lp=[-1,-2], ref=[-1.5,-1]: k1 [0.5,-1], k2 [0.125,0.5], k3 [0.10653,0.71828]; reward -kl_coef * kl + score."""
    rewards, kl = mk.kl_penalized_rewards(
        numbers(3.0), numbers([-1.0, -2.0]), numbers([-1.5, -1.0]), ids_of([0, 1]),
        kl_coef=0.1, kl_estimator=estimator,
    )  # fmt: skip
    assert kl[0].tolist() == pytest.approx(expected, abs=tolerance or tight())
    assert_close(rewards, [-0.1 * kl[0, 0].item(), 3.0 - 0.1 * kl[0, 1].item()])


def test_default_kl_estimator_is_k1():
    """Without a name the estimator is logp - ref."""
    _, kl = mk.kl_penalized_rewards(numbers(0.0), numbers([-1.0]), numbers([-3.0]), ids_of([0]), kl_coef=1.0)
    assert kl.item() == 2.0


def test_k3_is_never_negative():
    """k3 >= 0 for any pair of log-probabilities, in float32 too."""
    torch.manual_seed(0)
    lp, ref = -torch.rand(4, 512) * 4, -torch.rand(4, 512) * 4
    ref[:2] = lp[:2] + 1e-4 * torch.randn(2, 512)
    ids = torch.arange(512, dtype=torch.int32).expand(4, -1)
    _, kl = mk.kl_penalized_rewards(torch.zeros(4), lp, ref, ids, kl_coef=1.0, kl_estimator="k3")
    assert kl.min() >= 0.0
    # Near 0 the log-probabilities are finer than their difference's square: rounding must not win.
    d = torch.logspace(-14, 1, 20000)[None]
    ids = torch.arange(20000, dtype=torch.int32)[None]
    for lp, ref in ((torch.zeros_like(d), d), (-d, torch.zeros_like(d))):
        for a, b in ((lp, ref), (ref, lp)):
            _, kl = mk.kl_penalized_rewards(torch.zeros(1), a, b, ids, kl_coef=1.0, kl_estimator="k3")
            assert kl.min() >= 0.0


def test_score_on_the_last_action_token():
    """Response [a, b, EOS, PAD, PAD], score 1, no KL: rewards [0, 0, 1, 0, 0]; an empty response: all zeros."""
    lp = numbers([-1.0, -2.0, -3.0, NAN, NAN], [NAN] * 5)
    rewards, kl = mk.kl_penalized_rewards(numbers(1.0, NAN), lp, lp, ids_of([0, 1, 2, -1, -1], [-1] * 5), kl_coef=0.5)
    assert rewards.tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0], [0.0] * 5]
    assert kl.tolist() == [[0.0] * 5] * 2


def test_score_clip():
    """The score is clamped to +-score_clip, the KL penalty is not."""
    lp = numbers([0.0], [0.0], [0.0])
    rewards, _ = mk.kl_penalized_rewards(
        numbers(3.0, -3.0, 0.5), lp, lp - 10.0, ids_of([0], [0], [0]), kl_coef=1.0, score_clip=2.0
    )
    assert rewards.flatten().tolist() == [2.0 - 10.0, -2.0 - 10.0, 0.5 - 10.0]


def test_gae_by_hand():
    """gamma 1, lambda .95, V = .5, r = [0,0,1]: A = [.45125,.475,.5], returns [.95125,.975,1]."""
    out = mk.macro_gae(numbers([0.0, 0.0, 1.0]), numbers([0.5, 0.5, 0.5]), ids_of([0, 1, 2]))
    assert_close(out.advantages, [[0.45125, 0.475, 0.5]])
    assert_close(out.returns, [[0.95125, 0.975, 1.0]])


def test_gae_bootstrap_by_hand():
    """The same with V(end) = .6: A = [.99275, 1.045, 1.1]."""
    out = mk.macro_gae(
        numbers([0.0, 0.0, 1.0]), numbers([0.5, 0.5, 0.5]), ids_of([0, 1, 2]), bootstrap_values=numbers(0.6)
    )
    assert_close(out.advantages, [[0.99275, 1.045, 1.1]])


def test_gap_neither_decays_nor_leaks():
    """Tool output: r=[0,0,0,1], V=[.5,9,9,.5], m=[1,0,0,1] gives A at the ends .475 and .5, 0 in between."""
    out = mk.macro_gae(numbers([0.0, 0.0, 0.0, 1.0]), numbers([0.5, 9.0, 9.0, 0.5]), ids_of([0, -1, -1, 1]))
    assert_close(out.advantages, [[0.475, 0.0, 0.0, 0.5]])
    assert_close(out.returns, [[0.975, 0.0, 0.0, 1.0]])


def test_one_packed_sequence_and_a_tail():
    """A single sequence with places behind it: they take neither its score nor its bootstrap value."""
    lp, cu = numbers([-1.0, -1.0, NAN, NAN])[0], torch.tensor([0, 2], dtype=torch.int32)
    out = mk.rollout_advantages(
        numbers(1.0).reshape(1), lp, lp, numbers([0.5, 0.5, NAN, NAN])[0], torch.arange(4, dtype=torch.int32),
        kl_coef=0.1, bootstrap_values=numbers(0.6).reshape(1), cu_seqlens=cu,
    )  # fmt: skip
    assert out.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert_close(out.advantages, [1.045, 1.1, 0.0, 0.0])


def test_macro_gae_by_hand():
    """Two macro actions of 2 tokens: R = [3, 7], V = [1, 3]; delta = [3 + .9*3 - 1, 7 - 3], A_0 = 4.7 + .9*.5*4."""
    out = mk.macro_gae(
        numbers([1.0, 2.0, 3.0, 4.0]), numbers([0.0, 2.0, 2.0, 4.0]), ids_of([0, 0, 1, 1]), gamma=0.9, lam=0.5
    )
    assert_close(out.advantages, [[6.5, 6.5, 4.0, 4.0]])
    assert_close(out.returns, [[7.5, 7.5, 7.0, 7.0]])


def test_token_discount_by_hand():
    """discount_per="token": gamma^n and lam^n of the macro action's own length n."""
    rewards, values = numbers([1.0, 2.0, 3.0]), numbers([1.0, 1.0, 2.0])
    out = mk.macro_gae(
        rewards, values, ids_of([0, 0, 1]), gamma=0.9, lam=0.5, discount_per="token", bootstrap_values=numbers(10.0)
    )
    last = 3 + 0.9 * 10 - 2
    first = 3 + 0.81 * 2 - 1 + 0.81 * 0.25 * last
    assert_close(out.advantages, [[first, first, last]])


def test_discounted_sum_is_discounted_by_gamma():
    """reward_weights="discounted_sum" discounts inside the macro action by gamma: 1 + .5*2 + .25*4 = 3."""
    out = mk.macro_gae(
        numbers([1.0, 2.0, 4.0]), numbers([0.0] * 3), ids_of([0, 0, 0]), gamma=0.5, reward_weights="discounted_sum"
    )
    assert_close(out.returns, [[3.0] * 3])


def test_smdp_discount_equals_the_token_return():
    """discounted_sum with discount_per="token", V = 0, lam = 1: the first return is sum_t gamma^t r_t."""
    rewards = [1.0, -2.0, 3.0, 0.5, 4.0, -1.0]
    ids = [0, 0, 0, 1, 1, 2]
    out = mk.macro_gae(
        numbers(rewards), numbers([0.0] * 6), ids_of(ids), gamma=0.9, lam=1.0,
        reward_weights="discounted_sum", discount_per="token",
    )  # fmt: skip
    assert_close(out.returns[0, 0], [math.fsum(r * 0.9**t for t, r in enumerate(rewards))])


def test_defaults():
    """gamma 1, lam .95, rewards summed, values averaged, discounted per macro action."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    args = (batch["rewards"], batch["values"], batch.macro_ids)
    explicit = mk.macro_gae(
        *args, gamma=1.0, lam=0.95, reward_weights="sum", value_weights="mean", discount_per="macro"
    )
    for a, b in zip(mk.macro_gae(*args), explicit, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("value_weights", oracle.VALUE_WEIGHTS)
def test_lambda_one_telescopes(layout, gamma, value_weights):
    """lam = 1: A_k + V_k = sum_{j>=k} gamma^(j-k) R_j + gamma^(M-k) bootstrap, whatever the values are."""
    ids = shapes.random_rows(5, 23, seed=3)
    batch = make_batch(ids, layout)
    out = mk.macro_gae(
        batch["rewards"], batch["values"], batch.macro_ids, gamma=gamma, lam=1.0,
        value_weights=value_weights, bootstrap_values=batch["bootstrap_values"], **batch.keywords,
    )  # fmt: skip
    returns = batch.layout.rows(out.returns)
    for b, row in enumerate(ids):
        places = oracle.groups(row)
        rewards = batch.lists("rewards")[b]
        for k, positions in enumerate(places):
            want = (
                math.fsum(gamma ** (j - k) * rewards[t] for j in range(k, len(places)) for t in places[j])
                + gamma ** (len(places) - k) * batch.lists("bootstrap_values")[b]
            )
            assert_close([returns[b][t] for t in positions], [want] * len(positions), scale=10.0)


def test_zero_lambda_is_the_one_step_error():
    """lam = 0: A_k = R_k + gamma V_{k+1} - V_k."""
    out = mk.macro_gae(numbers([1.0, 2.0, 3.0]), numbers([0.5, 0.25, 4.0]), ids_of([0, 0, 1]), gamma=0.5, lam=0.0)
    assert_close(out.advantages, [[3 + 0.5 * 4 - 0.375] * 2 + [3 - 4]])


def test_segmentation_does_not_change_the_sum_of_rewards():
    """weights "sum": sum_k R_k = sum_t r_t for every segmentation of the same tokens."""
    torch.manual_seed(0)
    rewards = torch.randn(2, 37, dtype=wide())
    mask = torch.rand(2, 37) < 0.8
    total = (rewards * mask).sum(1)
    for n in (1, 2, 5, 100, math.inf):
        ids = mk.segmentation.fixed_ngram(mask, n)
        assert_close(mk.macro_reduce(rewards, ids).sum(1), total, scale=10.0)


@pytest.mark.parametrize("call", [*calls.KL, *calls.GAE, *calls.ROLLOUT], ids=str)
def test_oracle_by_hand_shapes(call):
    """Every option set equals the loop oracle on every hand-made shape, in every layout."""
    check_everywhere(call)


@pytest.mark.parametrize("call", [calls.KL[2], *calls.GAE[:4], calls.GAE[-1], *calls.ROLLOUT[:5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_oracle_grids(call, dtype, backend):
    """Low precisions in, float32 accumulation: the loop oracle around the borders of tile sizes."""
    for grid in {"interpreter", "edge"} & set(backend.grids):
        for rows, length in shapes.GRIDS[grid]:
            ids = shapes.random_rows(rows, length)
            check_call(call, make_batch(ids, "packed" if length % 2 else "mixed", dtype), f"{rows}x{length}")


@pytest.mark.slow
@pytest.mark.parametrize("call", [calls.GAE[1], calls.ROLLOUT[4]], ids=str)
def test_oracle_production(call, backend):
    """Production-sized batches, one row of 16384 tokens among them."""
    if "production" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the production grid")
    for rows, length in shapes.GRIDS["production"]:
        check_call(call, make_batch(shapes.random_rows(rows, length), "right", torch.float32), f"{rows}x{length}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollout_advantages_is_the_two_ops_in_one(layout):
    """rollout_advantages equals kl_penalized_rewards followed by macro_gae."""
    batch = make_batch(shapes.random_rows(4, 19), layout)
    kl_args = {"kl_coef": 0.3, "kl_estimator": "k3", "score_clip": 1.0}
    gae_args = {
        "gamma": 0.9, "lam": 0.8, "reward_weights": "last", "value_weights": "first", "discount_per": "token",
        "bootstrap_values": batch["bootstrap_values"],
    }  # fmt: skip
    names = ("scores", "logprobs", "ref_logprobs")
    tensors = [batch[n] for n in names]
    rewards, kl = mk.kl_penalized_rewards(*tensors, batch.macro_ids, **kl_args, **batch.keywords)
    gae = mk.macro_gae(rewards, batch["values"], batch.macro_ids, **gae_args, **batch.keywords)
    out = mk.rollout_advantages(*tensors, batch["values"], batch.macro_ids, **kl_args, **gae_args, **batch.keywords)
    for a, b in ((out.rewards, rewards), (out.kl, kl), (out.advantages, gae.advantages), (out.returns, gae.returns)):
        assert_close(a, b)


def test_rewards_and_advantages_are_detached():
    """Nothing flows back: outputs of inputs that want gradients want none."""
    batch = make_batch(shapes.BY_HAND["ragged"], poison=0.5)
    leaves = {n: batch[n].clone().requires_grad_() for n in ("scores", "logprobs", "ref_logprobs", "values", "rewards")}
    batch = batch.with_fields(**leaves)
    for call in (calls.KL[0], calls.GAE[1], calls.ROLLOUT[1]):
        for out in call.run(batch):
            assert not out.requires_grad, call


def test_coefficients_may_be_tensors():
    """kl_coef, gamma and lam as 0-d tensors give what numbers give; so does score_clip."""
    batch = make_batch(shapes.random_rows(3, 11))
    args = [batch[n] for n in ("scores", "logprobs", "ref_logprobs", "values")]
    numbers = {"kl_coef": 0.3, "gamma": 0.97, "lam": 0.9}
    a = mk.rollout_advantages(*args, batch.macro_ids, **numbers)
    for dtype in (wide(), torch.float32):
        tensors = {k: torch.tensor(v, dtype=dtype) for k, v in numbers.items()}
        b = mk.rollout_advantages(*args, batch.macro_ids, **tensors)
        for x, y in zip(a, b, strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)


def test_long_row_of_giant_and_tiny_macro_actions():
    """gamma^n of a macro action of thousands of tokens stays finite and right."""
    ids = [[0] * 3000 + list(range(1, 500)) + [500] * 2000]
    call = calls.gae_call(
        bootstrap=True, gamma=0.999, lam=0.99, discount_per="token", reward_weights="mean", value_weights="position"
    )
    for dtype in (wide(), torch.float32):
        check_call(call, make_batch(ids, "right", dtype), "giant")
