"""What the demo came to: reward models, policies and real summaries on the test split, looked at once."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.config import Config, DataConfig, ModelConfig, RewardConfig
from marlhf.data import (
    EncodedRow,
    distinct_n,
    drop_equal_pairs,
    encode_rows,
    left_pad,
    load_rows,
    load_tokenizer,
    repeated_ngram_share,
    right_pad,
    rouge_l,
)
from marlhf.files import write_json
from marlhf.models import load_policy, load_reward_model
from marlhf.progress import console, loops
from marlhf.report import Table, build_report, rich_table, write_curve_picture
from marlhf.responses import Responses
from marlhf.rewards import ModelReward, Rewards, scores_of_responses
from marlhf.rollout import stop_ids
from marlhf.stages.evaluate import measure
from marlhf.stages.reward import pair_scores

POLICIES = {"SFT": "sft", "token PPO": "ppo_token", "macro-action PPO": "ppo_macro"}
REWARD_MODELS = {"reward model": "reward", "unseen": "reward_unseen", "no prompt": "reward_no_prompt"}
KINDS = {
    "other": "another function's summary",
    "shuffled": "words shuffled",
    "truncated": "cut short",
    "sample": "SFT model's own sample",
}
SAMPLES = 3
BATCH = 128


@dataclass
class Interval:
    """A mean with the half-width of its 95% interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Normal interval of a mean of independent values."""
        tensor = torch.tensor(values, dtype=torch.float64)
        return cls(tensor.mean().item(), 1.96 * tensor.std(correction=1).item() / math.sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half:.2f}"


def write_results(
    folder: Path,
    config: Config,
    rows: Sequence[dict[str, Any]],
    device: torch.device,
    seconds: Callable[[], dict[str, float]],
) -> Path:
    """Measures everything on the test split, prints the tables, writes `results.json`, picture and report."""
    tokenizer = load_tokenizer(f"{folder}/sft/final")
    encoded, _ = encode_rows(list(rows), tokenizer, config.ppo.data, responses=("response",))
    scorers = {
        name: load_reward_model(ModelConfig(path=f"{folder}/{stem}/final"), key=name, device=device).eval()
        for name, stem in REWARD_MODELS.items()
    }
    accuracy = {
        name: pair_accuracy(scorer, folder, tokenizer, config, see_prompt=name != "no prompt")
        for name, scorer in scorers.items()
    }
    reference = load_policy(ModelConfig(path=f"{folder}/sft/final"), key="sft", device=device).eval()
    policies: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[str]] = {}
    with loops() as shown:
        loop = shown.start("Measuring", len(POLICIES) + 1, "policies")
        for name, stem in POLICIES.items():
            policy = load_policy(ModelConfig(path=f"{folder}/{stem}/final"), key=name, device=device)
            found = measure(
                encoded,
                policy=policy,
                reference=reference,
                rewards=Rewards([ModelReward(scorers["reward model"], standardize=True)]),
                rollout=config.ppo.rollout,
                stops=stop_ids(tokenizer, config.ppo.rollout),
                pad_id=tokenizer.pad_token_id,
            )
            texts[name] = tokenizer.batch_decode(found.responses.response_ids, skip_special_tokens=True)
            policies[name] = {
                "score": found.scores.tolist(),
                "unseen": score(scorers["unseen"], found.responses).tolist(),
                "kl": found.kl.tolist(),
                "length": found.responses.lengths.float().tolist(),
                "stopped": (~found.responses.truncated).float().tolist(),
                "wall": _wall_seconds(folder / stem),
                **text_numbers(texts[name], rows),
            }
            loop.advance()
        real = real_responses(encoded, tokenizer.pad_token_id, device)
        texts["real summaries"] = [str(row["response"]) for row in rows]
        policies["real summaries"] = {
            "score": score(scorers["reward model"], real).tolist(),
            "unseen": score(scorers["unseen"], real).tolist(),
            "length": real.lengths.float().tolist(),
            **text_numbers(texts["real summaries"], rows),
        }
        loop.advance()

    tables = [reward_table(accuracy), policy_table(policies), samples_table(rows, texts)]
    notes = verdicts(policies)
    for table in tables[:2]:
        console.print(rich_table(table))
    print_samples(rows, texts)
    for note in notes:
        console.print(note, highlight=False, markup=False)
    write_json(
        folder / "results.json",
        {"accuracy": accuracy, "policies": _summaries(policies), "seconds": seconds(), "notes": notes},
    )
    runs = {name: folder / stem for name, stem in POLICIES.items() if stem != "sft"}
    write_curve_picture(runs, folder / "curves.png")
    others = {"SFT": folder / "sft", **{name: folder / stem for name, stem in REWARD_MODELS.items()}}
    return build_report(
        {**runs, **others},
        folder / "report.html",
        title="marlhf demo: PPO and macro-action PPO on docstring summaries",
        tables=tables,
        notes=notes,
    )


@torch.no_grad()
def score(model: Any, responses: Responses) -> Tensor:
    """Standardised scores `[B]`: 0 is the mean of real summaries, 1 their standard deviation."""
    scores = torch.zeros(responses.truncated.shape, device=responses.truncated.device)
    for rows, part in responses.microbatches(BATCH):
        scores[rows] = scores_of_responses(model, *part.parts(), standardize=True)
    return scores


def real_responses(rows: Sequence[EncodedRow], pad_id: int, device: torch.device) -> Responses:
    """The real summaries in the shape of sampled responses."""
    prompt_ids, prompt_mask = left_pad([row.prompt_ids for row in rows], pad_id)
    ids, mask = right_pad([row.response_ids["response"] for row in rows], pad_id)
    return Responses(
        prompt_ids.to(device),
        prompt_mask.to(device),
        ids.to(device),
        mask.to(device),
        truncated=torch.zeros(len(rows), dtype=torch.bool, device=device),
        action_mask=mask.to(device),
    )


@torch.no_grad()
def pair_accuracy(
    model: Any, folder: Path, tokenizer: Any, config: Config, *, see_prompt: bool
) -> dict[str, tuple[int, int]]:
    """Per kind of rejected response, and for all: pairs ranked right, and pairs."""
    lengths = {
        name: getattr(config.reward.data, name)
        for name in ("max_prompt_tokens", "max_response_tokens", "on_long_prompt", "prompt_suffix")
    }
    data = DataConfig(train=f"{folder}/data/pairs_test.jsonl", validation_fraction=0.0, **lengths)
    rows, held_out = load_rows(data, fields=("prompt", "chosen", "rejected"))
    encoded, _ = encode_rows(rows + held_out, tokenizer, data, responses=("chosen", "rejected"))
    encoded, _ = drop_equal_pairs(encoded)
    stage = RewardConfig(see_prompt=see_prompt)
    counts: dict[str, list[int]] = {"all": [0, 0]}
    for start in range(0, len(encoded), BATCH):
        part = encoded[start : start + BATCH]
        chosen, rejected = pair_scores(model, part, stage, tokenizer.pad_token_id)
        for row, right in zip(part, (chosen > rejected).tolist(), strict=True):
            for kind in ("all", str(row.row["kind"])):
                entry = counts.setdefault(kind, [0, 0])
                entry[0] += int(right)
                entry[1] += 1
    return {kind: (right, total) for kind, (right, total) in counts.items()}


def wilson_lower(right: int, total: int) -> float:
    """Lower end of the 95% Wilson score interval of a share."""
    if total == 0:
        return 0.0
    z, share = 1.96, right / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (centre - spread) / (1 + z * z / total)


def text_numbers(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Overlap with the real summaries, and how repetitive the texts are."""
    return {
        "rouge_l": [rouge_l(text, str(row["response"])) for text, row in zip(texts, rows, strict=True)],
        "distinct_2": distinct_n(texts, n=2),
        "repeated_3": repeated_ngram_share(texts, n=3),
    }


