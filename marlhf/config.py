"""The configuration of a run: one YAML with a section per stage, a dataclass behind each section.

`load_config` merges, in this order, the defaults below, the YAML file, and `section.key=value` overrides.
Values may refer to each other with OmegaConf's `${...}`; a stage finds the model of the stage before it
that way. What no type can express is checked by the `check_*` functions before any work starts.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar, cast, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from marlhf.errors import ConfigError
from marlhf.presets import PRESETS

# OmegaConf's structured configs read `Optional[...]`; `X | None` is not understood by every supported version.
# ruff: noqa: UP045

Section = TypeVar("Section")


@dataclass
class ModelConfig:
    """Which weights to start from, and how to hold them."""

    path: str = ""
    """A folder or a Hugging Face model name; empty is unset."""
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`."""
    attn_implementation: str = "sdpa"
    """`sdpa`, `eager` or `flash_attention_2`."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless you ask for it."""


@dataclass
class DataConfig:
    """Where a stage's rows come from and how they become tokens."""

    source: str = "jsonl"
    """`jsonl`, `huggingface`, or the built-in `docstring_names` and `docstring_bodies`."""
    train: Optional[str] = None
    """JSONL file, or data set name or folder for `huggingface`; not used by the built-in sources."""
    validation: Optional[str] = None
    """JSONL file of held-out rows. None: `validation_fraction` of the training rows is held out by a hash."""
    validation_fraction: float = 0.05
    subset: Optional[str] = None
    """`huggingface`: the data set's configuration name."""
    train_split: str = "train"
    validation_split: Optional[str] = None
    """`huggingface`: a split's name. None: rows are held out of `train_split`."""
    prompt_field: str = "prompt"
    response_field: str = "response"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    chat_template: bool = False
    """Format prompts with the tokenizer's chat template; a prompt is then a string or a list of messages."""
    prompt_suffix: str = ""
    """Text put behind every prompt, such as a line break, before it becomes tokens."""
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    on_long_prompt: str = "error"
    """A prompt over `max_prompt_tokens`: `error`, `drop` the row, or `truncate` its beginning."""
    limit: Optional[int] = None
    """Read at most so many training rows."""


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule, which counts optimiser steps."""

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    weight_decay: float = 0.0
    schedule: str = "constant"
    """`constant`, `linear` or `cosine`, the last two down to 0 at the last step."""
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    max_skipped_steps: int = 3
    """A step whose gradient is not finite is skipped; after so many in a row the run stops."""


@dataclass
class CheckpointConfig:
    """What a stage keeps on disk so that `--resume` can go on from there."""

    every: Optional[int] = 100
    """Steps between checkpoints, one more at the end (iterations for PPO); null: none."""
    keep: int = 2
    """The newest so many are kept, and the best one."""
    best_metric: Optional[str] = None
    """A name in `metrics.jsonl`, such as `eval/score`: the step where it was best is kept as well."""
    best_mode: str = "max"
    """`max` or `min`."""


@dataclass
class SFTConfig:
    """Supervised fine-tuning on (prompt, response) rows."""

    run_folder: str = "${run_folder}/sft"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    epochs: int = 1
    max_steps: Optional[int] = None
    """So many optimiser steps, however many epochs that is; null: `epochs` epochs."""
    batch_size: int = 32
    """Rows per optimiser step."""
    microbatch_size: Optional[int] = None
    """Rows per backward pass, rows of like length together, so that a smaller number also saves padding. It
    changes no result; None: the whole batch."""
    train_on_prompt: bool = False
    """Also train on the prompt's tokens, as the released code of MA-RLHF does."""
    eval_every: int = 100
    """Optimiser steps between evaluations on the validation rows; one always runs at the end."""
    eval_rows: int = 512
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class RewardConfig:
    """A reward model on (prompt, chosen, rejected) rows."""

    run_folder: str = "${run_folder}/reward"
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${sft.run_folder}/final"))
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    epochs: int = 1
    max_steps: Optional[int] = None
    batch_size: int = 32
    """Pairs per optimiser step."""
    microbatch_size: Optional[int] = None
    loss: str = "last"
    """Where scores of a pair are compared: at the `last` token of each, or as the released code of MA-RLHF does
    (and DeepSpeed-Chat) at every position from the first token in which the two differ (`divergence`)."""
    center_coef: float = 0.01
    """Weight of the mean of (chosen + rejected score)^2 in the loss. Pairs say nothing of how scores compare
    between prompts; this holds every prompt's scores around 0 (Eisenstein et al., arXiv 2312.09244)."""
    see_prompt: bool = True
    """False trains a control that scores the response alone, which shows what the prompt is worth."""
    eval_every: int = 100
    eval_rows: int = 1024
    kind_field: str = "kind"
    """A field of the rows by which accuracy is also reported, where rows have it."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class RolloutConfig:
    """How responses are sampled."""

    engine: str = "hf"
    """`hf` (transformers' generator in this process), `module:function` or `file.py:function` (your own, for example
    a client of a serving engine; see `marlhf/sampling.py`), or `jsonl`: the rows bring recorded responses as
    `response_ids` and `roles`, one id and one of `assistant`, `tool` and `user` per token."""
    batch_size: int = 64
    """Prompts per iteration."""
    generation_batch_size: Optional[int] = None
    """Prompts per call of the engine, those of like length together; None: all at once."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: Optional[list[int]] = None
    """None: the tokenizer's end-of-sequence token."""
    allow_mismatched_sampling: bool = False
    """Sample with top-k, top-p or another temperature and score at temperature 1 all the same, so that ratios are
    wrong from the start. For `preset: released_code` alone, whose code does so; the mismatch is logged."""


