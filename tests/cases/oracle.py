"""Every op once more, as slow loops over Python floats.

Nothing here calls torch: inputs and outputs are lists, arithmetic is Python's float64, and each function
says the definition in the order in which one would explain it. A batch is a list of rows (sequences);
a packed batch is the same list of rows before they are laid end to end, so that one oracle serves both
layouts. Masked places are never read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.cases.tape import Number, exp, gradients, value_of

Row = Sequence[float]
Ids = Sequence[int]

VALUE_WEIGHTS = ("mean", "first", "last", "position", "position_reversed")
REWARD_WEIGHTS = ("sum", "discounted_sum", *VALUE_WEIGHTS)
RATIO_LEVELS = ("token", "macro", "macro_mean")
NORMALIZE_BY = ("tokens", "macros", "sequences")
KL_ESTIMATORS = ("k1", "k2", "k3")


def groups(ids: Ids) -> list[list[int]]:
    """For each macro action of a sequence the positions of its action tokens, in order.

    An id below 0 is no action; an id above its own position cannot be one either and counts as -1.
    """
    found: dict[int, list[int]] = {}
    for t, k in enumerate(ids):
        if 0 <= k <= t:
            found.setdefault(k, []).append(t)
    return [found.get(k, []) for k in range(max(found) + 1)] if found else []


def action_positions(ids: Ids) -> list[int]:
    """Positions of the action tokens of one sequence."""
    return [t for t, k in enumerate(ids) if 0 <= k <= t]


def weights_of(n: int, name: str, discount: float = 1.0) -> list[float]:
    """The weight of each of the n action tokens of a macro action under a rule's name."""
    if name == "sum":
        return [1.0] * n
    if name == "discounted_sum":
        return [discount**i for i in range(n)]
    if name == "mean":
        return [1.0 / n] * n
    if name == "first":
        return [1.0 if i == 0 else 0.0 for i in range(n)]
    if name == "last":
        return [1.0 if i == n - 1 else 0.0 for i in range(n)]
    if name == "position":
        raw = [1.0 / (n - i) for i in range(n)]
    elif name == "position_reversed":
        raw = [1.0 / (i + 1) for i in range(n)]
    else:
        raise KeyError(name)
    total = math.fsum(raw)
    return [w / total for w in raw]


def reduce_row(x: Sequence[Any], ids: Ids, weights: str = "sum", discount: float = 1.0) -> list[Any]:
    """One number for each macro action of a sequence: the weighted sum over its tokens."""
    out = []
    for positions in groups(ids):
        total: Any = 0.0
        for w, t in zip(weights_of(len(positions), weights, discount), positions, strict=True):
            # A weight of 0 drops its token whatever it holds.
            if w != 0.0:
                total = total + w * x[t]
        out.append(total)
    return out


def macro_reduce(
    x: Sequence[Row], ids: Sequence[Ids], weights: str = "sum", discount: float = 1.0, num_macros: int | None = None
) -> list[list[float]]:
    """[B, K]: rows padded with 0 to K."""
    rows = [reduce_row(r, i, weights, discount) for r, i in zip(x, ids, strict=True)]
    width = max((len(r) for r in rows), default=0) if num_macros is None else num_macros
    return [r + [0.0] * (width - len(r)) for r in rows]


def macro_reduce_gradient(
    grad: Sequence[Row], ids: Sequence[Ids], weights: str = "sum", discount: float = 1.0
) -> list[list[float]]:
    """d(sum of grad * macro_reduce(x)) / dx, one row for each sequence."""
    out = []
    for g, row in zip(grad, ids, strict=True):
        line = [0.0] * len(row)
        for k, positions in enumerate(groups(row)):
            for w, t in zip(weights_of(len(positions), weights, discount), positions, strict=True) if positions else ():
                line[t] = w * g[k]
        out.append(line)
    return out


def macro_broadcast(macro_x: Sequence[Row], ids: Sequence[Ids]) -> list[list[float]]:
    """Each action token gets its macro action's number, other places 0."""
    return [[m[k] if 0 <= k <= t else 0.0 for t, k in enumerate(row)] for m, row in zip(macro_x, ids, strict=True)]


def macro_lengths(ids: Sequence[Ids], num_macros: int | None = None) -> list[list[int]]:
    """Action tokens in each macro action, [B, K]."""
    rows = [[len(positions) for positions in groups(row)] for row in ids]
    width = max((len(r) for r in rows), default=0) if num_macros is None else num_macros
    return [r + [0] * (width - len(r)) for r in rows]


