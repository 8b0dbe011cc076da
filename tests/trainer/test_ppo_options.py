"""PPO's options: estimators without a critic, losses, stops, termination rules and sources of rewards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from marlhf.advantages import estimate, whitens
from marlhf.config import ModelConfig, PPOConfig, RolloutConfig, load_config
from marlhf.data import train_tokenizer
from marlhf.errors import UserError
from marlhf.models import load_policy, load_reward_model, response_logprobs, sequence_scores
from marlhf.rewards.sources import FunctionReward, ModelReward, Reader, Rewards
from marlhf.rollout import Rollout, sampling_kl
from marlhf.stages import ppo
from marlhf.stages.ppo import run_ppo
from marlhf.termination import Seen, macro_ids
from marlhf.user_code import load_function
from marlhf_kernels import kl_penalized_rewards
from tests.cases.golden_cases import CASES
from tests.trainer.test_rollout import PAIRS, responses_of
from tests.trainer.test_stage_ppo import Models, make, settings, words
from tests.trainer.tiny import ROWS, read_jsonl, resolved, save_scorer, status, without_times, write_jsonl

__all__ = ["make", "words"]
CPU = torch.device("cpu")
NO_CRITIC = {"value_loss", "value_clip_fraction", "critic_grad_norm", "critic_learning_rate"}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "metrics.jsonl")[1:]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """Every rollout of a run, as `complete` gives it."""
    seen: list[Rollout] = []
    original = ppo.complete

    def watched(*args: Any, **named: Any) -> Rollout:
        seen.append(original(*args, **named))
        return seen[-1]

    monkeypatch.setattr(ppo, "complete", watched)
    return seen


# Without a critic


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "reinforce"])
def test_without_a_critic_there_is_none(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, estimator: str
) -> None:
    """None is built, trained, logged or saved; the samples of a prompt stand side by side and sum to no advantage."""
    seen = watch(monkeypatch)
    monkeypatch.setattr(ppo, "load_critic", None)
    run = run_ppo(
        resolved(tmp_path, *words, f"ppo.estimator={estimator}", "ppo.samples_per_prompt=3", "ppo.rollout.batch_size=4")
    ).parent
    assert status(run)["state"] == "finished"
    assert not (run / "critic").exists()
    for line in lines_of(run):
        assert not line.keys() & NO_CRITIC
        assert line["policy_grad_norm"] > 0
    for rollout in seen:
        assert rollout.scores.shape == (12,)
        assert not rollout.values.any()
        prompts = rollout.prompt_ids.view(4, 3, -1)
        assert (prompts == prompts[:, :1]).all()
        assert len({tuple(row.tolist()) for row in rollout.response_ids}) > 4
        if estimator != "reinforce":
            per_response = rollout.advantages[:, 0].view(4, 3)
            torch.testing.assert_close(per_response.sum(dim=1), torch.zeros(4), rtol=0, atol=1e-4)
            returns = rollout.rewards.sum(dim=1).view(4, 3)
            assert torch.equal(per_response.argmax(dim=1), returns.argmax(dim=1))


# Losses


def test_the_gradient_with_a_kl_loss_and_an_entropy_bonus(make: Callable[..., Models]) -> None:
    """By plain PyTorch: means over tokens of the clipped loss, of d^2 / 2 and of the entropy."""
    models = make()
    config = settings(
        "ppo.termination.rule=token", "ppo.kl_loss_coef=0.3", "ppo.entropy_coef=0.2", "ppo.microbatch_size=3"
    )
    rollout = models.complete(responses_of(PAIRS), config)
    total: Any = 0.0
    kl = 0.0
    for i, (prompt, response) in enumerate(PAIRS):
        n = len(response)
        logits = models.policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        law = logits.log_softmax(-1)
        logp = law.gather(-1, torch.tensor(response)[:, None])[:, 0]
        d = logp - rollout.ref_logprobs[i, :n]
        entropy = -(law.exp() * law).sum(-1)
        ratio = (logp - rollout.logprobs[i, :n]).exp()
        total = total + (-rollout.advantages[i, :n] * ratio + 0.3 * d.square() / 2 - 0.2 * entropy).sum()
        kl += (d.square() / 2).sum().item()
    tokens = sum(len(response) for _, response in PAIRS)
    (total / tokens).backward()
    expected = [parameter.grad.clone() for parameter in models.optimizers[0].parameters]
    models.optimizers[0].adamw.zero_grad(set_to_none=True)
    metrics = models.update(rollout, config)
    assert metrics["kl_loss"] == pytest.approx(kl / tokens, abs=1e-5)
    for one, other in zip(expected, models.gradients[: len(expected)], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


def test_max_kl_ends_an_update_before_the_step_that_is_beyond_it(make: Callable[..., Models]) -> None:
    """The mean over tokens of e^d - 1 - d at each of the possible steps decides; gradients of the last are dropped."""
    words = ("ppo.ppo_epochs=3", "ppo.minibatches=2", "ppo.microbatch_size=1")
    models = make(rate=2e-2)
    config = settings(*words, "ppo.max_kl=1e9")
    metrics = models.update(models.complete(responses_of(PAIRS), config), config)
    assert metrics["optimizer_steps"] == 6

    models = make(rate=2e-2)
    config = settings(*words, "ppo.max_kl=1e-6")
    rollout = models.complete(responses_of(PAIRS), config)
    metrics = models.update(rollout, config)
    assert metrics["optimizer_steps"] == 1
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    for optimizer in models.optimizers:
        assert all(parameter.grad is None for parameter in optimizer.parameters)
        assert {int(state["step"]) for state in optimizer.adamw.state.values()} == {1}
    logprobs, _ = response_logprobs(models.policy, *rollout.parts())
    d = (logprobs - rollout.logprobs)[rollout.response_mask]
    assert (d.exp() - 1 - d).mean().item() > 1e-6


# Scores


def test_scores_may_be_whitened_after_the_penalties(make: Callable[..., Models]) -> None:
    models = make()
    words = ("ppo.missing_stop_penalty=2", "ppo.length_penalty=0.25", "ppo.length_penalty_from=3", "ppo.kl_coef=0")
    plain = models.complete(responses_of(PAIRS), settings()).scores
    rollout = models.complete(responses_of(PAIRS), settings(*words))
    # Lengths 3, 5, 1 and 4; the second has no stop token.
    expected = plain - torch.tensor([0.0, 2.0 + 0.5, 0.0, 0.25])
    torch.testing.assert_close(rollout.scores, expected)
    white = models.complete(responses_of(PAIRS), settings(*words, "ppo.score_whiten=true", "ppo.score_clip=1"))
    shaped = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(white.scores, shaped, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(white.rewards.sum(dim=1), shaped.clamp(-1, 1), rtol=1e-4, atol=1e-5)


def test_truncated_responses_may_go_on_at_the_critics_value(make: Callable[..., Models]) -> None:
    """gamma = lambda = 1: A + V is what is still to come, and after the second response that is V(end)."""
    models = make()
    words = ("ppo.termination.rule=token", "ppo.lam=1", "ppo.kl_coef=0", "ppo.whiten_advantages=false")
    rollout = models.complete(responses_of(PAIRS), settings(*words, "ppo.bootstrap_truncated=true"))
    prompt, response = PAIRS[1]
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        end = models.critic.score(models.critic.base_model(input_ids=ids).last_hidden_state)[0, -1, 0]
    for i, (_, response) in enumerate(PAIRS):
        after = rollout.scores[i] + (end if i == 1 else 0.0)
        torch.testing.assert_close(rollout.returns[i, : len(response)], after.expand(len(response)), rtol=0, atol=1e-5)


# Termination


def test_randomized_lengths_are_drawn_per_rollout_and_kept_across_epochs(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    updated: list[Tensor] = []
    original = ppo.macro_policy_loss

    def watched(logprobs: Tensor, old: Tensor, advantages: Tensor, ids: Tensor, **named: Any) -> Any:
        updated.append(ids)
        return original(logprobs, old, advantages, ids, **named)

    monkeypatch.setattr(ppo, "macro_policy_loss", watched)
    drawn = ("ppo.termination.rule=randomized", "ppo.termination.lengths=[1,2,3]", "ppo.termination.repeats=1")
    config = resolved(tmp_path, *words, *drawn, "ppo.rollout.stop_token_ids=[299]", "ppo.minibatches=1")
    run_ppo(config)
    first, second = (rollout.macro_ids for rollout in seen)
    for ids in (first, second):
        assert len({tuple(row.tolist()) for row in ids}) > 1
    assert not torch.equal(first, second)
    assert len(updated) == 4
    for ids, of_rollout in zip(updated, (first, first, second, second), strict=True):
        assert sorted(ids.tolist()) == sorted(of_rollout.tolist())


def test_averaged_rewards_need_the_last_token_alone(tmp_path: Path, words: list[str]) -> None:
    """Refused with the reason; with `isolate_last` the whole score arrives although rewards are averaged."""
    with pytest.raises(UserError, match=r"`ppo.reward_weights` is 'mean'.*divides.*isolate_last=true"):
        run_ppo(resolved(tmp_path, *words, "ppo.reward_weights=mean"))
    run = run_ppo(resolved(tmp_path, *words, "ppo.reward_weights=mean", "ppo.termination.isolate_last=true")).parent
    assert status(run)["state"] == "finished"


def test_the_whole_score_arrives_under_averages_with_the_last_token_alone(make: Callable[..., Models]) -> None:
    models = make()
    words = ("ppo.reward_weights=mean", "ppo.termination.isolate_last=true", "ppo.kl_coef=0", "ppo.lam=1")
    rollout = models.complete(responses_of(PAIRS), settings(*words, "ppo.whiten_advantages=false"))
    for i, (_, response) in enumerate(PAIRS):
        expected = rollout.scores[i].expand(len(response))
        torch.testing.assert_close(rollout.returns[i, : len(response)], expected, rtol=0, atol=1e-5)


TURNS = [
    ([70, 80, 2, 90, 91, 100, 110, 2], "aaattaaa"),
    ([50, 2, 60, 61, 62, 40, 2], "aauutaa"),
    ([33, 2], "aa"),
]


def turn_rows() -> list[dict[str, Any]]:
    """Twelve rows of one to two assistant turns, tools and users in between."""
    names = {"a": "assistant", "t": "tool", "u": "user"}
    return [
        {"prompt": row["prompt"], "response_ids": TURNS[i % 3][0], "roles": [names[role] for role in TURNS[i % 3][1]]}
        for i, row in enumerate(ROWS)
    ]


def test_recorded_turns_train_and_tool_tokens_are_no_actions(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    turns = (
        f"ppo.data.train={write_jsonl(tmp_path / 'turns.jsonl', turn_rows())}",
        "ppo.rollout.engine=jsonl",
        "ppo.rollout.max_new_tokens=8",
        "ppo.termination.rule=turn",
        "ppo.kl_coef=0.1",
    )
    run = run_ppo(resolved(tmp_path, *words, *turns)).parent
    assert status(run)["state"] == "finished"
    expected = {
        tuple(ids): ids_of_turns
        for (ids, _), ids_of_turns in zip(
            TURNS, ([0, 0, 0, -1, -1, 1, 1, 1], [0, 0, -1, -1, -1, 1, 1], [0, 0]), strict=True
        )
    }
    for rollout in seen:
        assert not rollout.truncated.any()
        for i, length in enumerate(rollout.lengths.tolist()):
            tokens = tuple(rollout.response_ids[i, :length].tolist())
            assert rollout.macro_ids[i, :length].tolist() == expected[tokens]
        others = rollout.macro_ids < 0
        for name in ("logprobs", "ref_logprobs", "entropy", "values", "rewards", "kl", "advantages", "returns"):
            column = getattr(rollout, name)
            assert not column[others].any(), name
            assert column[~others].any() or name == "kl", name
    line = lines_of(run)[0]
    actions, macros = seen[0].action_mask.sum().item(), (seen[0].macro_ids.amax(dim=1) + 1).sum().item()
    assert line["macro_length"] == pytest.approx(actions / macros)
    assert line["entropy"] == pytest.approx(seen[0].entropy.sum().item() / actions, rel=1e-4)


def test_the_update_does_not_train_on_tool_tokens(make: Callable[..., Models]) -> None:
    """The gradient is the sum over assistant tokens, those of tools entering as text alone."""
    models = make()
    config = settings("ppo.termination.rule=turn", "ppo.kl_loss_coef=0.3", "ppo.entropy_coef=0.2")
    pairs = [([1, 40], ids) for ids, _ in TURNS]
    responses = responses_of(pairs)
    for i, (_, roles) in enumerate(TURNS):
        responses.action_mask[i, : len(roles)] = torch.tensor([role == "a" for role in roles])
    rollout = models.complete(responses, config)
    total: Any = 0.0
    for i, (prompt, response) in enumerate(pairs):
        actions = responses.action_mask[i, : len(response)]
        law = models.policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logp = law.gather(-1, torch.tensor(response)[:, None])[:, 0]
        d = logp - rollout.ref_logprobs[i, : len(response)]
        ratio = (logp - rollout.logprobs[i, : len(response)]).exp()
        each = -rollout.advantages[i, : len(response)] * ratio + 0.3 * d.square() / 2 + 0.2 * (law.exp() * law).sum(-1)
        total = total + each[actions].sum()
    (total / responses.action_mask.sum()).backward()
    expected = [parameter.grad.clone() for parameter in models.optimizers[0].parameters]
    models.optimizers[0].adamw.zero_grad(set_to_none=True)
    models.update(rollout, config)
    for one, other in zip(expected, models.gradients[: len(expected)], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


# Sources of rewards

FUNCTIONS = """
seen = []


