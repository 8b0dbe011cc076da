"""Log-probabilities under a causal language model, through its hidden states and its head.

Logits are computed only where they are asked for. [B] responses, [P] prompt length, [T] response length.
"""

from typing import Any

import torch
from torch import Tensor

from marlhf.data import position_ids
from marlhf.errors import UserError
from marlhf_kernels import token_logprobs


def hidden_states(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Last hidden states `[B, L, H]` of the model without its head; positions count real tokens only."""
    output = model.base_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        use_cache=False,
    )
    return output.last_hidden_state


def logprobs_from_hidden(
    model: Any, hidden: Tensor, labels: Tensor, *, temperature: float = 1.0, return_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and on request entropies, of `labels [N]` given `hidden [N, H]`."""
    logits = model.get_output_embeddings()(hidden)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    if return_entropy:
        return token_logprobs(logits, labels, temperature=temperature, logit_softcap=softcap, return_entropy=True)
    return token_logprobs(logits, labels, temperature=temperature, logit_softcap=softcap), None


def response_logprobs(
    model: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    response_mask: Tensor,
    *,
    actions: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities `[B, T]` of response tokens given everything before them, 0 where masked.

    Prompts `[B, P]` are left-padded and responses `[B, T]` right-padded, so the hidden states at P-1 .. P+T-2
    predict the T response tokens of every row. The head runs on real tokens only, or on those of them in
    `actions [B, T]`, and the rest is 0.
    """
    wanted = response_mask if actions is None else actions
    prompt_length, length = prompt_ids.shape[1], response_ids.shape[1]
    hidden = hidden_states(
        model,
        torch.cat([prompt_ids, response_ids], dim=1),
        torch.cat([prompt_mask, response_mask], dim=1),
    )
    predicting = hidden[:, prompt_length - 1 : prompt_length + length - 1]
    logprobs, entropy = logprobs_from_hidden(
        model,
        predicting[wanted],
        response_ids[wanted],
        temperature=temperature,
        return_entropy=return_entropy,
    )
    return _scatter(logprobs, wanted), None if entropy is None else _scatter(entropy, wanted)


def token_nll(model: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Summed negative log-likelihood of the labels, and their count; -100 marks what is not trained on.

    `labels[:, t]` is the token at t itself; it is predicted from position t - 1.
    """
    wanted = labels[:, 1:] >= 0  # [B, L - 1]
    hidden = hidden_states(model, input_ids, attention_mask)[:, :-1][wanted]
    logprobs, _ = logprobs_from_hidden(model, hidden, labels[:, 1:][wanted])
    return -logprobs.sum(), int(wanted.sum())


def check_head(model: Any, *, key: str) -> None:
    """UserError if hidden states, head and softcap do not reproduce the model's own log-probabilities.

    Some families scale or shift their logits after the head; training them through the head alone would
    optimise another distribution than the one that is sampled.
    """
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).remainder(model.config.vocab_size).view(1, 4)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask).logits[0, :-1].float().log_softmax(-1)
        own = own.gather(-1, ids[0, 1:, None]).squeeze(-1)
        ours, _ = logprobs_from_hidden(model, hidden_states(model, ids, mask)[0, :-1], ids[0, 1:])
    difference = (own - ours).abs().max().item()
    # 16-bit logits carry about three decimal digits.
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    if not difference <= tolerance:
        raise UserError(
            f"`{key}`: {type(model).__name__} changes its logits after the head (log-probabilities differ by "
            f"{difference:.3g}), which this trainer does not know how to follow"
        )


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
