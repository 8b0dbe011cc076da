"""One YAML with a section per stage: defaults, layers, and mistakes that are answered by name."""

from pathlib import Path

import pytest

from marlhf.config import Config, load_config, one_of, require, to_yaml
from marlhf.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_stage_finds_the_one_before_it() -> None:
    config = load_config()
    assert config == load_config(None, [])
    assert (config.sft.run_folder, config.reward.run_folder, config.ppo.run_folder) == (
        "runs/run/sft",
        "runs/run/reward",
        "runs/run/ppo",
    )
    assert config.reward.model.path == config.ppo.model.path == "runs/run/sft/final"
    assert config.ppo.reward_model.path == "runs/run/reward/final"
    assert config.generate.model.path == config.evaluate.model.path == "runs/run/ppo/final"
    assert config.sft.model.path == ""


def test_adam_eps_and_clipping_are_stated() -> None:
    """Adam eps 1e-5, and a gradient norm, in every stage."""
    config = load_config()
    for optimizer in (
        config.sft.optimizer,
        config.reward.optimizer,
        config.ppo.policy_optimizer,
        config.ppo.critic_optimizer,
    ):
        assert optimizer.eps == 1e-5
        assert optimizer.max_grad_norm == 1.0
    text = to_yaml(config)
    assert text.count("eps: 1.0e-05") == text.count("max_grad_norm: 1.0") == 4


def test_nothing_is_cut_off_the_sampled_law_by_default() -> None:
    for rollout in (load_config().ppo.rollout, load_config().generate.rollout, load_config().evaluate.rollout):
        assert (rollout.temperature, rollout.top_k, rollout.top_p) == (1.0, 0, 1.0)


def test_file_wins_over_defaults_and_a_word_over_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "run.yaml",
        "run_folder: here\nseed: 5\nppo:\n  iterations: 7\n  rollout:\n    batch_size: 9\n"
        "  policy_optimizer:\n    learning_rate: 1e-3\n    betas: [0.8, 0.9]\n  microbatch_size: 4\n",
    )
    config = load_config(file, ["ppo.iterations=8", "ppo.microbatch_size=null", "run_folder=there"])
    assert (config.seed, config.ppo.iterations, config.ppo.rollout.batch_size) == (5, 8, 9)
    assert config.ppo.policy_optimizer.learning_rate == 0.001
    assert tuple(config.ppo.policy_optimizer.betas) == (0.8, 0.9)
    assert config.ppo.microbatch_size is None
    assert config.ppo.minibatches == Config().ppo.minibatches
    assert config.ppo.run_folder == "there/ppo"
    assert config.ppo.model.path == "there/sft/final"


def test_a_later_word_wins() -> None:
    assert load_config(None, ["seed=1", "seed=2"]).seed == 2


def test_values_may_hold_equals_signs_spaces_and_any_script() -> None:
    config = load_config(None, ["sft.data.prompt_suffix= x = y", "sft.data.train=データ/a b.jsonl"])
    assert config.sft.data.prompt_suffix.strip() == "x = y"
    assert config.sft.data.train == "データ/a b.jsonl"


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "run.yaml", "")) == load_config()


def test_the_resolved_configuration_is_read_back_equal(tmp_path: Path) -> None:
    """What a run folder holds starts the same run again."""
    config = load_config(
        None,
        [
            "run_folder=somewhere/ü",
            "ppo.kl_target=6",
            "ppo.rollout.stop_token_ids=[2,7]",
            "sft.data.prompt_suffix='\\n'",
            "ppo.value_clip=null",
            "sft.optimizer.learning_rate=3e-3",
        ],
    )
    assert config.ppo.rollout.stop_token_ids == [2, 7]
    text = to_yaml(config)
    assert "${" not in text
    assert load_config(write(tmp_path / "again.yaml", text)) == config


@pytest.mark.parametrize(
    ("word", "unknown", "meant"),
    [
        ("seeed=1", "seeed", "seed"),
        ("pppo.iterations=2", "pppo", "ppo"),
        ("ppo.kl_coeff=.1", "ppo.kl_coeff", "kl_coef"),
        ("ppo.rollout.temprature=1", "ppo.rollout.temprature", "temperature"),
        ("sft.optimizer.lerning_rate=1", "sft.optimizer.lerning_rate", "learning_rate"),
        ("reward.data.chosen_feild=x", "reward.data.chosen_feild", "chosen_field"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, word: str, unknown: str, meant: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config(None, [word])
    assert f"`{unknown}`" in str(told.value)
    assert f"Did you mean `{meant}`?" in str(told.value)

    key, _, value = word.partition("=")
    lines, indent = [], ""
    for part in key.split("."):
        lines.append(f"{indent}{part}:")
        indent += "  "
    file = write(tmp_path / "run.yaml", "\n".join(lines) + f" {value}\n")
    with pytest.raises(ConfigError) as told:
        load_config(file)
    assert str(file) in str(told.value)
    assert f"`{unknown}`" in str(told.value)
    assert f"`{meant}`" in str(told.value)


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="qwertyuiop") as told:
        load_config(None, ["ppo.termination.qwertyuiop=1"])
    assert "rule, n" in str(told.value)
    assert "Did you mean" not in str(told.value)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("ppo.iterations=many", "ppo.iterations"),
        ("ppo.iterations=1.5", "ppo.iterations"),
        ("ppo.iterations=null", "ppo.iterations"),
        ("ppo.kl_coef=[1]", "ppo.kl_coef"),
        ("sft.data.chat_template=perhaps", "sft.data.chat_template"),
        ("ppo.rollout.stop_token_ids=[a]", "ppo.rollout.stop_token_ids"),
        ("sft.optimizer.betas=[0.9]", "sft.optimizer.betas"),
        ("ppo=3", "ppo"),
        ("ppo.rollout=null", "ppo.rollout"),
        ("run_folder=${nowhere}", "run_folder"),
    ],
)
def test_a_value_of_the_wrong_type_names_its_key(word: str, key: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config(None, [word])
    assert key in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("word", ["ppo.iterations", "=3", "--seed", "ppo.iterations:3"])
def test_a_word_that_is_no_override(word: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(None, [word])


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "ppo: [1\n", "a: b: c\n", "\x00"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="there is no such configuration file"):
            load_config(path)


def test_choices_are_listed_and_the_nearest_named() -> None:
    assert one_of("k1", ("k1", "k2"), key="ppo.kl_estimator") == "k1"
    with pytest.raises(ConfigError, match=r"`ppo.kl_estimator` is 'k5'; known: k1, k2. Did you mean `k"):
        one_of("k5", ("k1", "k2"), key="ppo.kl_estimator")


def test_what_has_no_default_is_asked_for() -> None:
    assert require("x", key="sft.model.path", hint="a folder") == "x"
    with pytest.raises(ConfigError, match=r"`sft.model.path` is not set: a folder"):
        require("", key="sft.model.path", hint="a folder")