@dataclass
class TerminationConfig:
    """Where one macro action ends and the next begins."""

    rule: str = "fixed"
    """`fixed` (n tokens), `token` (token-level PPO), `whole` (the response is one macro action), `randomized`
    (lengths drawn anew for each response and rollout), `perplexity` (ends where the text becomes less predictable
    to the reference) or `turn` (a run of tokens that the policy wrote, up to a tool's or user's answer)."""
    n: int = 5
    """Tokens per macro action for `fixed`."""
    lengths: list[int] = field(default_factory=lambda: [2, 3, 5, 10])
    """`randomized`: each of these lengths comes `repeats` times, shuffled; the rest is one macro action."""
    repeats: int = 3
    perplexity_rule: str = "running_mean"
    """`running_mean`: a token whose negative log-likelihood is above the mean of the macro action so far opens the
    next one; `neighbour`: above that of the token before it."""
    isolate_last: bool = False
    """Make the last token, which is paid the score, a macro action of its own, as the released code of MA-RLHF
    does; only then can `reward_weights` be an average."""


@dataclass
class RewardSourceConfig(ModelConfig):
    """One source of rewards: a reward model (the keys of a model) or a Python function (`file` and `name`)."""

    kind: str = "model"
    """`model` or `function`."""
    file: str = ""
    """`function`: your Python file. It is run, because you name it here."""
    name: str = ""
    """`function`: which function, `f(prompts, responses, rows) -> scores`; the name in metrics for both kinds."""
    weight: float = 1.0
    per: str = "response"
    """`function`: it gives one number per `response`, or for each response a list with one per `token` or per
    `macro` action that the policy wrote."""
    retokenize: bool = False
    """`model`: it has a tokenizer of its own, so the text is encoded again for it, as the reward stage would."""


