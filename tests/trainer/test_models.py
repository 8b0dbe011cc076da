"""Models through the trainer's seam give what transformers itself gives, under any padding."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from marlhf.config import ModelConfig
from marlhf.data import left_pad, right_pad
from marlhf.errors import UserError
from marlhf.models import (
    check_head,
    load_critic,
    load_policy,
    load_reward_model,
    response_logprobs,
    response_values,
    save_model,
    sequence_scores,
    token_nll,
)
from marlhf.models.loading import check_same_vocabulary
from marlhf.models.policy import logprobs_from_hidden
from tests.trainer.tiny import FAMILIES, model_config, save_policy, save_scorer

CPU = torch.device("cpu")

PROMPT, RESPONSE = [1, 40, 77, 130], [90, 12, 260, 2]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def policy(policies: dict[str, Path], family: str) -> Any:
    return load_policy(ModelConfig(path=str(policies[family])), key="ppo.model", device=CPU)


@pytest.fixture
def scorer(scorers: dict[str, Path], family: str) -> Any:
    return load_reward_model(ModelConfig(path=str(scorers[family])), key="ppo.reward_model", device=CPU)


def batch(pairs: list[tuple[list[int], list[int]]], *, pad: int = 0, extra: int = 0) -> tuple[Tensor, ...]:
    """Prompts padded on the left and responses on the right, each by `extra` more than they need."""
    prompt_ids, prompt_mask = left_pad([prompt for prompt, _ in pairs], pad)
    ids, mask = right_pad([response for _, response in pairs], pad)
    grow = nn.functional.pad
    return (
        grow(prompt_ids, (extra, 0), value=pad),
        grow(prompt_mask, (extra, 0)),
        grow(ids, (0, extra), value=pad),
        grow(mask, (0, extra)),
    )


def own_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """By transformers alone: logits P-1 .. P+T-2 of the row without any padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
    predicting = logits[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
    return predicting.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def folder_without(folder: Path, new: Path, name: str) -> Path:
    """A copy of a saved model that lacks one tensor."""
    new.mkdir()
    for file in folder.iterdir():
        (new / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights.pop(name)
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    return new


# Log-probabilities and values


def test_response_logprobs_are_those_of_transformers(policy: Any) -> None:
    """Entry t is the log-probability of r_t, from the logits at P-1 .. P+T-2; T entries exactly."""
    got, entropy = response_logprobs(policy, *batch([(PROMPT, RESPONSE)]))
    assert got.shape == (1, len(RESPONSE))
    assert entropy is None
    torch.testing.assert_close(got[0], own_logprobs(policy, PROMPT, RESPONSE), rtol=0, atol=1e-5)
    for t in range(len(RESPONSE)):
        changed = [*RESPONSE[:t], 5, *RESPONSE[t + 1 :]]
        other = response_logprobs(policy, *batch([(PROMPT, changed)]))[0]
        assert torch.equal(other[0, :t], got[0, :t])
        assert other[0, t] != got[0, t]


def test_entropy_is_that_of_the_sampled_law(policy: Any) -> None:
    _, entropy = response_logprobs(policy, *batch([(PROMPT, RESPONSE)]), temperature=0.7, return_entropy=True)
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([PROMPT + RESPONSE])).logits[0, len(PROMPT) - 1 : -1] / 0.7
    assert entropy is not None
    torch.testing.assert_close(entropy[0], torch.distributions.Categorical(logits=logits).entropy(), rtol=0, atol=1e-5)


def test_three_left_pads_change_nothing(policy: Any, scorer: Any) -> None:
    """A row alone and the same row with 3 left pads agree to 1e-5, with learned positions and with rotary ones."""
    alone = batch([(PROMPT, RESPONSE)])
    padded = batch([(PROMPT, RESPONSE), ([7, 7, 7, *PROMPT], [8, 9])])
    assert padded[0].shape[1] == len(PROMPT) + 3
    first = response_logprobs(policy, *alone)[0][0], response_values(scorer, *alone)[0]
    second = response_logprobs(policy, *padded)[0][0], response_values(scorer, *padded)[0]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [0, 2, 299])