def kl_estimate(logprob: float, ref: float, estimator: str) -> float:
    """One token's estimate of the KL divergence to the reference."""
    d = logprob - ref
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2.0
    if estimator == "k3":
        return value_of(exp(-d)) - 1.0 + d
    raise KeyError(estimator)


def kl_penalized_rewards(
    scores: Row,
    logprobs: Sequence[Row],
    ref_logprobs: Sequence[Row],
    ids: Sequence[Ids],
    kl_coef: float,
    kl_estimator: str = "k1",
    score_clip: float | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """(rewards, kl): the penalty on every action token, the score on the sequence's last one."""
    rewards, kls = [], []
    for b, row in enumerate(ids):
        reward, kl = [0.0] * len(row), [0.0] * len(row)
        actions = action_positions(row)
        for t in actions:
            kl[t] = kl_estimate(logprobs[b][t], ref_logprobs[b][t], kl_estimator)
            reward[t] = -kl_coef * kl[t]
        if actions:
            score = scores[b]
            if score_clip is not None:
                score = min(max(score, -score_clip), score_clip)
            reward[actions[-1]] += score
        rewards.append(reward)
        kls.append(kl)
    return rewards, kls


def macro_gae(
    rewards: Sequence[Row],
    values: Sequence[Row],
    ids: Sequence[Ids],
    gamma: float = 1.0,
    lam: float = 0.95,
    reward_weights: str = "sum",
    value_weights: str = "mean",
    discount_per: str = "macro",
    bootstrap_values: Row | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages, returns), token-aligned, by the recurrence over macro actions from the last to the first."""
    all_advantages, all_returns = [], []
    for b, row in enumerate(ids):
        places = groups(row)
        discount = gamma if reward_weights == "discounted_sum" else 1.0
        macro_rewards = reduce_row(rewards[b], row, reward_weights, discount)
        macro_values = reduce_row(values[b], row, value_weights)
        advantages, returns = [0.0] * len(row), [0.0] * len(row)
        next_value = 0.0 if bootstrap_values is None or not places else bootstrap_values[b]
        next_advantage = 0.0
        for k in range(len(places) - 1, -1, -1):
            exponent = len(places[k]) if discount_per == "token" else 1
            g, decay = gamma**exponent, lam**exponent
            delta = macro_rewards[k] + g * next_value - macro_values[k]
            advantage = delta + g * decay * next_advantage
            for t in places[k]:
                advantages[t] = advantage
                returns[t] = advantage + macro_values[k]
            next_value, next_advantage = macro_values[k], advantage
        all_advantages.append(advantages)
        all_returns.append(returns)
    return all_advantages, all_returns


def rollout_advantages(
    scores: Row,
    logprobs: Sequence[Row],
    ref_logprobs: Sequence[Row],
    values: Sequence[Row],
    ids: Sequence[Ids],
    kl_coef: float,
    kl_estimator: str = "k1",
    score_clip: float | None = None,
    **gae: Any,
) -> tuple[list[list[float]], ...]:
    """(advantages, returns, rewards, kl)."""
    rewards, kl = kl_penalized_rewards(scores, logprobs, ref_logprobs, ids, kl_coef, kl_estimator, score_clip)
    advantages, returns = macro_gae(rewards, values, ids, **gae)
    return advantages, returns, rewards, kl


def masked_whiten(x: Row, mask: Sequence[bool], shift_mean: bool = True, unbiased: bool = False) -> list[float]:
    """One flat list: (x - mean) / sqrt(var + 1e-8) where the mask holds, 0 elsewhere."""
    kept = [v for v, m in zip(x, mask, strict=True) if m]
    if not kept:
        return [0.0] * len(x)
    n = len(kept)
    mean = math.fsum(kept) / n
    squares = math.fsum((v - mean) ** 2 for v in kept)
    if unbiased:
        var = squares / (n - 1) if n > 1 else 0.0
    else:
        var = squares / n
    back = 0.0 if shift_mean else mean
    return [(v - mean) / math.sqrt(var + 1e-8) + back if m else 0.0 for v, m in zip(x, mask, strict=True)]


@dataclass
class Loss:
    """A loss, its gradient in the input that learns, and its statistics."""

    loss: float
    gradient: list[list[float]]
    statistics: dict[str, float] = field(default_factory=dict)


def _normalised(
    row_sums: list[Any],
    row_units: list[int],
    tokens: int,
    macros: int,
    normalize_by: str,
    normalizer: float | None,
) -> Any:
    """Divide the units' sum by the count that `normalize_by` names, or by the given normalizer."""
    if tokens == 0:
        return 0.0
    total: Any = 0.0
    if normalize_by == "sequences":
        filled = 0
        for unit_sum, units in zip(row_sums, row_units, strict=True):
            if units:
                total = total + unit_sum / units
                filled += 1
        return total / (filled if normalizer is None else normalizer)
    for unit_sum in row_sums:
        total = total + unit_sum
    count = {"tokens": tokens, "macros": macros}[normalize_by]
    return total / (count if normalizer is None else normalizer)


def macro_policy_loss(
    logprobs: Sequence[Row],
    old_logprobs: Sequence[Row],
    advantages: Sequence[Row],
    ids: Sequence[Ids],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: str = "token",
    normalize_by: str | None = None,
    normalizer: float | None = None,
) -> Loss:
    """The clipped surrogate over units (tokens or macro actions), with its gradient in `logprobs`."""
    if normalize_by is None:
        normalize_by = "tokens" if ratio_level == "token" else "macros"
    inputs = [[Number(v) for v in row] for row in logprobs]
    row_sums: list[Any] = []
    row_units: list[int] = []
    ratios: list[float] = []
    clipped_units, tokens, macros = 0, 0, 0
    kl_terms: list[float] = []
    for b, row in enumerate(ids):
        places = groups(row)
        macros += len(places)
        differences = {}
        for t in action_positions(row):
            tokens += 1
            d = inputs[b][t] - old_logprobs[b][t]
            differences[t] = d
            kl_terms.append(value_of(exp(d.value)) - 1.0 - d.value)
        units: list[tuple[Any, float]] = []
        if ratio_level == "token":
            units = [(d, advantages[b][t]) for t, d in sorted(differences.items())]
        else:
            for positions in places:
                s: Any = 0.0
                for t in positions:
                    s = s + differences[t]
                if ratio_level == "macro_mean":
                    s = s / len(positions)
                if s.value > 60.0:
                    s = Number(60.0)
                elif s.value < -60.0:
                    s = Number(-60.0)
                units.append((s, advantages[b][positions[0]]))
        unit_sum: Any = 0.0
        for log_ratio, a in units:
            ratio = exp(log_ratio)
            ratios.append(ratio.value)
            if a == 0.0:
                continue
            bound = min(max(ratio.value, 1.0 - clip_low), 1.0 + clip_high)
            term: Any = -a * ratio
            if -a * bound > term.value:
                clipped_units += 1
                term = -a * bound
            if dual_clip is not None and a < 0.0 and -a * dual_clip < value_of(term):
                term = -a * dual_clip
            unit_sum = unit_sum + term
        row_sums.append(unit_sum)
        row_units.append(len(units))
    loss = _normalised(row_sums, row_units, tokens, macros, normalize_by, normalizer)
    flat = gradients(loss, [v for row in inputs for v in row])
    slopes = iter(flat)
    n = len(ratios)
    return Loss(
        value_of(loss),
        [[next(slopes) for _ in row] for row in inputs],
        {
            "clip_fraction": clipped_units / n if n else 0.0,
            "approx_kl": sum(kl_terms) / tokens if tokens else 0.0,
            "ratio_mean": sum(ratios) / n if n else 1.0,
            "ratio_max": max(ratios) if n else 1.0,
        },
    )


def macro_value_loss(
    values: Sequence[Row],
    old_values: Sequence[Row],
    returns: Sequence[Row],
    ids: Sequence[Ids],
    clip: float | None = 0.2,
    level: str = "token",
    value_weights: str = "mean",
    normalize_by: str | None = None,
    normalizer: float | None = None,
) -> Loss:
    """Half the squared error to the return, the worse of plain and clipped, with its gradient in `values`."""
    if normalize_by is None:
        normalize_by = "tokens" if level == "token" else "macros"
    inputs = [[Number(v) for v in row] for row in values]
    row_sums: list[Any] = []
    row_units: list[int] = []
    clipped_units, tokens, macros = 0, 0, 0
    for b, row in enumerate(ids):
        places = groups(row)
        macros += len(places)
        actions = action_positions(row)
        tokens += len(actions)
        if level == "token":
            units = [(inputs[b][t], old_values[b][t], returns[b][t]) for t in actions]
        else:
            new = reduce_row(inputs[b], row, value_weights)
            old = reduce_row(old_values[b], row, value_weights)
            units = [(new[k], old[k], returns[b][positions[0]]) for k, positions in enumerate(places)]
        unit_sum: Any = 0.0
        for v, v_old, g in units:
            error = v - g
            term: Any = error * error
            if clip is not None:
                held = min(max(v.value, v_old - clip), v_old + clip)
                held_error = held - g
                # Written like the other square: a power may round differently and break a tie.
                if held_error * held_error > term.value:
                    clipped_units += 1
                    term = held_error * held_error
            unit_sum = unit_sum + 0.5 * term
        row_sums.append(unit_sum)
        row_units.append(len(units))
    loss = _normalised(row_sums, row_units, tokens, macros, normalize_by, normalizer)
    slopes = iter(gradients(loss, [v for row in inputs for v in row]))
    n = sum(row_units)
    return Loss(
        value_of(loss),
        [[next(slopes) for _ in row] for row in inputs],
        {"clip_fraction": clipped_units / n if n else 0.0},
    )


def cap_and_scale(logits: Row, temperature: float = 1.0, logit_softcap: float | None = None) -> list[float]:
    """softcap * tanh(x / softcap), then the division by the temperature."""
    if logit_softcap is not None:
        logits = [logit_softcap * math.tanh(x / logit_softcap) for x in logits]
    return [x / temperature for x in logits]


def token_logprob(
    logits: Row, label: int, temperature: float = 1.0, logit_softcap: float | None = None
) -> tuple[float, float]:
    """(log-probability of the label, entropy) of one row; (0, 0) where the label is negative."""
    if label < 0:
        return 0.0, 0.0
    z = cap_and_scale(logits, temperature, logit_softcap)
    top = max(z)
    log_s = math.log(math.fsum(math.exp(v - top) for v in z))
    terms = []
    for v in z:
        p = math.exp(v - top - log_s)
        # The limit of p log p is 0: a banned token adds nothing.
        if p > 0.0:
            terms.append(-p * (v - top - log_s))
    return z[label] - top - log_s, math.fsum(terms)


def token_logprob_gradient(
    logits: Row,
    label: int,
    grad_logprob: float,
    grad_entropy: float = 0.0,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
) -> list[float]:
    """d(grad_logprob * log-probability + grad_entropy * entropy) / d logits."""
    if label < 0:
        return [0.0] * len(logits)
    z = cap_and_scale(logits, temperature, logit_softcap)
    top = max(z)
    log_s = math.log(math.fsum(math.exp(v - top) for v in z))
    _, entropy = token_logprob(logits, label, temperature, logit_softcap)
    out = []
    for v, (x, z_v) in enumerate(zip(logits, z, strict=True)):
        log_p = z_v - top - log_s
        p = math.exp(log_p)
        slope = grad_logprob * ((1.0 if v == label else 0.0) - p)
        if p > 0.0:
            slope -= grad_entropy * p * (log_p + entropy)
        if logit_softcap is not None:
            slope *= 1.0 - math.tanh(x / logit_softcap) ** 2
        out.append(slope / temperature)
    return out


def linear_logits(hidden: Sequence[Row], weight: Sequence[Row], bias: Row | None = None) -> list[list[float]]:
    """hidden W^T + bias, [N, V]."""
    return [
        [
            math.fsum(a * w for a, w in zip(h, row, strict=True)) + (0.0 if bias is None else bias[v])
            for v, row in enumerate(weight)
        ]
        for h in hidden
    ]


@dataclass
class LinearLoss:
    """A policy loss from hidden states with the gradients of what learns."""

    loss: float
    statistics: dict[str, float]
    hidden: list[list[list[float]]]
    weight: list[list[float]]
    bias: list[float]


def linear_macro_policy_loss(
    hidden: Sequence[Sequence[Row]],
    weight: Sequence[Row],
    labels: Sequence[Sequence[int]],
    old_logprobs: Sequence[Row],
    advantages: Sequence[Row],
    ids: Sequence[Ids],
    bias: Row | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    entropy_coef: float = 0.0,
    ref_logprobs: Sequence[Row] | None = None,
    kl_loss_coef: float = 0.0,
    token_normalizer: float | None = None,
    **loss_options: Any,
) -> LinearLoss:
    """Logits of every action token, their log-probabilities, the policy loss, the two penalties, and back."""
    width = len(weight[0])
    logits: list[dict[int, list[float]]] = []
    logprobs: list[list[float]] = []
    entropies: list[dict[int, float]] = []
    for b, row in enumerate(ids):
        logits.append({})
        logprobs.append([0.0] * len(row))
        entropies.append({})
        for t in action_positions(row):
            (x,) = linear_logits([hidden[b][t]], weight, bias)
            logits[b][t] = x
            logprobs[b][t], entropies[b][t] = token_logprob(x, labels[b][t], temperature, logit_softcap)
    policy = macro_policy_loss(logprobs, old_logprobs, advantages, ids, **loss_options)
    tokens = sum(len(action_positions(row)) for row in ids)
    count = (tokens if token_normalizer is None else token_normalizer) if tokens else 1
    loss = policy.loss
    d_hidden = [[[0.0] * width for _ in row] for row in ids]
    d_weight = [[0.0] * width for _ in weight]
    d_bias = [0.0] * len(weight)
    for b, row in enumerate(ids):
        for t in action_positions(row):
            slope = policy.gradient[b][t]
            if ref_logprobs is not None:
                d = logprobs[b][t] - ref_logprobs[b][t]
                loss += kl_loss_coef * d * d / 2.0 / count
                slope += kl_loss_coef * d / count
            loss -= entropy_coef * entropies[b][t] / count
            g = token_logprob_gradient(
                logits[b][t], labels[b][t], slope, -entropy_coef / count, temperature, logit_softcap
            )
            h, w, c = linear_gradients([hidden[b][t]], weight, [g])
            d_hidden[b][t] = h[0]
            d_weight = [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(d_weight, w, strict=True)]
            d_bias = [x + y for x, y in zip(d_bias, c, strict=True)]
    return LinearLoss(loss, policy.statistics, d_hidden, d_weight, d_bias)


def linear_gradients(
    hidden: Sequence[Row], weight: Sequence[Row], grad_logits: Sequence[Row]
) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """(d hidden, d weight, d bias) for the gradient that reached the logits."""
    rows, width, vocab = len(hidden), len(weight[0]), len(weight)
    d_hidden = [
        [math.fsum(grad_logits[n][v] * weight[v][h] for v in range(vocab)) for h in range(width)] for n in range(rows)
    ]
    d_weight = [
        [math.fsum(grad_logits[n][v] * hidden[n][h] for n in range(rows)) for h in range(width)] for v in range(vocab)
    ]
    d_bias = [math.fsum(grad_logits[n][v] for n in range(rows)) for v in range(vocab)]
    return d_hidden, d_weight, d_bias


def ids_from_openings(mask: Sequence[bool], opens: Sequence[bool]) -> list[int]:
    """Ids of one sequence, given for each action token whether it opens a macro action."""
    ids, k = [], -1
    for real, first in zip(mask, opens, strict=True):
        if real and (first or k < 0):
            k += 1
        ids.append(k if real else -1)
    return ids


def fixed_ngram(mask: Sequence[bool], n: float) -> list[int]:
    """Every n action tokens a new macro action."""
    ids, seen = [], 0
    for real in mask:
        ids.append((0 if math.isinf(n) else seen // int(n)) if real else -1)
        seen += bool(real)
    return ids


def float32(x: float) -> float:
    """The float32 nearest to x."""
    return struct.unpack("f", struct.pack("f", x))[0]


def perplexity(mask: Sequence[bool], ref_logprobs: Row, rule: str = "running_mean") -> list[int]:
    """Open a macro action where the next token would raise the running mean (or exceeds its neighbour).

    Sums and products are rounded to float32 one by one: which side of a tie a token falls on is part of the rule.
    """
    opens = []
    total, count, previous = 0.0, 0, None
    for real, ref in zip(mask, ref_logprobs, strict=True):
        if not real:
            opens.append(False)
            continue
        nll = -float32(ref)
        if previous is None:
            first = True
        elif rule == "running_mean":
            first = float32(nll * count) > total
        else:
            first = nll > previous
        if first:
            total, count = 0.0, 0
        total, count, previous = float32(total + nll), count + 1, nll
        opens.append(first)
    return ids_from_openings(mask, opens)


def from_ends(mask: Sequence[bool], ends: Sequence[bool]) -> list[int]:
    """A macro action closes on an action token that is marked as an end."""
    opens, closed = [], True
    for real, end in zip(mask, ends, strict=True):
        opens.append(bool(real and closed))
        if real:
            closed = bool(end)
    return ids_from_openings(mask, opens)


def from_lengths(mask: Sequence[bool], lengths: Sequence[int]) -> list[int]:
    """Macro actions of the given lengths, one after the other."""
    opens = [False] * len(mask)
    actions = [t for t, real in enumerate(mask) if real]
    start = 0
    for length in lengths:
        if length:
            opens[actions[start]] = True
        start += length
    return ids_from_openings(mask, opens)


def isolate_last(ids: Ids) -> list[int]:
    """The last action token becomes a macro action of its own, unless it is one."""
    out = list(ids)
    places = groups(ids)
    if places and len(places[-1]) > 1:
        out[places[-1][-1]] = len(places)
    return out