@dataclass
class PPOConfig:
    """PPO, or macro-action PPO, against a reward model."""

    run_folder: str = "${run_folder}/ppo"
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${sft.run_folder}/final"))
    reward_model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${reward.run_folder}/final"))
    rewards: list[RewardSourceConfig] = field(default_factory=list)
    """Sources whose weighted scores are added; empty: `reward_model` alone."""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    termination: TerminationConfig = field(default_factory=TerminationConfig)
    policy_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-6))
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=5e-6))
    iterations: int = 100
    """Rollout batches. Each gives `ppo_epochs * minibatches` optimiser steps."""
    estimator: str = "gae"
    """Advantages by `gae` with a critic, or without one by `rloo`, `grpo` or `reinforce`: `marlhf/advantages.py`."""
    samples_per_prompt: int = 1
    """Responses per prompt in a rollout batch; `rloo` and `grpo` compare them with each other and need 2 or more."""
    ppo_epochs: int = 2
    max_kl: Optional[float] = None
    """Ends an iteration's update before the minibatch whose mean KL to the policy that sampled is above this: the
    mean over its tokens of e^d - 1 - d, d = logp - old logp, logged as `approx_kl`. None: never."""
    minibatches: int = 2
    """Optimiser steps per epoch over a rollout batch."""
    microbatch_size: Optional[int] = None
    """Responses per backward pass, those of like length together; None: the whole minibatch."""
    kl_coef: float = 0.05
    kl_estimator: str = "k1"
    """`k1`, `k2` or `k3`."""
    kl_target: Optional[float] = None
    """KL per response that the adaptive controller holds; None keeps `kl_coef` fixed."""
    kl_horizon: int = 10000
    """Responses over which the adaptive controller moves `kl_coef`."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference as a loss: the mean over tokens of d^2 / 2, d = logp - reference logp, whose
    gradient is that of the KL (k2; J. Schulman, "Approximating KL divergence", 2020). Usually with `kl_coef: 0`."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus, the mean over tokens (Mnih et al., arXiv 1602.01783)."""
    score_clip: Optional[float] = None
    """Scores are clamped to +- this value before they become rewards, after the penalties and the whitening below."""
    score_standardize: bool = False
    """Divide centred scores by the deviation that was saved with the reward model."""
    score_whiten: bool = False
    """Shift and scale the scores of a rollout batch, penalties included, to mean 0 and deviation 1."""
    length_penalty: Optional[float] = None
    """What each token of a response beyond `length_penalty_from` costs; None: nothing. With 1 / c and
    `max_new_tokens` - c it is the soft overlong punishment of DAPO (Yu et al., arXiv 2503.14476)."""
    length_penalty_from: int = 0
    missing_stop_penalty: Optional[float] = None
    """What a response without a stop token costs; None: nothing."""
    missing_stop_mode: str = "subtract"
    """`subtract` the penalty from the score, or `set` the score to minus the penalty."""
    gamma: float = 1.0
    lam: float = 0.95
    discount_per: str = "macro"
    """`macro` or `token`: what gamma and lam are counted per."""
    reward_weights: str = "sum"
    value_weights: str = "mean"
    bootstrap_truncated: bool = False
    """The value after a response without a stop token is the critic's, not 0: it would have gone on (Pardo et al.,
    arXiv 1712.00378)."""
    whiten_advantages: Optional[bool] = None
    """Advantages of a rollout batch get mean 0 and deviation 1 over its tokens; None: not for `rloo` and `grpo`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: Optional[float] = None
    ratio_level: str = "token"
    """`token`, `macro` or `macro_mean`."""
    normalize_by: Optional[str] = None
    """`tokens`, `macros` or `sequences`; None: the unit of `ratio_level`."""
    value_clip: Optional[float] = 0.2
    value_level: str = "token"
    critic_head: str = "reward"
    """The critic's head: `reward` copies the reward model's, `zero` starts at value 0 everywhere. Without a reward
    model that reads the policy's tokens, the critic starts from the policy, and `reward` is a fresh head."""
    eval_every: int = 10
    """Iterations between evaluations on the validation prompts; one runs at the start and at the end."""
    eval_rows: int = 128
    samples_per_eval: int = 8
    rollout_table: int = 0
    """Responses per iteration whose tokens are printed one by one with everything computed for them."""
    checkpoints: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=10))


def _same_as(section: str, kind: type[Section]) -> Section:
    """A section whose every key refers to the same key of another one."""
    return kind(**{entry.name: f"${{{section}.{entry.name}}}" for entry in fields(cast(Any, kind))})


@dataclass
class GenerateConfig:
    """Responses of a trained policy for prompts from a file."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${ppo.run_folder}/final"))
    data: DataConfig = field(default_factory=lambda: _same_as("ppo.data", DataConfig))
    rollout: RolloutConfig = field(default_factory=lambda: _same_as("ppo.rollout", RolloutConfig))
    output: str = "${run_folder}/generated.jsonl"


@dataclass
class EvaluateConfig:
    """A policy measured on held-out prompts under a reward model."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${ppo.run_folder}/final"))
    reference: ModelConfig = field(default_factory=lambda: ModelConfig(path="${sft.run_folder}/final"))
    reward_model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${reward.run_folder}/final"))
    data: DataConfig = field(default_factory=lambda: _same_as("ppo.data", DataConfig))
    """The rows that it holds out are measured; `validation_fraction: 0` measures all of `train`."""
    rollout: RolloutConfig = field(default_factory=lambda: _same_as("ppo.rollout", RolloutConfig))
    output: str = "${run_folder}/evaluation.json"