def length(prompts, responses, rows):
    seen.append((prompts, responses, rows))
    return [len(row["response_ids"]) for row in rows]


def by_token(prompts, responses, rows):
    return [[0.5] * sum(i >= 0 for i in row["macro_ids"]) for row in rows]


def by_macro(prompts, responses, rows):
    return [[float(k) for k in range(max(row["macro_ids"], default=-1) + 1)] for row in rows]


def few(prompts, responses, rows):
    return [1.0]


def nan(prompts, responses, rows):
    return [float("nan")] * len(rows)


def word(prompts, responses, rows):
    return ["good"] * len(rows)


def none(prompts, responses, rows):
    return None


def broken(prompts, responses, rows):
    return 1 / 0


def short_lists(prompts, responses, rows):
    return [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * len(rows)
"""


@pytest.fixture
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    return str(file)


def test_several_sources_with_weights(
    tmp_path: Path, words: list[str], functions: str, scorers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 x model - .5 x length, each logged apart; the critic starts from the model."""
    seen = watch(monkeypatch)
    sources = (
        f"ppo.rewards=[{{kind: model, path: {scorers['gpt2']}, weight: 2, name: taste}},"
        f"{{kind: function, file: {functions}, name: length, weight: -0.5}}]"
    )
    run = run_ppo(resolved(tmp_path, *words, sources)).parent
    model = load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="x", device=CPU)
    for line, rollout in zip(lines_of(run), seen, strict=True):
        ids = torch.cat([rollout.prompt_ids, rollout.response_ids], dim=1)
        with torch.no_grad():
            taste = sequence_scores(model, ids, torch.cat([rollout.prompt_mask, rollout.response_mask], dim=1))
        lengths = rollout.lengths.float()
        torch.testing.assert_close(rollout.scores, 2 * taste - 0.5 * lengths, rtol=0, atol=1e-4)
        assert line["score/taste"] == pytest.approx(taste.mean().item(), abs=1e-4)
        assert line["score/length"] == pytest.approx(lengths.mean().item())
        assert line["score"] == pytest.approx(2 * line["score/taste"] - 0.5 * line["score/length"], abs=1e-4)
    critic = load_reward_model(ModelConfig(path=str(run / "critic")), key="x", device=CPU)
    assert torch.allclose(critic.score.weight, model.score.weight, atol=0.1)