def test_padding_on_both_sides_changes_nothing(policy: Any, scorer: Any, pad: int) -> None:
    """Whatever token pads, the stop token included; masked entries are 0."""
    rows = [(PROMPT, RESPONSE), (PROMPT[:2], [2]), ([1], [50, 60, 70])]
    tight, wide = batch(rows, pad=0), batch(rows, pad=pad, extra=5)
    for model, function in ((policy, lambda *a: response_logprobs(*a)[0]), (scorer, response_values)):
        one, other = function(model, *tight), function(model, *wide)
        torch.testing.assert_close(other[:, : one.shape[1]], one, rtol=0, atol=1e-5)
        assert torch.equal(other == 0, ~wide[3])


def test_values_take_the_same_slice(scorer: Any) -> None:
    """The value of token t is read where t is predicted, so the last token of a response is never seen."""
    got = response_values(scorer, *batch([(PROMPT, RESPONSE)]))
    with torch.no_grad():
        output = scorer(input_ids=torch.tensor([PROMPT + RESPONSE]), output_hidden_states=True)
        own = scorer.score(output.hidden_states[-1])[0, len(PROMPT) - 1 : len(PROMPT) + len(RESPONSE) - 1, 0]
    assert got.shape == (1, len(RESPONSE))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0], own, rtol=0, atol=1e-5)
    changed = response_values(scorer, *batch([(PROMPT, [*RESPONSE[:-1], 9])]))
    assert torch.equal(changed, got)


def test_temperature_divides_the_logits(policy: Any) -> None:
    """Logits [2, 0], T = 0.5, token 0: -0.01815."""
    head = nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[2.0], [0.0]])
    model = SimpleNamespace(get_output_embeddings=lambda: head, config=SimpleNamespace())
    got, _ = logprobs_from_hidden(model, torch.ones(1, 1), torch.tensor([0]), temperature=0.5)
    assert got.item() == pytest.approx(-0.01815, abs=5e-6)

    got, _ = response_logprobs(policy, *batch([(PROMPT, RESPONSE)]), temperature=0.5)
    torch.testing.assert_close(got[0], own_logprobs(policy, PROMPT, RESPONSE, 0.5), rtol=0, atol=1e-5)