@dataclass
class Config:
    """Everything that a run reads."""

    run_folder: str = "runs/run"
    preset: Optional[str] = None
    """`released_code`: the settings of the code that was released with MA-RLHF, where it differs from the paper; they
    replace the defaults, and what your file says replaces them."""
    seed: int = 0
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`."""
    threads: Optional[int] = None
    """Threads for PyTorch on the CPU; None leaves PyTorch's own choice."""
    resume: bool = False
    """Go on from the newest checkpoint in the stage's run folder; the same as `--resume`."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies `section.key=value` overrides, and returns the typed configuration.

    Raises ConfigError for a missing file, broken YAML, an unknown key (naming the nearest known one) or a
    value of the wrong type.
    """
    layers: list[Any] = []
    if path is not None:
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"{file}: there is no such configuration file")
        try:
            loaded = OmegaConf.load(file)
        except Exception as error:
            raise ConfigError(f"{file}: not valid YAML: {error}") from error
        if not isinstance(loaded, DictConfig):
            raise ConfigError(f"{file}: a configuration is a mapping of sections such as `sft:` and `ppo:`")
        layers.append((str(file), loaded))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"`{override}`: an override is written section.key=value")
        try:
            layers.append((f"`{override}`", OmegaConf.from_dotlist([override])))
        except Exception as error:
            raise ConfigError(f"`{override}`: the value is not valid YAML: {error}") from error

    # The last layer that names a preset chooses it; what the others say stands above it.
    preset = next((layer.preset for _, layer in reversed(layers) if "preset" in layer), None)
    if preset is not None:
        name = one_of(str(preset), list(PRESETS), key="preset")
        layers.insert(0, (f"preset {name}", OmegaConf.create(PRESETS[name])))

    merged = OmegaConf.structured(Config)
    for origin, layer in layers:
        _refuse_unknown_keys(layer, Config, origin)
        try:
            merged.merge_with(layer)
        except OmegaConfBaseException as error:
            key = f"`{error.full_key}`: " if error.full_key else ""
            raise ConfigError(f"{origin}: {key}{str(error).splitlines()[0]}") from error
    try:
        OmegaConf.resolve(merged)
        return cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key = f"`{error.full_key}`: " if error.full_key else ""
        raise ConfigError(f"{key}{str(error).splitlines()[0]}") from error


def to_yaml(config: object) -> str:
    """The configuration as YAML, every default spelt out."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def require(value: str, *, key: str, hint: str) -> str:
    """The value of a key that has no default; ConfigError naming the key and what to write if it is unset."""
    if not value:
        raise ConfigError(f"`{key}` is not set: {hint}")
    return value


def one_of(value: str, known: Sequence[str], *, key: str) -> str:
    """The value, or a ConfigError that lists the known ones and names the nearest."""
    if value in known:
        return value
    raise ConfigError(f"`{key}` is {value!r}; known: {', '.join(known)}{_nearest(value, known)}")


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f". Did you mean `{close[0]}`?" if close else ""


def _refuse_unknown_keys(layer: DictConfig, section: type, origin: str, prefix: str = "") -> None:
    hints = get_type_hints(section)
    known = [entry.name for entry in fields(section)]
    for key in layer:
        name = str(key)
        if name not in known:
            raise ConfigError(
                f"{origin}: unknown key `{prefix}{name}`{_nearest(name, known)} "
                f"(keys of {prefix.rstrip('.') or 'the top level'}: {', '.join(known)})"
            )
        kind = next((arg for arg in (hints[name], *get_args(hints[name])) if is_dataclass(arg)), None)
        if kind is None or OmegaConf.is_missing(layer, name):
            continue
        value = OmegaConf.to_container(layer, resolve=False)
        inner = value.get(key) if isinstance(value, dict) else None
        if isinstance(inner, dict):
            _refuse_unknown_keys(OmegaConf.create(inner), cast(type, kind), origin, f"{prefix}{name}.")
        elif isinstance(inner, list):
            for number, entry in enumerate(inner):
                if isinstance(entry, dict):
                    _refuse_unknown_keys(
                        OmegaConf.create(entry), cast(type, kind), origin, f"{prefix}{name}[{number}]."
                    )
        elif inner is None:
            raise ConfigError(f"{origin}: the section `{prefix}{name}` is empty; give it keys or take it out")
        else:
            raise ConfigError(f"{origin}: `{prefix}{name}` is a section with keys of its own, not {inner!r}")