def test_a_function_alone_needs_no_reward_model(
    tmp_path: Path, words: list[str], functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given prompts, texts and rows; the critic is the policy's body under a fresh head."""
    starts: list[Any] = []
    original = ppo.load_critic
    monkeypatch.setattr(ppo, "load_critic", lambda model, *, head: starts.append(model) or original(model, head=head))
    more = (f"ppo.rewards=[{{kind: function, file: {functions}, name: length}}]", "ppo.reward_model.path=/nowhere")
    config = resolved(tmp_path, *words, *more)
    run = run_ppo(config).parent
    policy = AutoModelForCausalLM.from_pretrained(config.ppo.model.path)
    for name, parameter in policy.transformer.named_parameters():
        assert torch.equal(parameter, dict(starts[0].transformer.named_parameters())[name])
    assert starts[0].score.weight.std().item() == pytest.approx(1 / 17**0.5, rel=0.6)
    assert lines_of(run)[0]["score"] == lines_of(run)[0]["response_length"]
    prompts, responses, rows = load_function(functions, "length", key="x").__globals__["seen"][1]
    assert set(prompts) <= {row["prompt"] for row in ROWS}
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["response"] in {other["response"] for other in ROWS} for row in rows)
    assert all(isinstance(response, str) for response in responses)
    assert all(len(row["macro_ids"]) == len(row["response_ids"]) for row in rows)
    assert {type(row["truncated"]) for row in rows} == {bool}


