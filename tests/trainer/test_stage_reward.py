"""A reward model from pairs to a folder whose scores are centred."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoModelForSequenceClassification

from marlhf.config import DataConfig, ModelConfig, OptimizerConfig, RewardConfig
from marlhf.data import EncodedRow, PairBatch, encode_rows, load_tokenizer, right_pad
from marlhf.engine import Optimizer
from marlhf.errors import UserError
from marlhf.models import load_reward_model, sequence_scores
from marlhf.report.reading import read_run
from marlhf.stages import reward
from marlhf.stages.reward import (
    centre,
    compared_positions,
    divergence_loss,
    evaluate,
    pair_loss,
    pair_scores,
    run_reward,
    scored_pairs,
    train_step,
)
from tests.trainer.tiny import PAIRS, leftovers, read_jsonl, resolved, save_policy, status, without_times, write_jsonl

CPU = torch.device("cpu")


@pytest.fixture
def words(policies: dict[str, Path], pair_file: Path) -> list[str]:
    """A run of three steps over twelve pairs, which are held out as well."""
    return [
        f"reward.model.path={policies['gpt2']}",
        f"reward.data.train={pair_file}",
        f"reward.data.validation={pair_file}",
        "reward.batch_size=4",
        "reward.optimizer.learning_rate=1e-3",
    ]


def rows_of(folder: Path, rows: list[dict[str, str]] = PAIRS, **settings: Any) -> list[EncodedRow]:
    tokenizer = load_tokenizer(str(folder))
    return encode_rows(rows, tokenizer, DataConfig(**settings), responses=("chosen", "rejected"))[0]


def scorer_of(folder: Path, **settings: Any) -> Any:
    return load_reward_model(ModelConfig(path=str(folder)), key="reward.model", device=CPU, **settings)


def own_scores(model: Any, rows: list[EncodedRow], name: str) -> Tensor:
    """Row by row, read at the last token of prompt + response."""
    found = []
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.response_ids[name]])
        with torch.no_grad():
            found.append(model.score(model.base_model(input_ids=ids).last_hidden_state)[0, -1, 0])
    return torch.stack(found)


def test_loss_by_hand() -> None:
    """-logsigmoid(diff): diff 1 -> 0.31326, 0 -> 0.69315, -1000 -> 1000; finite both ways."""
    for difference, expected in ((1.0, 0.31326), (0.0, 0.69315), (-1000.0, 1000.0), (1000.0, 0.0)):
        chosen = torch.tensor([difference / 2], requires_grad=True)
        loss = pair_loss(chosen, torch.tensor([-difference / 2]))
        assert loss.item() == pytest.approx(expected, abs=5e-6)
        loss.backward()
        assert chosen.grad is not None
        assert chosen.grad.isfinite().all()
    both = pair_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))
    assert both.item() == pytest.approx(0.31326 + 0.69315, abs=1e-5)


def test_each_response_is_read_at_its_last_token(scorers: dict[str, Path]) -> None:
    for family in ("gpt2", "llama"):
        model, rows = scorer_of(scorers[family]), rows_of(scorers[family])
        for pad in (0, 2):
            chosen, rejected = pair_scores(model, rows, RewardConfig(), pad)
            torch.testing.assert_close(chosen, own_scores(model, rows, "chosen"), rtol=0, atol=1e-5)
            torch.testing.assert_close(rejected, own_scores(model, rows, "rejected"), rtol=0, atol=1e-5)


def test_a_control_without_the_prompt(scorers: dict[str, Path]) -> None:
    """Equal responses to different prompts score alike; with the prompt they do not."""
    rows = rows_of(scorers["gpt2"], [{**PAIRS[0], "prompt": prompt} for prompt in ("a", "another prompt")])
    model = scorer_of(scorers["gpt2"])
    blind = pair_scores(model, rows, RewardConfig(see_prompt=False), 0)[0]
    seeing = pair_scores(model, rows, RewardConfig(), 0)[0]
    assert blind[0].item() == pytest.approx(blind[1].item(), abs=1e-6)
    assert abs((seeing[0] - seeing[1]).item()) > 1e-3


def test_a_run_from_file_to_folder(tmp_path: Path, words: list[str]) -> None:
    final = run_reward(resolved(tmp_path, *words))
    run = final.parent
    assert status(run) == {"state": "finished", "stage": "reward", "step": 3, "total_steps": 3, "message": ""}
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert math.isfinite(line["loss"])
        assert 0 <= line["accuracy"] <= 1
        assert line["learning_rate"] == 1e-3
        assert line["grad_norm"] > 0
    assert {"eval/loss", "eval/accuracy", "eval/accuracy/other", "eval/accuracy/reversed"} <= lines[-1].keys()
    assert read_run("reward", run).problems == []
    assert leftovers(tmp_path) == []
    load_reward_model(ModelConfig(path=str(final)), key="ppo.reward_model", device=CPU)


def test_the_same_seed_gives_the_same_run(tmp_path: Path, words: list[str]) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = run_reward(resolved(tmp_path, *words, f"seed={seed}", f"reward.run_folder={tmp_path / name}")).parent
        found.append(without_times(read_jsonl(run / "metrics.jsonl")))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_it_learns_the_pairs_by_heart(tmp_path: Path, words: list[str]) -> None:
    long = ("reward.max_steps=40", "reward.batch_size=12", "reward.optimizer.learning_rate=1e-2")
    run = run_reward(resolved(tmp_path, *words, *long)).parent
    last = read_jsonl(run / "metrics.jsonl")[-1]
    assert last["eval/accuracy"] == 1.0
    assert last["eval/loss"] < 0.1


def test_chosen_responses_score_zero_on_average(tmp_path: Path, words: list[str], policies: dict[str, Path]) -> None:
    """The constant is saved with the model, and with the deviation; both come back with the weights."""
    final = run_reward(resolved(tmp_path, *words))
    rows = rows_of(policies["gpt2"])
    model = scorer_of(final)
    raw = own_scores(model, rows, "chosen")
    assert model.config.reward_mean == pytest.approx(raw.mean().item(), abs=1e-5)
    assert model.config.reward_std == pytest.approx(raw.std(correction=0).item(), abs=1e-5)
    assert model.config.reward_mean != 0
    sequences = [row.prompt_ids + row.response_ids["chosen"] for row in rows]
    centred = [
        sequence_scores(model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)) for ids in sequences
    ]
    assert torch.cat(centred).mean().item() == pytest.approx(0.0, abs=1e-5)
    alone = AutoModelForSequenceClassification.from_pretrained(final)
    assert alone.config.reward_mean == model.config.reward_mean
    torch.testing.assert_close(own_scores(alone.eval(), rows, "chosen"), raw, rtol=0, atol=1e-6)


def test_centring_counts_each_row_once(scorers: dict[str, Path]) -> None:
    rows = rows_of(scorers["gpt2"])[:9]
    for size in (1, 2, 9):
        model = scorer_of(scorers["gpt2"])
        centre(model, rows, RewardConfig(batch_size=size), 0)
        assert model.config.reward_mean == pytest.approx(own_scores(model, rows, "chosen").mean().item(), abs=1e-5)


def test_scores_of_one_response_have_a_deviation_that_divides(scorers: dict[str, Path]) -> None:
    model = scorer_of(scorers["gpt2"])
    centre(model, rows_of(scorers["gpt2"])[:1], RewardConfig(), 0)
    assert model.config.reward_std > 0


@pytest.mark.parametrize("center_coef", [0.0, 0.5])
def test_the_split_into_microbatches_changes_neither_loss_nor_gradient(
    scorers: dict[str, Path], center_coef: float
) -> None:
    rows = rows_of(scorers["gpt2"])[:7]
    model = scorer_of(scorers["gpt2"])
    difference = own_scores(model, rows, "chosen") - own_scores(model, rows, "rejected")
    gradients: list[list[Tensor]] = []
    for size in (None, 1, 2, 5):
        model = scorer_of(scorers["gpt2"])
        optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=1e9), total_steps=1)
        optimizer.adamw.register_step_pre_hook(
            lambda *_, m=model: gradients.append([parameter.grad.clone() for parameter in m.parameters()])
        )
        config = RewardConfig(microbatch_size=size, center_coef=center_coef)
        metrics = train_step(model, optimizer, rows, config, 0)
        assert metrics["loss"] == pytest.approx(softplus(-difference).mean().item(), abs=1e-5)
        assert metrics["accuracy"] == pytest.approx((difference > 0).float().mean().item())
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_that_of_the_stated_loss(scorers: dict[str, Path]) -> None:
    """Mean of -logsigmoid(chosen - rejected) + center_coef * (chosen + rejected)^2 over pairs, by plain PyTorch."""
    rows = rows_of(scorers["gpt2"])[:3]
    model = scorer_of(scorers["gpt2"])
    total: Any = 0.0
    for row in rows:
        scores = [
            model.score(
                model.base_model(input_ids=torch.tensor([row.prompt_ids + row.response_ids[name]])).last_hidden_state
            )[0, -1, 0]
            for name in ("chosen", "rejected")
        ]
        total = total + softplus(scores[1] - scores[0]) + 0.25 * (scores[0] + scores[1]) ** 2
    (total / 3).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=1e9), total_steps=1)
    found: list[Tensor] = []
    optimizer.adamw.register_step_pre_hook(
        lambda *_: found.extend(parameter.grad.clone() for parameter in model.parameters())
    )
    train_step(model, optimizer, rows, RewardConfig(center_coef=0.25), 0)
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_evaluation_counts_each_pair_once_and_by_kind(scorers: dict[str, Path]) -> None:
    rows = rows_of(scorers["gpt2"])[:9]
    model = scorer_of(scorers["gpt2"])
    difference = own_scores(model, rows, "chosen") - own_scores(model, rows, "rejected")
    right = difference > 0
    for size in (1, 2, 9):
        found = evaluate(model, rows, RewardConfig(batch_size=size), 0)
        assert found["eval/loss"] == pytest.approx(softplus(-difference).mean().item(), abs=1e-5)
        assert found["eval/accuracy"] == pytest.approx(right.float().mean().item())
        for kind in ("other", "reversed"):
            mine = torch.tensor([row.row["kind"] == kind for row in rows])
            assert found[f"eval/accuracy/{kind}"] == pytest.approx(right[mine].float().mean().item())


def test_dropout_is_off(tmp_path: Path, tiny_tokenizer: Any, words: list[str]) -> None:
    """With a model whose own probabilities are 0.5, two passes over a batch give one loss."""
    start = save_policy(tmp_path / "start", tiny_tokenizer, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    still = ("reward.optimizer.learning_rate=1e-30", "reward.max_steps=3", "reward.batch_size=12")
    run = run_reward(resolved(tmp_path, *words, f"reward.model.path={start}", *still)).parent
    losses = [line["loss"] for line in read_jsonl(run / "metrics.jsonl")]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_pairs_that_are_equal_once_cut_are_dropped_and_counted(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"prompt": "a", "chosen": "one two three four", "rejected": "one two three five"}
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [*PAIRS, same, same])
    cut = ("reward.data.max_response_tokens=8", f"reward.data.train={pairs}", "reward.batch_size=20")
    run_reward(resolved(tmp_path, *words, *cut))
    assert "dropped equal pair: 2" in capsys.readouterr().out
    write_jsonl(pairs, [same])
    with pytest.raises(UserError, match="no training row is left"):
        run_reward(resolved(tmp_path / "b", *words, *cut))
    assert not (tmp_path / "b").exists()


def test_the_reward_model_reads_the_ids_that_a_rollout_has(policies: dict[str, Path]) -> None:
    """Prompt and response encoded by themselves, exactly one BOS, the stop token at the end."""
    row = rows_of(policies["gpt2"], prompt_suffix="\n")[0]
    tokenizer = load_tokenizer(str(policies["gpt2"]))
    assert row.prompt_ids == [1, *tokenizer(PAIRS[0]["prompt"] + "\n", add_special_tokens=False)["input_ids"]]
    assert row.response_ids["chosen"] == [*tokenizer(PAIRS[0]["chosen"], add_special_tokens=False)["input_ids"], 2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("reward.model.path=''", r"`reward.model.path` is not set"),
        ("reward.model.path=${sft.run_folder}/final", r"`reward.model.path`.*run the stage that writes it first"),
        ("reward.data.train=null", r"`data.train` is not set"),
        ("reward.data.chosen_field=better", r"no field `better`"),
        ("reward.batch_size=0", r"`reward.batch_size` is 0"),
        ("reward.microbatch_size=0", r"`reward.microbatch_size` is 0"),
        ("reward.epochs=0", r"`reward.epochs` is 0"),
        ("reward.max_steps=-1", r"`reward.max_steps` is -1"),
        ("reward.eval_every=0", r"`reward.eval_every` is 0"),
        ("reward.eval_rows=-1", r"`reward.eval_rows` is -1"),
        ("reward.center_coef=-1", r"`reward.center_coef` is -1"),
        ("reward.optimizer.max_grad_norm=0", r"`reward.optimizer.max_grad_norm` is 0"),
    ],
)
def test_a_mistake_leaves_no_run_folder(tmp_path: Path, words: list[str], word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_reward(resolved(tmp_path, *words, word))
    assert list(tmp_path.iterdir()) == []


def test_pairs_longer_than_the_model_are_refused_at_the_start(tmp_path: Path, words: list[str]) -> None:
    long = {"prompt": "a", "chosen": "b", "rejected": "x y z " * 60}
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [*PAIRS, long])
    with pytest.raises(UserError, match=r"`reward.model`: .*64 positions"):
        run_reward(resolved(tmp_path, *words, f"reward.data.train={pairs}"))
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_a_run_does_not_overwrite_another(tmp_path: Path, words: list[str]) -> None:
    config = resolved(tmp_path, *words, "reward.max_steps=1")
    run_reward(config)
    with pytest.raises(UserError, match=r"`reward.run_folder`: .* is not empty"):
        run_reward(config)


def test_a_failure_in_the_loop_is_recorded(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(reward, "train_step", broken)
    config = resolved(tmp_path, *words)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_reward(config)
    assert status(Path(config.reward.run_folder))["state"] == "failed"


def test_the_loss_from_the_first_difference_on_by_hand() -> None:
    """Pairs [p, a, b] with [p, c], and [p, q, a] with [p, q, c, d]: compared from the first difference to the end of
    the longer one. Differences 1 and 0 there: (.31326 + .69315) / 2; and -1, 2 in the second pair."""
    batch = PairBatch(*right_pad([[7, 1, 2], [7, 8, 1], [7, 3], [7, 8, 3, 4]], 0))
    compared = compared_positions(batch)
    assert compared.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    chosen = torch.tensor([[50.0, 1.0, 0.0, 90.0], [60.0, 70.0, -1.0, 2.0]])
    loss = divergence_loss(chosen, torch.zeros(2, 4), compared)
    second = math.log1p(math.e) + math.log1p(math.exp(-2))
    assert loss.item() == pytest.approx((0.31326 + 0.69315) / 2 + second / 2, abs=1e-5)


def test_the_loss_from_the_first_difference_on_trains(scorers: dict[str, Path], tiny_tokenizer: Any) -> None:
    """Its scores at the last tokens are those of the plain loss, and ten more pads change nothing."""
    model = load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="x", device=CPU)
    rows = encode_rows(PAIRS[:4], tiny_tokenizer, DataConfig(), responses=("chosen", "rejected"))[0]
    config = RewardConfig(loss="divergence")
    loss, chosen, rejected = scored_pairs(model, rows, config, 0)
    last = scored_pairs(model, rows, RewardConfig(), 0)
    torch.testing.assert_close(chosen, last[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(rejected, last[2], rtol=0, atol=1e-5)
    assert loss.item() != pytest.approx(last[0].item(), abs=1e-3)
    alone = sum(scored_pairs(model, [row], config, 0)[0].item() for row in rows)
    assert loss.item() == pytest.approx(alone, abs=1e-4)
    before = loss.item()
    optimizer = Optimizer(model, OptimizerConfig(learning_rate=3e-3), total_steps=20)
    for _ in range(20):
        train_step(model, optimizer, rows, config, 0)
    assert scored_pairs(model, rows, config, 0)[0].item() < 0.7 * before