def reward_table(accuracy: Mapping[str, Mapping[str, tuple[int, int]]]) -> Table:
    """Accuracy per kind of rejected response, with the lower end of its 95% interval."""

    def cell(counts: tuple[int, int]) -> str:
        right, total = counts
        return f"{right / max(1, total):.0%} (> {wilson_lower(right, total):.0%})"

    first = next(iter(accuracy.values()))
    rows = [
        [f"{label} ({first[kind][1]})", *(cell(found[kind]) for found in accuracy.values())]
        for kind, label in KINDS.items()
        if kind in first
    ]
    rows.append([f"all pairs ({first['all'][1]})", *(cell(found["all"]) for found in accuracy.values())])
    return Table(
        "Real summary scored above ...",
        ["rejected", *accuracy],
        rows,
        "Share of held-out pairs ranked right; in brackets the lower end of the 95% interval. Chance is 50%. "
        "`unseen` was trained on other pairs with another seed and PPO never used it; `no prompt` sees the summary "
        "alone.",
    )


def policy_table(policies: Mapping[str, Mapping[str, Any]]) -> Table:
    """The demo's one table: each policy under everything that was measured."""

    def interval(key: str) -> list[str]:
        return [str(Interval.of(found[key])) if key in found else "-" for found in policies.values()]

    def mean(key: str, form: str) -> list[str]:
        return [format(sum(found[key]) / len(found[key]), form) if key in found else "-" for found in policies.values()]

    def number(key: str, form: str) -> list[str]:
        return [format(found[key], form) if key in found else "-" for found in policies.values()]

    n = len(next(iter(policies.values()))["score"])
    return Table(
        f"Test split, {n} prompts",
        ["", *policies],
        [
            ["reward model", *interval("score")],
            ["unseen reward model", *interval("unseen")],
            ["ROUGE-L", *mean("rouge_l", ".3f")],
            ["KL to SFT, nats", *mean("kl", ".2f")],
            ["tokens", *mean("length", ".1f")],
            ["stopped itself", *mean("stopped", ".0%")],
            ["distinct bigrams", *number("distinct_2", ".2f")],
            ["repeated trigrams", *number("repeated_3", ".1%")],
            ["training, s", *number("wall", ".0f")],
        ],
        "Per response. Scores are standardised: 0 is the mean of real summaries, 1 their deviation; ± is a 95% "
        "interval. ROUGE-L is against the real summary.",
    )