def rewarded(models: Models, functions: str, name: str, per: str, config: PPOConfig, tokenizer: Any) -> Rollout:
    function = load_function(functions, name, key="x")
    source = FunctionReward(function, where=f"{functions}:{name}", name=name, weight=2.0, per=per, tokenizer=tokenizer)
    models.rewards = Rewards([source])
    named = {key: getattr(models, key) for key in ("policy", "reference", "critic", "rewards")}
    rows = [{"prompt": "p"}] * len(PAIRS)
    return ppo.complete(responses_of(PAIRS), config=config, kl_coef=0.0, rows=rows, **named)


def test_rewards_per_token_and_per_macro_action(
    make: Callable[..., Models], functions: str, tiny_tokenizer: Any
) -> None:
    """Weight 2; macro actions of 2 tokens, that of index k worth k and paid on its last token."""
    config = settings("ppo.termination.n=2")
    tokens = rewarded(make(), functions, "by_token", "token", config, tiny_tokenizer)
    assert torch.equal(tokens.rewards, tokens.response_mask.float())
    macros = rewarded(make(), functions, "by_macro", "macro", config, tiny_tokenizer)
    assert macros.rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 2, 4], [0] * 5, [0, 0, 0, 2, 0]]
    assert macros.scores.tolist() == [2.0, 6.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("name", "per", "message"),
    [
        ("few", "response", r"mine.py:few gave 1 numbers; it must give 4 scores"),
        ("nan", "response", r"mine.py:nan gave nan for response 0; scores are finite"),
        ("word", "response", r"mine.py:word gave 'good' for response 0, which is no number"),
        ("none", "response", r"mine.py:none gave a NoneType; it must give 4 scores in a list"),
        ("broken", "response", r"mine.py:broken raised ZeroDivisionError: division by zero"),
        ("length", "token", r"mine.py:length gave a int; .*3 rewards for response 0, one per token"),
        ("short_lists", "macro", r"mine.py:short_lists gave 7 numbers; .*2 rewards for response 0, one per macro"),
    ],
)
def test_functions_that_answer_wrongly_are_named(
    make: Callable[..., Models], functions: str, tiny_tokenizer: Any, name: str, per: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rewarded(make(), functions, name, per, settings("ppo.termination.n=2"), tiny_tokenizer)


def test_a_reward_model_with_its_own_tokenizer_reads_the_text(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Scores are those of the same text in the other tokenizer's ids, its EOS behind what stopped."""
    own = train_tokenizer(["Return the value of the file, and close it."] * 4, vocab_size=270)
    folder = save_scorer(tmp_path / "scorer", own, n_positions=256)
    model = load_reward_model(ModelConfig(path=str(folder)), key="x", device=CPU)
    texts = [("open file", "Return the file."), ("close", "Close it")]
    encoded = [
        (tiny_tokenizer(prompt)["input_ids"], tiny_tokenizer(text, add_special_tokens=False)["input_ids"])
        for prompt, text in texts
    ]
    responses = responses_of([(encoded[0][0], [*encoded[0][1], 2]), encoded[1]])
    reader = Reader(own, tiny_tokenizer, settings().data, positions=256, key="ppo.rewards[0]")
    rows = [{"prompt": prompt} for prompt, _ in texts]
    found = ModelReward(model, reader=reader).score(responses, rows, responses.response_mask.int() - 1, None)
    for i, (prompt, text) in enumerate(texts):
        ids = own(prompt)["input_ids"] + own(text, add_special_tokens=False)["input_ids"] + ([2] if i == 0 else [])
        row = torch.tensor([ids])
        torch.testing.assert_close(found[i : i + 1], sequence_scores(model, row, torch.ones_like(row) > 0))
    reader.positions = 5
    with pytest.raises(UserError, match=r"`ppo.rewards\[0\]`: .* of its own tokens, but the model has 5 positions"):
        reader.read(responses, rows)


def test_a_run_with_another_tokenizers_reward_model(tmp_path: Path, words: list[str]) -> None:
    """Refused unless asked for; then it runs, with a critic that starts from the policy."""
    own = train_tokenizer(["Return the value of the file, and close it."] * 4, vocab_size=270)
    folder = save_scorer(tmp_path / "scorer", own, n_positions=256)
    with pytest.raises(UserError, match=r"`ppo.rewards\[0\]`: its vocabulary has .*retokenize"):
        run_ppo(resolved(tmp_path, *words, f"ppo.rewards=[{{path: {folder}}}]"))
    run = run_ppo(resolved(tmp_path, *words, f"ppo.rewards=[{{path: {folder}, retokenize: true}}]")).parent
    assert status(run)["state"] == "finished"
    load_policy(ModelConfig(path=str(run / "final")), key="x", device=CPU)
    critic = load_reward_model(ModelConfig(path=str(run / "critic")), key="x", device=CPU)
    assert critic.config.vocab_size == 300


# Mistakes


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ppo.estimator=grop", r"`ppo.estimator` is 'grop'.*`grpo`"),
        ("ppo.estimator=grpo", r"`ppo.samples_per_prompt` is 1; it must be at least 2: grpo compares"),
        ("ppo.estimator=rloo", r"`ppo.samples_per_prompt` is 1; it must be at least 2: rloo compares"),
        ("ppo.samples_per_prompt=0", r"`ppo.samples_per_prompt` is 0"),
        ("ppo.kl_loss_coef=-1", r"`ppo.kl_loss_coef` is -1"),
        ("ppo.entropy_coef=-1", r"`ppo.entropy_coef` is -1"),
        ("ppo.length_penalty=-1", r"`ppo.length_penalty` is -1"),
        ("ppo.length_penalty_from=-1", r"`ppo.length_penalty_from` is -1"),
        ("ppo.max_kl=0", r"`ppo.max_kl` is 0"),
        ("ppo.rollout.engine=vllm", r"`ppo.rollout.engine` is 'vllm'"),
        ("ppo.rollout.engine=jsonl", r"no list `response_ids`"),
        ("ppo.rollout.allow_mismatched_sampling=true", r"`ppo.rollout.allow_mismatched_sampling`.*released_code"),
        ("ppo.termination.rule=randomised", r"`ppo.termination.rule` is 'randomised'.*`randomized`"),
        ("ppo.rewards=[{kind: models}]", r"`ppo.rewards\[0\].kind` is 'models'.*`model`"),
        ("ppo.rewards=[{kind: function}]", r"`ppo.rewards\[0\].file` is not set"),
        ("ppo.rewards=[{kind: function, file: a.py}]", r"`ppo.rewards\[0\].name` is not set"),
        ("ppo.rewards=[{kind: function, file: a.py, name: f}]", r"`ppo.rewards\[0\]`: there is no file a.py"),
        ("ppo.rewards=[{kind: function, file: a.py, name: f, per: tokn}]", r"`ppo.rewards\[0\].per` is 'tokn'"),
        ("ppo.rewards=[{path: '${ppo.reward_model.path}', per: token}]", r"a reward model scores whole responses"),
        ("ppo.rewards=[{path: '${ppo.reward_model.path}', weight: .inf}]", r"`ppo.rewards\[0\].weight` is inf"),
        ("ppo.rewards=[{kind: function, file: a.py, name: f}, {kind: function, file: b.py, name: f}]", r"one name"),
    ],
)
def test_a_mistake_leaves_no_run_folder(tmp_path: Path, words: list[str], word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_ppo(resolved(tmp_path, *words, word))
    assert list(tmp_path.iterdir()) == []


def test_contradictions_are_refused(tmp_path: Path, words: list[str]) -> None:
    grouped = ("ppo.estimator=rloo", "ppo.samples_per_prompt=2")
    for word, message in (("ppo.gamma=0.9", r"`ppo.gamma` is 0.9"), ("ppo.bootstrap_truncated=true", r"no critic")):
        with pytest.raises(UserError, match=message):
            run_ppo(resolved(tmp_path, *words, *grouped, word))


# Resuming


def test_a_run_without_a_critic_resumes_to_the_same_bits(tmp_path: Path, words: list[str], functions: str) -> None:
    """Four iterations are two and two more, with macro actions drawn at random and a function for rewards."""
    options = (
        "ppo.estimator=rloo",
        "ppo.samples_per_prompt=2",
        "ppo.termination.rule=randomized",
        "ppo.termination.lengths=[1,2]",
        f"ppo.rewards=[{{kind: function, file: {functions}, name: length}}]",
        "ppo.checkpoints.every=1",
    )
    found = []
    for name, lengths in (("whole", ("4",)), ("parts", ("2", "4"))):
        for length in lengths:
            more = (f"ppo.run_folder={tmp_path / name}", f"ppo.iterations={length}", f"resume={length != lengths[0]}")
            run = run_ppo(resolved(tmp_path, *words, *options, *more)).parent
        found.append((without_times(read_jsonl(run / "metrics.jsonl")), (run / "final/model.safetensors").read_bytes()))
    assert found[0] == found[1]
    Path(functions).write_text(
        "def length(prompts, responses, rows):\n    return [0.0] * len(rows)\n", encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"began with other rewards of length"):
        run_ppo(resolved(tmp_path, *words, *options, *more, "ppo.iterations=5"))


# The released code


def test_the_preset_of_the_released_code() -> None:
    """Stands above the defaults and below what a file and the command line say."""
    config = load_config(None, ["preset=released_code"])
    assert config.sft.train_on_prompt
    assert config.reward.loss == "divergence"
    assert config.ppo.rollout.top_k == 50
    assert config.ppo.rollout.allow_mismatched_sampling
    assert config.ppo.termination.lengths == [1, 2, 3, 5, 10]
    assert config.ppo.termination.isolate_last
    assert (config.ppo.score_clip, config.ppo.value_clip, config.ppo.whiten_advantages) == (2.5, 0.2, False)
    assert config.ppo.reward_weights == config.ppo.value_weights == "mean"
    changed = load_config(None, ["ppo.score_clip=1", "ppo.value_weights=position_reversed", "preset=released_code"])
    assert changed.ppo.score_clip == 1
    assert changed.ppo.reward_weights == "position_reversed"
    assert load_config(None, ["preset=released_code", "preset=null"]).ppo.rollout.top_k == 0
    with pytest.raises(UserError, match=r"`preset` is 'released'; known: released_code. Did you mean"):
        load_config(None, ["preset=released"])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["termination"] == "fixed"], ids=lambda case: case["id"]
)
def test_the_preset_gives_the_numbers_of_the_released_code(case: dict[str, Any]) -> None:
    """From log-probabilities, values and score to advantages and returns, number for number."""
    config = load_config(
        None,
        [
            "preset=released_code",
            f"ppo.termination.n={case['ngram']}",
            f"ppo.value_weights={case['value_weights']}",
            f"ppo.gamma={case['gamma']}",
            f"ppo.lam={case['lam']}",
        ],
    ).ppo
    logprobs, ref, values = (torch.tensor([case[name]]) for name in ("logprobs", "ref_logprobs", "values"))
    mask = torch.ones(logprobs.shape, dtype=torch.bool)
    ids = macro_ids(config.termination, Seen(mask, mask, ref, torch.Generator()))
    rewards, _ = kl_penalized_rewards(
        torch.tensor([case["score"]]), logprobs, ref, ids, kl_coef=case["kl_coef"], score_clip=config.score_clip
    )
    advantages, returns = estimate(rewards, values, ids, config=config)
    assert ids[0].tolist() == case["macro_ids"]
    first = [case["macro_ids"].index(k) for k in range(max(case["macro_ids"]) + 1)]
    for name, column in (("macro_advantages", advantages), ("macro_returns", returns)):
        assert column[0, first].tolist() == pytest.approx(case[name], abs=1e-5)
    assert not whitens(config)


