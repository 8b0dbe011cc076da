"""The seam between a rollout and what samples its responses.

`rollout.engine: hf` is transformers' generator in this process (`marlhf.rollout.generate`). Anything else is a
function, found by `module:function` or `file.py:function`:

    def sample(prompts, *, rows, model, max_new_tokens, temperature, top_k, top_p, stop_token_ids, seed):
        return ids, lengths, stopped            # or: ids, lengths, stopped, roles

- prompts: lists of token ids, the same one several times with `ppo.samples_per_prompt`; rows: their data rows.
- model: the policy that is being trained. A serving engine takes its weights from here before it samples.
- ids: the response's token ids, a list for each prompt or a padded `[B, T]` tensor, stop token included;
  lengths: how many of them are real, at most `max_new_tokens`; stopped: whether it ended with a stop token.
- roles: where a tool or a user answered within a response, one of `assistant`, `tool` and `user` for each token.

Sample from softmax(logits / temperature) with nothing else applied: log-probabilities are recomputed by the
training forward, and a law that differs from the sampled one makes every ratio wrong. Equal arguments should give
equal responses. What comes back is checked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marlhf.config import RolloutConfig
from marlhf.data import left_pad, right_pad
from marlhf.errors import ConfigError, DataError, UserError
from marlhf.responses import Responses
from marlhf.user_code import load_function

ROLES = ("assistant", "tool", "user")
Row = Mapping[str, Any]


def load_engine(name: str, *, key: str) -> Callable[..., Any] | None:
    """The function behind `rollout.engine`; None for `hf`. ConfigError if there is none."""
    if name == "hf":
        return None
    if name == "jsonl":
        return recorded
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise ConfigError(f"`{key}` is {name!r}; write hf, jsonl, module:function or file.py:function")
    return load_function(where, function, key=key)


def buckets(prompts: Sequence[Sequence[int]], size: int | None) -> list[list[int]]:
    """Row numbers in parts of `size`, prompts of like length together; None: all rows in one part, in order."""
    rows = list(range(len(prompts)))
    if size is None or size >= len(rows):
        return [rows]
    rows.sort(key=lambda i: len(prompts[i]))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def external_responses(
    engine: Callable[..., Any],
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: RolloutConfig,
    *,
    stops: Sequence[int],
    pad_id: int,
    seed: int,
    rows: Sequence[Row],
) -> Responses:
    """Asks `engine` for one response per prompt and checks what it gives; UserError naming it if that is wrong."""
    ids: list[list[int]] = [[] for _ in prompts]
    roles: list[list[str]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for number, part in enumerate(buckets(prompts, config.generation_batch_size)):
        try:
            given = engine(
                [list(prompts[i]) for i in part],
                rows=[rows[i] for i in part] if rows else [{} for _ in part],
                model=model,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                stop_token_ids=list(stops),
                seed=seed + number,
            )
        except UserError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise UserError(f"`rollout.engine` ({config.engine}) raised {type(error).__name__}: {error}") from error
        try:
            found = checked(given, len(part), longest=config.max_new_tokens, vocabulary=vocabulary, stops=stops)
        except ValueError as error:
            raise UserError(f"`rollout.engine` ({config.engine}) gave what cannot be used: {error}") from error
        for i, part_ids, part_roles, part_stopped in zip(part, *found, strict=True):
            ids[i], roles[i], stopped[i] = part_ids, part_roles, part_stopped
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = (x.to(device) for x in left_pad([list(prompt) for prompt in prompts], pad_id))
    response_ids, mask = (x.to(device) for x in _at_least_one_column(*right_pad(ids, pad_id), pad_id=pad_id))
    actions, _ = right_pad([[int(role == "assistant") for role in row] for row in roles], 0)
    actions = torch.nn.functional.pad(actions, (0, mask.shape[1] - actions.shape[1])).bool().to(device)
    truncated = ~torch.tensor(stopped, dtype=torch.bool, device=device)
    return Responses(prompt_ids, prompt_mask, response_ids, mask, truncated, actions)


def checked(
    given: Any, count: int, *, longest: int, vocabulary: int, stops: Sequence[int]
) -> tuple[list[list[int]], list[list[str]], list[bool]]:
    """Token ids, roles and stop flags of `count` responses; ValueError says what is wrong with them."""
    if not isinstance(given, Sequence) or len(given) not in (3, 4):
        raise ValueError("it returns (ids, lengths, stopped), or these and roles")
    for name, column in zip(("ids", "lengths", "stopped", "roles"), given, strict=False):
        if len(column) != count:
            raise ValueError(f"{name} has {len(column)} entries for {count} prompts")
    ids, roles, stopped = [], [], []
    for row in range(count):
        length, tokens = int(given[1][row]), [int(token) for token in given[0][row]]
        if not 0 <= length <= min(len(tokens), longest):
            raise ValueError(
                f"length {length} of response {row}, which has {len(tokens)} ids and may have {longest} at most"
            )
        tokens = tokens[:length]
        if outside := [token for token in tokens if not 0 <= token < vocabulary]:
            raise ValueError(f"token id {outside[0]} in response {row}; the vocabulary has {vocabulary} tokens")
        flag = bool(given[2][row])
        if len(given) == 4:
            named = [str(role) for role in given[3][row]]
            if len(named) != length:
                raise ValueError(f"{len(named)} roles for the {length} tokens of response {row}")
            if unknown := [role for role in named if role not in ROLES]:
                raise ValueError(f"role {unknown[0]!r} in response {row}; known: {', '.join(ROLES)}")
        else:
            named = ["assistant"] * length
            if any(token in stops for token in tokens[:-1]):
                raise ValueError(f"response {row} goes on after a stop token; it must end with its first one")
            if flag != (tokens[-1:] != [] and tokens[-1] in stops):
                raise ValueError(f"stopped is {flag} for response {row}, whose last token says otherwise")
        ids.append(tokens)
        roles.append(named)
        stopped.append(flag)
    return ids, roles, stopped


def recorded(prompts: Sequence[Sequence[int]], *, rows: Sequence[Row], stop_token_ids: Sequence[int], **_: Any) -> Any:
    """`rollout.engine: jsonl`: the responses that the rows bring, whoever wrote them.

    A row has `response_ids`, and `roles` where others than the assistant speak; `stopped` says whether it ended by
    itself, by default whether its last token is a stop token. The update is then off-policy: ratios are taken to the
    policy before the update, not to whoever wrote the responses.
    """
    ids = [list(row["response_ids"]) for row in rows]
    roles = [list(row.get("roles") or ["assistant"] * len(row["response_ids"])) for row in rows]
    stopped = [
        bool(row.get("stopped", tokens[-1:] != [] and tokens[-1] in stop_token_ids))
        for row, tokens in zip(rows, ids, strict=True)
    ]
    return ids, [len(tokens) for tokens in ids], stopped, roles


def check_recorded(rows: Sequence[Row], *, config: RolloutConfig, vocabulary: int, stops: Sequence[int]) -> None:
    """DataError naming the first row whose recorded response cannot be used; only `engine: jsonl` has any."""
    if config.engine != "jsonl":
        return
    for number, row in enumerate(rows, start=1):
        place = f"row {number} ({str(row.get('prompt'))[:40]!r})"
        if not isinstance(row.get("response_ids"), list):
            raise DataError(f"{place}: `rollout.engine` is jsonl, but it has no list `response_ids`")
        try:
            given = recorded([[]], rows=[row], stop_token_ids=stops)
            _, roles, _ = checked(given, 1, longest=config.max_new_tokens, vocabulary=vocabulary, stops=stops)
        except (TypeError, ValueError) as error:
            raise DataError(f"{place}: {error}") from error
        if "assistant" not in roles[0]:
            raise DataError(f"{place}: no token of it is the assistant's, so there is nothing to learn from")


def _at_least_one_column(ids: Tensor, mask: Tensor, *, pad_id: int) -> tuple[Tensor, Tensor]:
    missing = max(0, 1 - ids.shape[1])
    return torch.nn.functional.pad(ids, (0, missing), value=pad_id), torch.nn.functional.pad(mask, (0, missing))
