"""macro_policy_loss."""

import math

import pytest
import torch

import marlhf_kernels as mk
from tests.cases import calls, oracle, shapes
from tests.cases.batches import make_batch
from tests.cases.checks import check_call, check_everywhere, run_with_gradient
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.precision import tight, wide
from tests.cases.tensors import ids_of, numbers

pytestmark = pytest.mark.usefixtures("backend")
NAN = math.nan


def loss_and_grad(ratios, advantages, ids, **options):
    """The loss and d loss / d logprobs for one row, given the token ratios."""
    logprobs = torch.tensor([ratios], dtype=wide()).log().requires_grad_()
    out = mk.macro_policy_loss(logprobs, torch.zeros_like(logprobs), numbers(advantages), ids_of(ids), **options)
    out.loss.backward()
    return out, logprobs.grad[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 1.0, -1.2, 0.0, 1.0),
        (1.5, -1.0, 1.5, 1.5, 0.0),
        (0.5, 1.0, -0.5, -0.5, 0.0),
        (0.5, -1.0, 0.8, 0.0, 1.0),
        (1.1, 1.0, -1.1, -1.1, 0.0),
        (0.9, -1.0, 0.9, 0.9, 0.0),
    ],
)
@pytest.mark.parametrize("level", oracle.RATIO_LEVELS)
def test_clip_by_hand(ratio, advantage, loss, slope, clipped, level):
    """Clip .2: (rho 1.5, A 1) -> -1.2; (1.5, -1) -> 1.5; (.5, 1) -> -.5; (.5, -1) -> .8; gradient 0 where clipped."""
    out, grad = loss_and_grad([ratio], [advantage], [0], ratio_level=level)
    assert_close([out.loss, *grad, out.clip_fraction], [loss, slope, clipped])
    assert_close([out.ratio_mean, out.ratio_max], [ratio, ratio])


def test_two_sided_clip():
    """clip_low and clip_high are separate: 1.5 with A = 1 and high .3 -> -1.3; .5 with A = -1 and low .05 -> .95."""
    clips = {"clip_low": 0.05, "clip_high": 0.3}
    for ratio, advantage, loss in ((1.5, 1.0, -1.3), (0.5, -1.0, 0.95)):
        out, _ = loss_and_grad([ratio], [advantage], [0], **clips)
        assert_close([out.loss], [loss])


@pytest.mark.parametrize(("level", "ratio"), [("macro", 1.1 * 1.2 * 0.9), ("macro_mean", (1.1 * 1.2 * 0.9) ** (1 / 3))])
def test_macro_ratio_by_hand(level, ratio):
    """`macro` is the product of the token ratios, `macro_mean` their geometric mean; the hole is no token."""
    logprobs = torch.tensor([[1.1, NAN, 1.2, 0.9]], dtype=wide()).log().requires_grad_()
    old = torch.tensor([[0.0, NAN, 0.0, 0.0]], dtype=wide())
    out = mk.macro_policy_loss(logprobs, old, numbers([2.0, NAN, 2.0, 2.0]), ids_of([0, -1, 0, 0]), ratio_level=level)
    out.loss.backward()
    assert_close([out.loss, out.ratio_mean], [-2 * ratio, ratio])
    per_token = -2 * ratio / (3 if level == "macro_mean" else 1)
    assert_close(logprobs.grad, [[per_token, 0.0, per_token, per_token]])