def test_the_released_code_samples_another_law_and_says_so(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Top-k 50 at temperature .7, scored at 1: the ratio starts at 1 all the same, and the KL is logged."""
    run = run_ppo(resolved(tmp_path, *words, "preset=released_code", "ppo.rollout.temperature=0.7")).parent
    assert "sampled from another law than the one that is scored" in " ".join(capsys.readouterr().out.split())
    assert all(line["sampling_kl"] > 0.01 for line in lines_of(run))


def test_the_kl_between_sampled_and_scored_law_by_hand(make: Callable[..., Models]) -> None:
    """Top-k renormalises: its KL is the mean of -log of the mass that is kept."""
    models = make()
    rollout = models.complete(responses_of(PAIRS), settings())
    rows = []
    for prompt, response in PAIRS:
        with torch.no_grad():
            law = models.policy(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].softmax(-1)
        rows.append(-law.topk(5).values.sum(-1).log())
    expected = torch.cat(rows).mean().item()
    for size in (None, 1, 3):
        config = RolloutConfig(top_k=5, allow_mismatched_sampling=True)
        assert sampling_kl(models.policy, rollout, config, size=size) == pytest.approx(expected, rel=1e-4)
    assert sampling_kl(models.policy, rollout, RolloutConfig(temperature=0.5), size=None) == pytest.approx(0, abs=1e-6)