def test_gradients_are_those_of_transformers(policy: Any) -> None:
    response_logprobs(policy, *batch([(PROMPT, RESPONSE)], extra=3))[0].sum().backward()
    ours = {name: parameter.grad for name, parameter in policy.named_parameters()}
    policy.zero_grad(set_to_none=True)
    logits = policy(input_ids=torch.tensor([PROMPT + RESPONSE])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    logits.gather(-1, torch.tensor(RESPONSE)[:, None]).sum().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_token_nll_is_the_loss_of_transformers(policy: Any) -> None:
    ids, mask = right_pad([PROMPT + RESPONSE, [*PROMPT[:2], 2]], 0)
    labels = ids.masked_fill(~mask, -100)
    labels[0, : len(PROMPT)] = -100
    total, count = token_nll(policy, ids, mask, labels)
    with torch.no_grad():
        own = policy(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
    assert count == len(RESPONSE) + 2
    assert (total / count).item() == pytest.approx(own.item(), abs=1e-5)


def test_the_saved_configuration_keeps_its_cache_on(policy: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    response_logprobs(policy, *batch([(PROMPT, RESPONSE)]))
    save_model(policy, tiny_tokenizer, tmp_path / "final")
    assert policy.config.use_cache is True
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").config.use_cache is True


# Heads that change their logits


def test_soft_capped_logits_are_followed(tiny_tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=len(tiny_tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=1.0,
            final_logit_softcapping=3.0,
            attn_implementation="eager",
        )
    ).eval()
    check_head(model, key="ppo.model")
    got, _ = response_logprobs(model, *batch([(PROMPT, RESPONSE)]), temperature=0.5)
    torch.testing.assert_close(got[0], own_logprobs(model, PROMPT, RESPONSE, 0.5), rtol=0, atol=1e-4)


def test_a_family_that_scales_its_logits_is_refused(tiny_tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = GraniteForCausalLM(
        GraniteConfig(
            vocab_size=len(tiny_tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            logits_scaling=4.0,
            initializer_range=0.5,
        )
    ).eval()
    with pytest.raises(UserError, match=r"`ppo.model`: GraniteForCausalLM changes its logits after the head"):
        check_head(model, key="ppo.model")


def test_ordinary_families_pass(policy: Any) -> None:
    check_head(policy, key="ppo.model")


# Dropout


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_is_off(family: str, tiny_tokenizer: Any, tmp_path: Path, attention: str) -> None:
    """In train mode as in eval mode, for a model whose own probabilities are 0.5; SFT alone may ask for them."""
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if family == "gpt2" else ("attention_dropout",)
    changes = dict.fromkeys(names, 0.5)
    save_policy(tmp_path / "policy", tiny_tokenizer, family=family, **changes)
    save_scorer(tmp_path / "scorer", tiny_tokenizer, family=family, **changes)
    loaded = ModelConfig(path=str(tmp_path / "policy"), attn_implementation=attention)
    policy = load_policy(loaded, key="ppo.model", device=CPU)
    score_config = ModelConfig(path=str(tmp_path / "scorer"), attn_implementation=attention)
    scorer = load_reward_model(score_config, key="ppo.reward_model", device=CPU)
    critic = load_critic(scorer, head="reward")
    parts = batch([(PROMPT, RESPONSE)])
    for model, function in ((policy, response_logprobs), (scorer, response_values), (critic, response_values)):
        outputs = [function(mode(), *parts) for mode in (model.train, model.train, model.eval)]
        outputs = [output[0] if isinstance(output, tuple) else output for output in outputs]
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])
    kept = load_policy(loaded, key="sft.model", device=CPU, dropout=True).train()
    noisy = [response_logprobs(kept, *parts)[0] for _ in range(2)]
    assert not torch.equal(*noisy)


# Reward models and critics


def test_scores_are_read_at_the_last_real_token_under_any_padding(scorer: Any) -> None:
    """Found from the mask: also where the last real token is the pad token, and with pads inside."""
    sequences = [[1, 40, 77, 2], [1, 90, 0], [1, 50, 60, 70, 2, 2]]
    alone = []
    for sequence in sequences:
        with torch.no_grad():
            hidden = scorer.base_model(input_ids=torch.tensor([sequence])).last_hidden_state
            alone.append(scorer.score(hidden)[0, -1, 0])
    expected = torch.stack(alone)
    for pad in (0, 2):
        right, left = right_pad(sequences, pad), left_pad(sequences, pad)
        both = [
            nn.functional.pad(tensor, (3, 2), value=value) for tensor, value in zip(right, (pad, False), strict=True)
        ]
        for ids, mask in (right, left, both):
            got = sequence_scores(scorer, ids, mask)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_scores_agree_with_the_classifier_of_transformers(scorer: Any) -> None:
    ids, mask = right_pad([[1, 40, 77, 2], [1, 90, 5]], 0)
    with torch.no_grad():
        own = scorer(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    torch.testing.assert_close(sequence_scores(scorer, ids, mask), own, rtol=0, atol=1e-5)


def test_scores_are_centred_on_the_constant_of_the_model(scorer: Any) -> None:
    ids, mask = right_pad([[1, 40, 77, 2]], 0)
    raw = sequence_scores(scorer, ids, mask)
    scorer.config.reward_mean = 0.75
    torch.testing.assert_close(sequence_scores(scorer, ids, mask), raw - 0.75)
    torch.testing.assert_close(sequence_scores(scorer, ids, mask, centred=False), raw)


def test_a_saved_head_gives_the_same_score(scorer: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """To 1e-6, with the constant that centres it; and with transformers alone."""
    scorer.config.reward_mean, scorer.config.reward_std = 0.123456789, 1.75
    ids, mask = right_pad([[1, 40, 77, 2], [1, 90, 5]], 0)
    before = sequence_scores(scorer, ids, mask)
    save_model(scorer, tiny_tokenizer, tmp_path / "final")
    again = load_reward_model(ModelConfig(path=str(tmp_path / "final")), key="ppo.reward_model", device=CPU)
    assert (again.config.reward_mean, again.config.reward_std) == (0.123456789, 1.75)
    torch.testing.assert_close(sequence_scores(again, ids, mask), before, rtol=0, atol=1e-6)
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final").eval()
    with torch.no_grad():
        own = alone(input_ids=ids, attention_mask=mask.long()).logits[:, 0] - alone.config.reward_mean
    torch.testing.assert_close(own, before, rtol=0, atol=1e-6)


def test_a_missing_head_is_an_error(policies: dict[str, Path], family: str) -> None:
    """A language model has none: scores through random weights would be noise that looks like a reward."""
    config = ModelConfig(path=str(policies[family]))
    with pytest.raises(UserError, match=r"`ppo.reward_model`: .* has no reward head"):
        load_reward_model(config, key="ppo.reward_model", device=CPU)
    load_reward_model(config, key="reward.model", device=CPU, fresh_head=True)


def test_a_fresh_head_is_normal_with_one_over_the_root_of_hidden_plus_one(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Standard deviation 1/sqrt(hidden + 1), bias 0; the seed alone decides."""
    hidden = 4096
    folder = save_policy(tmp_path / "wide", tiny_tokenizer, n_embd=hidden, n_layer=0, n_positions=4)

    def weight(seed: int) -> Tensor:
        model = load_reward_model(
            ModelConfig(path=str(folder)), key="reward.model", device=CPU, fresh_head=True, seed=seed
        )
        assert model.score.bias is None or not model.score.bias.any()
        return model.score.weight.detach().flatten()

    first = weight(0)
    assert first.numel() == hidden
    # Four standard errors of a deviation from n normal numbers: 4 / sqrt(2 n).
    assert first.std().item() * math.sqrt(hidden + 1) == pytest.approx(1.0, abs=4 / math.sqrt(2 * hidden))
    assert abs(first.mean().item()) * math.sqrt(hidden + 1) < 4 / math.sqrt(hidden)
    assert first.abs().max().item() * math.sqrt(hidden + 1) > 3
    assert torch.equal(weight(0), first)
    assert not torch.equal(weight(1), first)


def test_a_fresh_head_replaces_an_old_one(scorers: dict[str, Path], family: str) -> None:
    config = ModelConfig(path=str(scorers[family]))
    old = load_reward_model(config, key="reward.model", device=CPU).score.weight
    new = load_reward_model(config, key="reward.model", device=CPU, fresh_head=True).score.weight
    assert not torch.equal(old, new)


def test_a_backbone_that_lacks_weights_is_an_error(policies: dict[str, Path], tmp_path: Path) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = folder_without(policies["gpt2"], tmp_path / "broken", name)
    config = ModelConfig(path=str(folder))
    with pytest.raises(UserError, match=rf"`sft.model`.* lacks weights for {name}"):
        load_policy(config, key="sft.model", device=CPU)
    with pytest.raises(UserError, match=rf"`reward.model`.* lacks weights for {name}"):
        load_reward_model(config, key="reward.model", device=CPU, fresh_head=True)


def test_the_critic_starts_as_a_copy(scorer: Any) -> None:
    scorer.requires_grad_(False)
    critic = load_critic(scorer, head="reward")
    parts = batch([(PROMPT, RESPONSE)])
    with torch.no_grad():
        before = response_values(scorer, *parts)
        torch.testing.assert_close(response_values(critic, *parts), before, rtol=0, atol=1e-6)
    for one, other in zip(critic.parameters(), scorer.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(parameter.requires_grad for parameter in critic.parameters())
    assert not any(parameter.requires_grad for parameter in scorer.parameters())
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)
    assert torch.equal(response_values(scorer, *parts), before)


def test_the_critic_may_start_at_zero(scorer: Any) -> None:
    critic = load_critic(scorer, head="zero")
    parts = batch([(PROMPT, RESPONSE)])
    assert not response_values(critic, *parts).any()
    assert response_values(scorer, *parts).all()
    with pytest.raises(UserError, match=r"`ppo.critic_head` is 'rewrad'; known: reward, zero. Did you mean `reward`"):
        load_critic(scorer, head="rewrad")


def test_models_of_other_vocabularies_do_not_fit(scorers: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path) -> None:
    ours = save_policy(tmp_path / "policy", tiny_tokenizer, vocab_size=len(tiny_tokenizer) + 1)
    policy = load_policy(ModelConfig(path=str(ours)), key="ppo.model", device=CPU)
    config = ModelConfig(path=str(scorers["gpt2"]))
    scorer = load_reward_model(config, key="ppo.reward_model", device=CPU)
    with pytest.raises(UserError, match=rf"`ppo.reward_model`.* {len(tiny_tokenizer)} .* {len(tiny_tokenizer) + 1}"):
        check_same_vocabulary(policy, scorer, tiny_tokenizer, config, key="ppo.reward_model")


# Saved folders


def test_the_final_folder_needs_transformers_alone(policy: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """AutoModelForCausalLM gives equal logits, AutoTokenizer equal ids."""
    folder = tmp_path / "final"
    save_model(policy, tiny_tokenizer, folder)
    alone = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT + RESPONSE])
    with torch.no_grad():
        assert torch.equal(alone(input_ids=ids).logits, policy.eval()(input_ids=ids).logits)
    text = "open file (path)"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False), ("llama", True)])
def test_tied_weights_are_saved_once(family: str, tied: bool, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """And reload equal and still tied."""
    start = save_policy(tmp_path / "start", tiny_tokenizer, family=family, tie_word_embeddings=tied)
    model = load_policy(ModelConfig(path=str(start)), key="ppo.model", device=CPU)
    save_model(model, tiny_tokenizer, tmp_path / "final")
    with safe_open(tmp_path / "final" / "model.safetensors", framework="pt") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    embeddings = [shape for shape in shapes if shape[0] == len(tiny_tokenizer)]
    assert len(embeddings) == (1 if tied else 2)
    again = load_policy(ModelConfig(path=str(tmp_path / "final")), key="ppo.model", device=CPU)
    same = again.get_input_embeddings().weight.data_ptr() == again.get_output_embeddings().weight.data_ptr()
    assert same == tied
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_failed_save_leaves_nothing(policy: Any, tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            assert (folder / "model.safetensors").is_file()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_model(policy, Broken(), tmp_path / "final")
    assert list(tmp_path.iterdir()) == []


def test_sixteen_bit_weights(policies: dict[str, Path], family: str) -> None:
    config = ModelConfig(path=str(policies[family]), dtype="bfloat16")
    model = load_policy(config, key="ppo.model", device=CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    check_head(model, key="ppo.model")
    got, _ = response_logprobs(model, *batch([(PROMPT, RESPONSE)]))
    assert got.dtype == torch.float32


# Mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"`ppo.model.path` is not set"),
        ({"path": "/no/such/folder"}, r"`ppo.model.path`: there is no model folder /no/such/folder"),
        ({"path": "some/run/ppo/final"}, r"`ppo.model.path`.* some/run/ppo/final; run the stage that writes it first"),
        ({"dtype": "float23"}, r"`ppo.model.dtype` is 'float23'.*`float32`"),
        ({"attn_implementation": "spda"}, r"`ppo.model.attn_implementation` is 'spda'.*`sdpa`"),
    ],
)
def test_a_model_that_cannot_be_loaded(policies: dict[str, Path], settings: dict[str, str], message: str) -> None:
    defaults = {"path": str(policies["gpt2"])} if settings and "path" not in settings else {}
    config = ModelConfig(**{**defaults, **settings})
    with pytest.raises(UserError, match=message):
        load_policy(config, key="ppo.model", device=CPU)
    with pytest.raises(UserError, match=message):
        load_reward_model(config, key="ppo.model", device=CPU)


def test_folders_that_hold_no_model(policies: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    with pytest.raises(UserError, match=r"did not finish \(see its status.json\)"):
        load_policy(ModelConfig(path=str(tmp_path / "sft" / "final")), key="ppo.model", device=CPU)
    with pytest.raises(UserError, match=r"holds no config.json"):
        load_policy(ModelConfig(path=str(tmp_path)), key="ppo.model", device=CPU)
    (tmp_path / "config.json").write_text((policies["gpt2"] / "config.json").read_text())
    with pytest.raises(UserError, match=r"`ppo.model.path`: .* could not be loaded: "):
        load_policy(ModelConfig(path=str(tmp_path)), key="ppo.model", device=CPU)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"`ppo.model.path`: .* could not be loaded: "):
        load_policy(ModelConfig(path=str(tmp_path)), key="ppo.model", device=CPU)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"`ppo.model.path`: .* could not be loaded: "):
        load_policy(ModelConfig(path=str(tmp_path)), key="ppo.model", device=CPU)


def test_a_reward_model_is_no_policy(scorers: dict[str, Path]) -> None:
    """Where the output embedding is a weight of its own, a scorer has none."""
    with pytest.raises(UserError, match=r"`ppo.model`: .* lacks weights for lm_head.weight"):
        load_policy(ModelConfig(path=str(scorers["llama"])), key="ppo.model", device=CPU)


def test_a_weight_of_another_shape_is_an_error(policies: dict[str, Path], tmp_path: Path) -> None:
    folder = folder_without(policies["gpt2"], tmp_path / "grown", "transformer.wpe.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": 32}))
    with pytest.raises(UserError, match=r"`ppo.model.path`: .* could not be loaded: "):
        load_policy(ModelConfig(path=str(folder)), key="ppo.model", device=CPU)


def test_tiny_configurations_are_what_they_say(tiny_tokenizer: Any) -> None:
    assert model_config("llama", tiny_tokenizer).hidden_size == model_config("gpt2", tiny_tokenizer).n_embd == 16
