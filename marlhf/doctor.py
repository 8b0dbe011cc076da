"""`marlhf doctor`: what must hold before a long PPO run, measured on the user's own models and data.

Every check is one line with a number and the limit that it must keep. Nothing is trained and nothing is written but to
a temporary folder.
"""

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from marlhf.checkpoint import Start
from marlhf.config import Config, ModelConfig
from marlhf.data import EncodedRow, encode_rows, load_rows, load_tokenizer
from marlhf.engine import prepare
from marlhf.errors import UserError
from marlhf.models import check_head, load_policy, load_reward_model, response_logprobs, response_values, save_model
from marlhf.models.loading import check_fits
from marlhf.progress import console
from marlhf.rewards import Rewards, load_rewards
from marlhf.rewards.sources import ModelReward
from marlhf.rollout import Rollout, complete, generate, scored_temperature, stop_ids
from marlhf.stages.ppo import start_critic
from marlhf.stages.ppo_checks import check_ppo
from marlhf_kernels import segmentation

RESPONSES = 32
"""Sampled for the checks, at most: enough to see a wrong law, few enough for seconds on a CPU."""

# What log-probabilities of one model may differ by between two ways of computing them.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True)
class Finding:
    """One check: what was measured, what it must be, and whether it is."""

    name: str
    ok: bool
    found: str
    wanted: str


class Patient:
    """The models, data and one rollout of a configuration, each loaded when a check first needs it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ppo = config.ppo
        self.device = prepare(config)

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's."""
        return load_tokenizer(self.ppo.model.path, trust_remote_code=self.ppo.model.trust_remote_code)

    @cached_property
    def stops(self) -> list[int]:
        """The tokens that end a response."""
        return stop_ids(self.tokenizer, self.ppo.rollout)

    @cached_property
    def rows(self) -> list[EncodedRow]:
        """Every prompt, those that are held out behind the others."""
        train, held_out = load_rows(self.ppo.data, fields=("prompt",))
        return encode_rows(train + held_out, self.tokenizer, self.ppo.data, responses=())[0]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt with its response."""
        return max(len(row.prompt_ids) for row in self.rows) + self.ppo.rollout.max_new_tokens

    @cached_property
    def policy(self) -> Any:
        """As PPO would start to train it."""
        policy = load_policy(self.ppo.model, key="ppo.model", device=self.device)
        check_head(policy, key="ppo.model")
        check_fits(policy, self.tokenizer, key="ppo.model", longest=self.longest)
        return policy

    @cached_property
    def reference(self) -> Any:
        """As PPO would keep it."""
        return load_policy(self.ppo.model, key="ppo.model", device=self.device).eval()

    @cached_property
    def rewards(self) -> Rewards:
        """Every source of rewards."""
        return load_rewards(
            self.ppo,
            policy=self.policy,
            tokenizer=self.tokenizer,
            rows=[row.row for row in self.rows],
            longest=self.longest,
            device=self.device,
        )

    @cached_property
    def critic(self) -> Any | None:
        """As PPO would start to train it; None for an estimator without one."""
        return start_critic(self.rewards, Start(), self.config, self.device)

    @cached_property
    def sampled(self) -> list[EncodedRow]:
        """The prompts of the rollout."""
        count = max(1, min(RESPONSES, len(self.rows)) // self.ppo.samples_per_prompt)
        return [row for row in self.rows[:count] for _ in range(self.ppo.samples_per_prompt)]

    @cached_property
    def rollout(self) -> Rollout:
        """Sampled, scored and cut as an iteration of PPO does it."""
        rows = [row.row for row in self.sampled]
        responses = generate(
            self.policy.eval(),
            [row.prompt_ids for row in self.sampled],
            self.ppo.rollout,
            stops=self.stops,
            pad_id=self.tokenizer.pad_token_id,
            seed=self.config.seed,
            rows=rows,
        )
        return complete(
            responses,
            policy=self.policy,
            reference=self.reference,
            critic=self.critic,
            rewards=self.rewards,
            config=self.ppo,
            kl_coef=self.ppo.kl_coef,
            rows=rows,
            cuts=torch.Generator().manual_seed(self.config.seed),
        )

    @property
    def rounding(self) -> float:
        """What two ways of computing a log-probability may differ by."""
        return ROUNDING[next(self.policy.parameters()).dtype]

    def logprobs(self, *, train: bool = False) -> Tensor:
        """Of the rollout's tokens, by the forward that the update differentiates."""
        with torch.no_grad():
            return response_logprobs(
                self.policy.train(train), *self.rollout.parts(), temperature=scored_temperature(self.ppo.rollout)
            )[0]


