"""Loading and saving models, with the mistakes that users make answered before any work starts.

A policy is an `AutoModelForCausalLM`. Reward models and critics are `AutoModelForSequenceClassification` with
one label: every family has it, and what is saved loads with transformers alone.
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from marlhf.config import ModelConfig, one_of, require
from marlhf.data import load_tokenizer
from marlhf.engine import disable_dropout
from marlhf.errors import DivergedError, UserError
from marlhf.files import write_folder_atomically

# Loading takes a moment here; a bar per model would drown the run's own progress.
# What it warns of, such as a head that is meant to be new, is checked below with a message of our own.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

# transformers 4.56 renamed the argument.
DTYPE_ARGUMENT = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_policy(config: ModelConfig, *, key: str, device: torch.device, dropout: bool = False) -> Any:
    """A causal language model on `device`; dropout probabilities are set to 0 unless asked for.

    Raises UserError naming `key` if there is no such model or if it has no language-model head.
    """
    model, missing = _load(AutoModelForCausalLM, config, key=key)
    if missing:
        raise UserError(
            f"`{key}`: {config.path} lacks weights for {', '.join(sorted(missing)[:3])}"
            f"{' and others' if len(missing) > 3 else ''}: it is no complete causal language model"
        )
    if not dropout:
        disable_dropout(model)
    return model.to(device)


def load_reward_model(
    config: ModelConfig, *, key: str, device: torch.device, fresh_head: bool = False, seed: int = 0
) -> Any:
    """A scalar scorer on `device`, dropout off.

    With `fresh_head` the backbone may come from a causal language model and the head is drawn from a normal
    distribution with standard deviation 1/sqrt(hidden + 1). Without it a missing head is a UserError: a
    score read through random weights is noise that looks like a reward.
    """
    model, missing = _load(AutoModelForSequenceClassification, config, key=key, num_labels=1)
    head = scalar_head(model, key=key)
    head_names = {name for name, parameter in model.named_parameters() if parameter is head.weight}
    if fresh_head:
        generator = torch.Generator().manual_seed(seed)
        std = 1.0 / math.sqrt(head.in_features + 1)
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * std)
            if head.bias is not None:
                head.bias.zero_()
        model.config.reward_mean, model.config.reward_std = 0.0, 1.0
    elif missing & head_names:
        raise UserError(
            f"`{key}`: {config.path} has no reward head ({', '.join(sorted(missing & head_names))} is missing). "
            "Name a folder that `marlhf reward` wrote, or train one first"
        )
    others = missing - head_names
    if others:
        raise UserError(f"`{key}`: {config.path} lacks weights for {', '.join(sorted(others)[:3])}")
    disable_dropout(model)
    return model.to(device)


def load_critic(reward_model: Any, *, head: str) -> Any:
    """A critic that starts as a copy of the reward model, its head kept (`reward`) or set to `zero`."""
    one_of(head, ("reward", "zero"), key="ppo.critic_head")
    critic = copy.deepcopy(reward_model)
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    if head == "zero":
        with torch.no_grad():
            scalar_head(critic, key="ppo.reward_model").weight.zero_()
    return critic


def scalar_head(model: Any, *, key: str) -> nn.Linear:
    """The linear layer that turns a hidden state into a score."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise UserError(
            f"`{key}`: {type(model).__name__} has no linear `score` head with one output; decoder families such as "
            "GPT-2, Llama, Gemma, Qwen and Mistral have it"
        )
    return head


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Writes safetensors, configuration and tokenizer to a folder that appears only once it is complete.

    Raises DivergedError for weights that are not finite: whoever loads them would not be told.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise DivergedError(f"{path} is not written: {name} is not finite; lower the learning rate")

    def fill(folder: Path) -> None:
        try:
            model.save_pretrained(folder, safe_serialization=True)
        except SafetensorError as error:
            reason = str(error).rpartition("I/O error: ")[2].partition(" (os error")[0]
            raise UserError(f"{path}: cannot be written: {reason}") from error
        tokenizer.save_pretrained(folder)

    write_folder_atomically(path, fill)


def check_model(config: ModelConfig, *, key: str) -> None:
    """UserError for settings that cannot work: no path, a folder that is not there or holds no model."""
    path = require(config.path, key=f"{key}.path", hint="a model folder or a Hugging Face model name")
    one_of(config.dtype, list(DTYPES), key=f"{key}.dtype")
    one_of(config.attn_implementation, ("sdpa", "eager", "flash_attention_2"), key=f"{key}.attn_implementation")
    folder = Path(path)
    if not folder.is_dir() and (folder.is_absolute() or path.startswith(".") or path.count("/") != 1):
        raise UserError(f"`{key}.path`: there is no model folder {path}{_hint_for_stage(folder)}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"`{key}.path`: {path} holds no config.json, so it is not a saved model")


def check_fits(model: Any, tokenizer: Any, *, key: str, longest: int) -> None:
    """UserError if a model has no embedding for a token, or no position for the last of `longest` tokens."""
    embedded = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedded:
        raise UserError(
            f"`{key}`: the tokenizer has {len(tokenizer)} tokens, but the model embeds {embedded}; resize its "
            "embeddings, or use the tokenizer that it came with"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise UserError(
            f"`{key}`: a prompt with its response may take {longest} tokens, but the model has {positions} positions; "
            "lower rollout.max_new_tokens, data.max_response_tokens or data.max_prompt_tokens"
        )


def check_same_vocabulary(policy: Any, scorer: Any, tokenizer: Any, config: ModelConfig, *, key: str) -> None:
    """UserError if a reward model cannot read the policy's token ids: it has more or fewer, or means others by them."""
    ours, theirs = policy.config.vocab_size, scorer.config.vocab_size
    hint = "train the reward model from the same base as the policy, or let `ppo.rewards` retokenize for it"
    if ours != theirs:
        raise UserError(f"`{key}`: its vocabulary has {theirs} tokens and the policy's has {ours}; {hint}")
    try:
        other = load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
    except UserError:  # a reward model may be saved without its tokenizer; there is then nothing to compare
        return
    meant = {index: token for token, index in other.get_vocab().items()}
    for token, index in tokenizer.get_vocab().items():
        if meant.get(index, token) != token:
            raise UserError(
                f"`{key}`: its tokenizer is not the policy's (token {index} is {meant[index]!r}, not {token!r}); {hint}"
            )


def _load(auto: Any, config: ModelConfig, *, key: str, **extra: Any) -> tuple[Any, set[str]]:
    check_model(config, key=key)
    path, dtype = config.path, DTYPES[config.dtype]
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        for name, value in extra.items():
            setattr(model_config, name, value)
        model, info = auto.from_pretrained(
            path,
            config=model_config,
            **{DTYPE_ARGUMENT: dtype},
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files raise what transformers, safetensors or json happen to raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"`{key}.path`: {path} could not be loaded: {reason}") from error
    if model.config.pad_token_id is None:
        # Sequence classification refuses batches without one; which token it is never matters here.
        model.config.pad_token_id = 0
    for parameter in model.parameters():
        # Loaded weights lie in a mapped file at whatever offset. On a CPU the alignment of its operands decides how a
        # matrix product rounds: in memory of PyTorch's own the same weights give the same bits from any file.
        parameter.data = parameter.data.clone()
    return model, set(info["missing_keys"])


def _hint_for_stage(folder: Path) -> str:
    if folder.name != "final":
        return ""
    if folder.parent.is_dir():
        return f"; the run in {folder.parent} did not finish (see its status.json)"
    return "; run the stage that writes it first, or set the path"
