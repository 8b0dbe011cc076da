"""The authors' released code, number for number.

How each of its fields comes out of these ops:

- `token_rewards`: `rewards` of `rollout_advantages` with k1, the score clamped by `reward_clip`.
- `macro_rewards`, `macro_values`: `macro_reduce` with weights "mean" (it sends rewards through the value weights).
- `macro_advantages`, `macro_returns`: `rollout_advantages(reward_weights="mean", value_weights="mean")`, the number
  that all tokens of a macro action share; gamma and lam apply once per macro action, and nothing is bootstrapped.
- `policy_loss`, `policy_grad`: `macro_policy_loss` at ratio level "token", clip .2, of `new_logprobs` against
  `logprobs` with those advantages, not whitened.
- `value_loss`, `value_grad`: `macro_value_loss` at level "token", clip .2, of `new_values` against `values`.
"""

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases.compare import flatten, largest
from tests.cases.golden_cases import CASES
from tests.cases.layouts import LAYOUTS, Layout
from tests.cases.precision import wide

pytestmark = pytest.mark.usefixtures("backend")
TOLERANCE = 1e-6


def equal(actual, expected):
    """To 1e-6; of the largest number, where the backend has no float64 for it."""
    scale = 1.0 if wide() is torch.float64 else max(1.0, largest(expected))
    assert flatten(actual) == pytest.approx(flatten(expected), abs=TOLERANCE * scale, rel=0)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['id']} {c['termination']} {c['ngram']}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_released_code(case, layout):
    """Every field of every case to 1e-6, in every layout."""
    laid = Layout(layout, [case["macro_ids"]])
    ids = laid.macro_ids()

    def tensor(name):
        return laid.lay([case[name]], float("nan"), wide())

    old, values = tensor("logprobs"), tensor("values")
    out = mk.rollout_advantages(
        torch.tensor([case["score"]], dtype=wide()), old, tensor("ref_logprobs"), values, ids,
        kl_coef=case["kl_coef"], score_clip=case["reward_clip"], gamma=case["gamma"], lam=case["lam"],
        reward_weights=case["value_weights"], value_weights=case["value_weights"], **laid.keywords,
    )  # fmt: skip
    equal(laid.rows(out.rewards), [case["token_rewards"]])
    weights = {"weights": case["value_weights"], **laid.keywords}
    equal(mk.macro_reduce(out.rewards, ids, **weights), case["macro_rewards"])
    equal(mk.macro_reduce(values, ids, **weights), case["macro_values"])
    equal(mk.macro_lengths(ids, **laid.keywords), case["macro_lengths"])
    for ours, theirs in ((out.advantages, "macro_advantages"), (out.returns, "macro_returns")):
        for position in ("first", "last"):
            equal(mk.macro_reduce(ours, ids, weights=position, **laid.keywords), case[theirs])
    new = tensor("new_logprobs").requires_grad_()
    policy = mk.macro_policy_loss(new, old, out.advantages, ids, **laid.keywords)
    policy.loss.backward()
    equal(policy.loss, case["policy_loss"])
    equal(laid.rows(new.grad), [case["policy_grad"]])
    new_values = tensor("new_values").requires_grad_()
    value = mk.macro_value_loss(new_values, values, out.returns, ids, **laid.keywords)
    value.loss.backward()
    equal(value.loss, case["value_loss"])
    equal(laid.rows(new_values.grad), [case["value_grad"]])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["termination"] == "fixed"], ids=lambda c: f"{c['id']} n {c['ngram']}"
)
def test_released_segmentation(case):
    """Its fixed rule: n tokens each before the last token, which is a macro action of its own."""
    length = len(case["macro_ids"])
    mask = torch.ones(1, length, dtype=torch.bool)
    ids = segmentation.isolate_last(segmentation.fixed_ngram(mask, case["ngram"]))
    assert ids[0].tolist() == case["macro_ids"]