def run_doctor(config: Config) -> bool:
    """Checks everything, prints a table, and returns whether all is well."""
    patient = Patient(config)
    findings, reasons = [], []
    for name, check in CHECKS.items():
        try:
            findings.append(check(name, patient))
        except UserError as error:
            findings.append(Finding(name, False, "refused, see below", ""))
            reasons.append(f"{name}: {error}")
    table = Table("check", "found", "must be", "", title=f"marlhf doctor: ppo, {config.ppo.model.path}")
    for finding in findings:
        mark = "ok" if finding.ok else "WRONG"
        table.add_row(finding.name, finding.found, finding.wanted, mark, style="" if finding.ok else "bold red")
    console.print(table, markup=False)
    for reason in dict.fromkeys(reasons):
        console.print(reason, highlight=False, markup=False, soft_wrap=True)
    wrong = [finding.name for finding in findings if not finding.ok]
    console.print(f"wrong: {', '.join(wrong)}" if wrong else "all is well", highlight=False, markup=False)
    return not wrong


def at_most(name: str, value: float, limit: float) -> Finding:
    """A check of a number that NaN fails."""
    return Finding(name, value <= limit, f"{value:.3g}", f"at most {limit:g}")


def settings(name: str, patient: Patient) -> Finding:
    """What is refused before any model is loaded, such as top-k sampling."""
    check_ppo(patient.ppo, preset=patient.config.preset)
    return Finding(name, True, "no contradiction", "")


def prompts(name: str, patient: Patient) -> Finding:
    """There are enough for a rollout batch."""
    need = patient.ppo.rollout.batch_size
    return Finding(name, len(patient.rows) >= need, f"{len(patient.rows):,}", f"at least {need} (rollout.batch_size)")


def bos_and_eos(name: str, patient: Patient) -> Finding:
    """Prompts whose number of BOS tokens is not the one that the tokenizer puts in front, or that end in a stop token.

    A prompt that already ends the text teaches the policy to go on behind the end.
    """
    bos = patient.tokenizer.bos_token_id
    expected = 0 if bos is None else patient.tokenizer("x")["input_ids"].count(bos)
    if bos is not None and patient.ppo.data.chat_template:
        expected = max(expected, min(1, patient.rows[0].prompt_ids.count(bos)))
    wrong = sum(row.prompt_ids.count(bos) != expected for row in patient.rows) if bos is not None else 0
    ended = sum(row.prompt_ids[-1] in patient.stops for row in patient.rows if row.prompt_ids)
    counts = f"{wrong} with another number of BOS than {expected}, {ended} end in a stop token"
    return Finding(name, wrong == ended == 0, counts, f"0 of {len(patient.rows):,} prompts")


def vocabulary(name: str, patient: Patient) -> Finding:
    """Policy, tokenizer and every reward model mean the same by a token, and have their heads."""
    rewards = patient.rewards
    return Finding(name, True, f"{len(patient.tokenizer):,} tokens, rewards: {', '.join(rewards.names)}", "")


def dropout(name: str, patient: Patient) -> Finding:
    """Two forwards in training mode."""
    difference = (patient.logprobs(train=True) - patient.logprobs(train=True)).abs().max().item()
    return at_most(name, difference, 0.0)


def first_ratio(name: str, patient: Patient) -> Finding:
    """The importance ratio before the first step, in training mode, against the rollout's log-probabilities."""
    difference = patient.logprobs(train=True) - patient.rollout.logprobs
    ratio = difference.masked_fill(~patient.rollout.action_mask, 0.0).exp() - 1
    return at_most(name, ratio.abs().max().item(), patient.rounding)


def first_kl(name: str, patient: Patient) -> Finding:
    """The policy starts as its reference."""
    difference = (patient.rollout.logprobs - patient.rollout.ref_logprobs).abs().max().item()
    return at_most(name, difference, patient.rounding)


def padding(name: str, patient: Patient) -> Finding:
    """Log-probabilities and values of rows alone and in the batch."""
    rollout, worst = patient.rollout, 0.0
    with torch.no_grad():
        values = None if patient.critic is None else response_values(patient.critic, *rollout.parts())
        for i in range(min(8, len(patient.sampled))):
            [(_, row)] = rollout[torch.tensor([i], device=patient.device)].microbatches(None)
            length = int(row.lengths)
            temperature = scored_temperature(patient.ppo.rollout)
            alone, _ = response_logprobs(patient.policy.eval(), *row.parts(), temperature=temperature)
            real = row.action_mask[0, :length]
            difference = (alone[0, :length] - rollout.logprobs[i, :length])[real]
            worst = max([worst, *difference.abs().tolist()])
            if values is not None:
                value = response_values(patient.critic, *row.parts())[0, :length] - values[i, :length]
                worst = max([worst, *value.abs().tolist()])
    return at_most(name, worst, patient.rounding)


def stop_tokens(name: str, patient: Patient) -> Finding:
    """Responses are masked by length: up to and with the first stop token, also where it is the pad token."""
    rollout = patient.rollout
    wrong = 0
    for ids, mask, truncated in zip(
        rollout.response_ids.tolist(), rollout.response_mask.tolist(), rollout.truncated.tolist(), strict=True
    ):
        length = sum(mask)
        places = [place for place, token in enumerate(ids[:length]) if token in patient.stops]
        expected = [] if truncated else [length - 1]
        wrong += mask[:length] != [True] * length or places != expected
    share = 1 - rollout.truncated.float().mean().item()
    return Finding(name, wrong == 0, f"{wrong} wrong; {share:.0%} stopped by themselves", "0 wrong")