def test_the_token_level_is_the_default():
    """Level `token`, clip .2 on both sides, no dual clip, divided by the tokens."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    args = (batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch.macro_ids)
    a = mk.macro_policy_loss(*args)
    b = mk.macro_policy_loss(
        *args, clip_low=0.2, clip_high=0.2, dual_clip=None, ratio_level="token", normalize_by="tokens", normalizer=None
    )
    for x, y in zip(a, b, strict=True):
        assert_same_bits(x, y)


def test_normalisers_by_hand():
    """Rows of 4 tokens in 2 macro actions and of 1 in 1, rho 1, A = 1 and 3: every count by hand."""
    lp = torch.zeros(2, 4, dtype=wide())
    ids = ids_of([0, 0, 0, 1], [0, -1, -1, -1])
    advantages = numbers([1.0] * 4, [3.0] * 4)

    def loss(**options):
        return mk.macro_policy_loss(lp, lp, advantages, ids, **options).loss

    assert_close([loss(), loss(normalize_by="macros"), loss(normalize_by="sequences")], [-7 / 5, -7 / 3, -2.0])
    macro = {"ratio_level": "macro"}
    assert_close(
        [loss(**macro), loss(**macro, normalize_by="tokens"), loss(**macro, normalize_by="sequences")],
        [-5 / 3, -5 / 5, -2.0],
    )
    assert_close([loss(normalizer=10.0), loss(normalize_by="sequences", normalizer=8)], [-0.7, -4 / 8])


def test_empty_sequences_do_not_count():
    """`sequences` is the mean over non-empty ones: a masked row changes nothing."""
    lp = torch.zeros(3, 2, dtype=wide())
    ids = ids_of([0, 1], [-1, -1], [0, -1])
    advantages = numbers([1.0, 1.0], [NAN, NAN], [4.0, NAN])
    out = mk.macro_policy_loss(lp, lp, advantages, ids, normalize_by="sequences")
    assert_close([out.loss], [-(1.0 + 4.0) / 2])


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_normalizer_makes_the_split_irrelevant(microbatch):
    """Lengths 1 and 3, A = +1 and -1, rho 1: loss .5 over the step for every microbatch size, and the same gradient."""
    ids = ids_of([0, -1, -1], [0, 1, 2], [-1, -1, -1], [-1, -1, -1])
    advantages = torch.tensor([[1.0], [-1.0], [NAN], [NAN]], dtype=wide()).expand(4, 3)
    lp = torch.zeros(4, 3, dtype=wide(), requires_grad=True)
    total = 0.0
    for at in range(0, 4, microbatch):
        part = slice(at, at + microbatch)
        out = mk.macro_policy_loss(
            lp[part], torch.zeros(4, 3, dtype=wide())[part], advantages[part], ids[part], normalizer=torch.tensor(4.0)
        )
        out.loss.backward()
        total += out.loss.item()
    assert total == pytest.approx(0.5, abs=tight())
    assert_close(lp.grad, [[-0.25, 0.0, 0.0], [0.25] * 3, [0.0] * 3, [0.0] * 3])


def test_token_form_times_tokens_equals_macro_form_times_macros():
    """At rho = 1 the token loss times T and the macro loss times M have the same gradient."""
    ids = shapes.BY_HAND["ragged"]
    batch = make_batch(ids, poison=0.0)
    old = batch["old_logprobs"]
    gae = mk.macro_gae(batch["rewards"], batch["values"], batch.macro_ids)
    gradients = []
    for level in ("token", "macro"):
        lp = old.clone().requires_grad_()
        out = mk.macro_policy_loss(lp, old, gae.advantages, batch.macro_ids, ratio_level=level, normalizer=1)
        out.loss.backward()
        gradients.append(lp.grad)
    assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(5.0, -1.0, 3.0, 0.0), (2.0, -1.0, 2.0, 2.0), (3.0, -1.0, 3.0, 3.0), (5.0, 1.0, -1.2, 0.0)],
)
def test_dual_clip_by_hand(ratio, advantage, loss, slope):
    """dual_clip 3 with A < 0: min(loss, 3 |A|), gradient 0 where the bound is smaller; a tie keeps it all."""
    lp = numbers([math.log(ratio)])
    if ratio == 3.0:
        # log and exp need not return 3 exactly: make the tie exact with a bound of exp(log 3)
        bound = lp.exp().item()
    else:
        bound = 3.0
    lp = lp.requires_grad_()
    out = mk.macro_policy_loss(lp, torch.zeros(1, 1, dtype=wide()), numbers([advantage]), ids_of([0]), dual_clip=bound)
    out.loss.backward()
    assert_close([out.loss, lp.grad.item()], [loss, slope])


def test_ties_take_the_unclipped_branch():
    """At rho = 1 with clips of 0 both terms are equal: nothing counts as clipped and the gradient is full."""
    for advantage in (1.0, -1.0):
        out, grad = loss_and_grad([1.0], [advantage], [0], clip_low=0.0, clip_high=0.0)
        assert_close([out.loss, out.clip_fraction, *grad], [-advantage, 0.0, -advantage])


@pytest.mark.parametrize("level", oracle.RATIO_LEVELS)
def test_zero_advantage_contributes_exactly_zero(level):
    """A = 0 gives 0 and gradient 0, even where the ratio overflows to inf."""
    lp = numbers([1000.0, 0.0]).requires_grad_()
    out = mk.macro_policy_loss(lp, numbers([0.0, 0.0]), numbers([0.0, 1.0]), ids_of([0, 1]), ratio_level=level)
    out.loss.backward()
    assert_close([out.loss, *lp.grad[0].tolist()], [-0.5, 0.0, -0.5])
    assert out.clip_fraction.item() == 0.0


@pytest.mark.parametrize("level", ["macro", "macro_mean"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_macro_log_ratio_is_clamped(level, sign):
    """A macro log-ratio beyond +-60 counts as +-60 and has gradient 0."""
    lp = numbers([sign * 70.0, 0.0]).requires_grad_()
    out = mk.macro_policy_loss(lp, numbers([0.0, 0.0]), numbers([-sign, -1.0]), ids_of([0, 1]), ratio_level=level)
    out.loss.backward()
    assert out.ratio_max.item() == pytest.approx(math.exp(60.0) if sign > 0 else 1.0, rel=tight())
    assert lp.grad[0].tolist() == [0.0, 0.5]
    assert math.isfinite(out.loss.item())
    assert out.loss.item() == pytest.approx((math.exp(60.0) if sign > 0 else -math.exp(-60.0)) / 2 + 0.5)


def test_macro_mean_is_clamped_after_the_mean():
    """The clamp is on the log-ratio of the macro action: four tokens of 30 have mean 30 and sum 120."""
    lp = numbers([30.0] * 4)
    args = (lp, torch.zeros_like(lp), numbers([-1.0] * 4), ids_of([0] * 4))
    assert mk.macro_policy_loss(*args, ratio_level="macro_mean").loss.item() == pytest.approx(math.exp(30.0))
    assert mk.macro_policy_loss(*args, ratio_level="macro").loss.item() == pytest.approx(math.exp(60.0))


def test_log_ratio_of_60_itself_is_not_clamped():
    """Gradient 0 is for beyond 60: at 60 the slope is there."""
    lp = numbers([60.0]).requires_grad_()
    mk.macro_policy_loss(lp, numbers([0.0]), numbers([-1.0]), ids_of([0]), ratio_level="macro").loss.backward()
    assert lp.grad.item() == pytest.approx(math.exp(60.0), rel=tight())


@pytest.mark.parametrize("level", ["macro", "macro_mean"])
def test_macro_levels_read_the_first_tokens_advantage(level):
    """A macro action's advantage stands at its first action token; the others are not read."""
    ids = ids_of([-1, 0, -1, 0, 1])
    lp = torch.zeros(1, 5, dtype=wide())
    out = mk.macro_policy_loss(lp, lp, numbers([NAN, 2.0, NAN, NAN, 4.0]), ids, ratio_level=level)
    assert_close([out.loss], [-3.0])