def samples_table(rows: Sequence[Mapping[str, Any]], texts: Mapping[str, Sequence[str]]) -> Table:
    """The first few test prompts with what each policy wrote."""
    body = []
    for i in range(min(SAMPLES, len(rows))):
        body.append([str(rows[i]["prompt"]), "", ""])
        body += [["", name, found[i]] for name, found in texts.items()]
    return Table("Samples", ["prompt", "", "text"], body)


def print_samples(rows: Sequence[Mapping[str, Any]], texts: Mapping[str, Sequence[str]]) -> None:
    """The same as lines, which keep their width on a narrow terminal."""
    width = max(map(len, texts))
    for i in range(min(SAMPLES, len(rows))):
        console.print(f"\n{rows[i]['prompt']}", style="bold", highlight=False, markup=False)
        for name, found in texts.items():
            console.print(f"  {name:<{width}}  {found[i]}", highlight=False, markup=False)
    console.print()


def verdicts(policies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In words, what the table shows and does not."""
    base, base_unseen = Interval.of(policies["SFT"]["score"]), Interval.of(policies["SFT"]["unseen"])
    notes = []
    for name in POLICIES:
        if name == "SFT":
            continue
        ended, unseen = Interval.of(policies[name]["score"]), Interval.of(policies[name]["unseen"])
        gain, needed = ended.mean - base.mean, ended.half + base.half
        moved = "above" if gain > needed else "not clearly above" if gain > -needed else "below"
        change = unseen.mean - base_unseen.mean
        fell = "fell" if change < -(unseen.half + base_unseen.half) else "did not fall"
        notes.append(
            f"{name} ended {moved} SFT under its reward model ({gain:+.2f}, intervals {needed:.2f}) and {fell} under "
            f"the unseen one ({change:+.2f})."
        )
    notes.append(
        "Responses here are a handful of macro actions long and one seed was run, so this table cannot rank token PPO "
        "against macro-action PPO. At this size the text stays rough: what rises is the score."
    )
    return notes


def _wall_seconds(run: Path) -> float:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["seconds"])


def _summaries(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    summaries: dict[str, dict[str, Any]] = {}
    for name, found in policies.items():
        summaries[name] = {}
        for key, value in found.items():
            if isinstance(value, list):
                interval = Interval.of(value)
                summaries[name][key] = {"mean": interval.mean, "half_width_95": interval.half, "n": len(value)}
            else:
                summaries[name][key] = value
    return summaries