def law(name: str, patient: Patient) -> Finding:
    """Whether what was sampled is distributed as it is scored.

    Under the scored law the mean of log p of sampled tokens is minus the mean entropy. The number is the distance in
    standard errors; top-k, top-p or another temperature drive it far above.
    """
    rollout = patient.rollout
    actions = rollout.action_mask
    total = variance = 0.0
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
    mask = torch.cat([rollout.prompt_mask, rollout.response_mask], dim=1)
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        for i in range(ids.shape[0]):
            logits = patient.policy.eval()(
                input_ids=ids[i : i + 1], attention_mask=mask[i : i + 1].long(), position_ids=positions[i : i + 1]
            ).logits[0, rollout.prompt_ids.shape[1] - 1 : -1][actions[i]]
            logp = (logits.float() / scored_temperature(patient.ppo.rollout)).log_softmax(-1).double()
            p = logp.exp()
            finite = torch.where(p > 0, logp, 0.0)
            entropy = -(p * finite).sum(-1)
            picked = logp.gather(-1, rollout.response_ids[i][actions[i]][:, None])[:, 0]
            total += (picked + entropy).sum().item()
            variance += ((p * finite.square()).sum(-1) - entropy.square()).sum().item()
    return at_most(name, abs(total) / math.sqrt(max(variance, 1e-12)), 4.0)


def macro_actions(name: str, patient: Patient) -> Finding:
    """Ids are valid, and stand on every token that the policy wrote and on no other."""
    ids = patient.rollout.macro_ids
    try:
        segmentation.validate(ids)
    except ValueError as error:
        return Finding(name, False, str(error), "valid ids")
    wrong = int(((ids >= 0) != patient.rollout.action_mask).sum())
    macros = int((ids.amax(dim=1) + 1).sum())
    length = int((ids >= 0).sum()) / max(1, macros)
    return Finding(name, wrong == 0, f"{wrong} wrong tokens; {macros} of {length:.1f} tokens", "0 wrong tokens")


def scores(name: str, patient: Patient) -> Finding:
    """Scores are finite and tell responses apart."""
    found = patient.rollout.scores
    spread = found.std(correction=0).item()
    finite = bool(torch.isfinite(found).all())
    words = f"mean {found.mean().item():.3g}, deviation {spread:.3g}"
    return Finding(name, finite and spread > 0, words, "finite, deviation above 0")


def saved_heads(name: str, patient: Patient) -> Finding:
    """The critic, saved and loaded again, gives the same values."""
    if patient.critic is None:
        return Finding(name, True, f"{patient.ppo.estimator} has no critic", "")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_model(patient.critic, patient.tokenizer, Path(folder) / "critic")
        config = ModelConfig(path=f"{folder}/critic", dtype=patient.ppo.model.dtype)
        again = load_reward_model(config, key="critic", device=patient.device)
        parts = patient.rollout.parts()
        difference = response_values(again.eval(), *parts) - response_values(patient.critic.eval(), *parts)
    return at_most(name, difference.abs().max().item(), 1e-6)


def memory(name: str, patient: Patient) -> Finding:
    """Weights, gradients and AdamW's two moments of what is trained, weights of what is not; not activations."""
    trained = [model for model in (patient.policy, patient.critic) if model is not None]
    sources = patient.rewards.sources
    fixed = [patient.reference, *(source.model for source in sources if isinstance(source, ModelReward))]
    need = sum(4 * _bytes(model) for model in trained) + sum(_bytes(model) for model in fixed)
    free = _free_memory(patient.device)
    loaded = sum(map(_bytes, (*trained, *fixed)))
    return Finding(
        name,
        need - loaded <= free,
        f"{need / 1e9:.2f} GB, {loaded / 1e9:.2f} of them loaded, without activations",
        f"at most {(free + loaded) / 1e9:.1f} GB",
    )


def batches(name: str, patient: Patient) -> Finding:
    """How many optimiser steps and backward passes an iteration has."""
    ppo = patient.ppo
    responses = ppo.rollout.batch_size * ppo.samples_per_prompt
    minibatch = -(-responses // ppo.minibatches)
    micro = min(minibatch, ppo.microbatch_size or minibatch)
    steps = ppo.ppo_epochs * ppo.minibatches
    words = f"{responses} responses, {steps} steps of {minibatch}, backward passes of {micro}"
    return Finding(name, responses % ppo.minibatches == 0, words, "minibatches of one size")


CHECKS: dict[str, Callable[[str, Patient], Finding]] = {
    "settings": settings,
    "prompts": prompts,
    "BOS and EOS": bos_and_eos,
    "vocabulary and heads": vocabulary,
    "dropout off": dropout,
    "ratio 1 at step 0": first_ratio,
    "KL 0 at step 0": first_kl,
    "padding changes nothing": padding,
    "masks from lengths": stop_tokens,
    "sampled law is scored law": law,
    "macro actions": macro_actions,
    "scores": scores,
    "saved heads": saved_heads,
    "memory": memory,
    "batches": batches,
}


def _bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