def test_statistics_by_hand():
    """approx_kl is the mean of e^d - 1 - d over tokens at every level; ratio_mean and ratio_max are over units."""
    ratios = [1.5, 0.5, 1.1]
    k3 = sum(r - 1 - math.log(r) for r in ratios) / 3
    out, _ = loss_and_grad(ratios, [1.0, 1.0, 1.0], [0, 0, 1])
    assert_close([out.clip_fraction, out.approx_kl, out.ratio_mean, out.ratio_max], [1 / 3, k3, sum(ratios) / 3, 1.5])
    out, _ = loss_and_grad(ratios, [1.0, 1.0, 1.0], [0, 0, 1], ratio_level="macro")
    assert_close([out.clip_fraction, out.approx_kl, out.ratio_mean, out.ratio_max], [0.0, k3, (0.75 + 1.1) / 2, 1.1])


def test_statistics_use_their_own_counts():
    """A given normalizer divides the loss, not the statistics."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    args = (batch["logprobs"], batch["old_logprobs"], batch["advantages"], batch.macro_ids)
    a, b = mk.macro_policy_loss(*args), mk.macro_policy_loss(*args, normalizer=1000.0)
    for name in calls.POLICY_STATISTICS:
        assert_same_bits(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("level", oracle.RATIO_LEVELS)
@pytest.mark.parametrize("normalize_by", [None, *oracle.NORMALIZE_BY])
@pytest.mark.parametrize("normalizer", [None, 0, 0.0, torch.tensor(0.0), 5.0])
def test_no_action_token(level, normalize_by, normalizer):
    """No action at all: loss 0, gradients 0, no NaN; statistics 0 and ratios 1; also with normalizer 0."""
    for shape in ((2, 3), (0, 3), (2, 0), (0, 0)):
        lp = torch.full(shape, NAN, dtype=wide(), requires_grad=True)
        out = mk.macro_policy_loss(
            lp, torch.full(shape, NAN, dtype=wide()), torch.full(shape, NAN, dtype=wide()),
            torch.full(shape, -1, dtype=torch.int32),
            ratio_level=level, normalize_by=normalize_by, normalizer=normalizer,
        )  # fmt: skip
        out.loss.backward()
        assert [x.item() for x in out] == [0.0, 0.0, 0.0, 1.0, 1.0]
        assert not lp.grad.any()


def test_only_logprobs_learn():
    """Gradients flow to logprobs alone; old log-probabilities and advantages get none."""
    batch = make_batch(shapes.BY_HAND["ragged"], poison=0.0)
    leaves = [batch[n].clone().requires_grad_() for n in ("logprobs", "old_logprobs", "advantages")]
    out = mk.macro_policy_loss(*leaves, batch.macro_ids)
    assert [x.requires_grad for x in out] == [True, False, False, False, False]
    out.loss.backward()
    assert leaves[0].grad.any()
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    frozen = mk.macro_policy_loss(leaves[0].detach(), leaves[1], leaves[2], batch.macro_ids)
    assert not frozen.loss.requires_grad


def test_grad_output_is_honoured():
    """loss * 3 has three times the gradient, also when the factor is a tensor on the graph."""
    call = calls.policy_call(ratio_level="macro")
    batch = make_batch(shapes.BY_HAND["ragged"], poison=0.0)
    gradients = []
    for factor in (1.0, -3.0):
        lp = batch["logprobs"].clone().requires_grad_()
        (call.run(batch.with_fields(logprobs=lp))[0] * factor).backward()
        gradients.append(lp.grad)
    assert_close(gradients[1], -3.0 * gradients[0])


@pytest.mark.parametrize("call", calls.POLICY, ids=str)
def test_oracle_by_hand_shapes(call):
    """Loss, statistics and gradient of every option set equal the loop oracle, on every shape and layout."""
    check_everywhere(call)


@pytest.mark.parametrize("call", [calls.policy_call(ratio_level=r) for r in oracle.RATIO_LEVELS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_oracle_grids(call, dtype, backend):
    """Low precisions in, float32 accumulation, gradient in the input's dtype: around the borders of tiles."""
    for grid in {"interpreter", "edge"} & set(backend.grids):
        for rows, length in shapes.GRIDS[grid]:
            ids = shapes.random_rows(rows, length)
            check_call(call, make_batch(ids, "packed" if length % 2 else "mixed", dtype), f"{rows}x{length}")


@pytest.mark.slow
@pytest.mark.parametrize("level", oracle.RATIO_LEVELS)
def test_oracle_production(level, backend):
    """Production-sized batches."""
    if "production" not in backend.grids:
        pytest.skip(f"{backend.name} is too slow here for the production grid")
    for rows, length in shapes.GRIDS["production"]:
        call = calls.policy_call(ratio_level=level)
        check_call(call, make_batch(shapes.random_rows(rows, length), "right", torch.float32), f"{rows}x{length}")


def test_coefficients_may_be_tensors():
    """Clips, dual clip and normalizer as 0-d tensors give what numbers give."""
    batch = make_batch(shapes.BY_HAND["ragged"])
    numbers = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "normalizer": 7.0}
    tensors = {k: torch.tensor(v, dtype=wide()) for k, v in numbers.items()}
    a = run_with_gradient(calls.policy_call(**numbers), batch)
    b = run_with_gradient(calls.policy_call(**tensors), batch)
    assert_close([*a[0]], [*b[0]])
    assert_close(a[1], b[1])
