"""With every macro action one token, macro-action PPO is token-level PPO."""

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases import oracle, token_ppo
from tests.cases.batches import make_batch
from tests.cases.compare import assert_close
from tests.cases.layouts import PADDED

pytestmark = pytest.mark.usefixtures("backend")
MASKS = [
    [[1] * 7, [1] * 3, [1]],
    [[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]],
]


@pytest.mark.parametrize("rows", MASKS, ids=["full", "gaps"])
@pytest.mark.parametrize("layout", PADDED)
@pytest.mark.parametrize("level", oracle.RATIO_LEVELS)
@pytest.mark.parametrize("seed", range(3))
def test_one_token_macro_actions_are_token_ppo(rows, layout, level, seed):
    """Rewards, advantages, returns, both losses and both gradients equal an independent token PPO to 1e-12."""
    singles = [oracle.fixed_ngram(row, 1) for row in rows]
    batch = make_batch(singles, layout, seed=seed)
    ids = segmentation.token(batch.mask)
    assert ids.tolist() == batch.macro_ids.tolist()
    mask = batch.mask
    kl_coef, gamma, lam, clip = 0.1, 0.98, 0.9, 0.2
    names = ("scores", "old_logprobs", "ref_logprobs")
    out = mk.rollout_advantages(
        *(batch[n] for n in names), batch["old_values"], ids, kl_coef=kl_coef, gamma=gamma, lam=lam
    )
    rewards = token_ppo.rewards(*(batch[n] for n in names), mask, kl_coef)
    advantages, returns = token_ppo.advantages(rewards, batch["old_values"], mask, gamma, lam)
    assert_close(out.rewards, rewards)
    assert_close(out.advantages, advantages)
    assert_close(out.returns, returns)
    ours, theirs = (batch["logprobs"].clone().requires_grad_() for _ in range(2))
    mine = mk.macro_policy_loss(ours, batch["old_logprobs"], out.advantages, ids, ratio_level=level).loss
    other = token_ppo.policy_loss(theirs, batch["old_logprobs"], advantages, mask, clip)
    mine.backward()
    other.backward()
    assert_close([mine], [other], scale=1.0)
    assert_close(ours.grad, torch.where(mask, theirs.grad, 0.0))
    for value_level in ("token", "macro"):
        ours, theirs = (batch["values"].clone().requires_grad_() for _ in range(2))
        mine = mk.macro_value_loss(ours, batch["old_values"], out.returns, ids, level=value_level).loss
        other = token_ppo.value_loss(theirs, batch["old_values"], returns, mask, clip)
        mine.backward()
        other.backward()
        assert_close([mine], [other], scale=1.0)
        assert_close(ours.grad, torch.where(mask, theirs.grad, 0.0))


@pytest.mark.parametrize("reward_weights", list(oracle.REWARD_WEIGHTS))
@pytest.mark.parametrize("value_weights", oracle.VALUE_WEIGHTS)
@pytest.mark.parametrize("discount_per", ["macro", "token"])
def test_every_weight_is_the_same_on_one_token(reward_weights, value_weights, discount_per):
    """On macro actions of one token the names of weights and discounts make no difference."""
    batch = make_batch([[0, 1, 2, 3, 4], [0, -1, 1]])
    args = (batch["rewards"], batch["values"], batch.macro_ids)
    plain = mk.macro_gae(*args, gamma=0.9, lam=0.8)
    other = mk.macro_gae(
        *args, gamma=0.9, lam=0.8,
        reward_weights=reward_weights, value_weights=value_weights, discount_per=discount_per,
    )  # fmt: skip
    for a, b in zip(plain, other, strict=True):
        assert_close(a, b)


def test_gspo_is_macro_mean_on_whole_responses():
    """`macro_mean` with one macro action a response: exp of the mean log-ratio, averaged over responses."""
    batch = make_batch([[0] * 5, [0] * 2], poison=0.0)
    mask = batch.mask
    new, old, advantage = batch["logprobs"], batch["old_logprobs"], batch["advantages"]
    out = mk.macro_policy_loss(new, old, advantage, segmentation.whole(mask), ratio_level="macro_mean")
    ratio = torch.exp(((new - old) * mask).sum(1) / mask.sum(1))
    first = advantage[:, 0]
    want = torch.maximum(-first * ratio, -first * ratio.clamp(0.8, 1.2)).mean()
    assert_close([out.loss], [want], scale=1.0)
