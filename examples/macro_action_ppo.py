"""Macro-action PPO: a small GRU learns to write letters in alphabetical order."""

import copy

import torch
from torch import Tensor, nn

from marlhf_kernels import macro_gae, macro_policy_loss, macro_value_loss, segmentation

STOP, LETTERS, LENGTH, BATCH, EPOCHS = 0, 8, 12, 64, 4
GAMMA, LAM, CLIP, KL_COEF = 1.0, 0.95, 0.2, 0.02
N = 3  # tokens in a macro action


class Model(nn.Module):
    """Policy and critic on one GRU; entry t of both outputs is made before token t is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(1 + LETTERS, 32), nn.GRU(32, 64, batch_first=True)
        self.policy, self.critic = nn.Linear(64, 1 + LETTERS), nn.Linear(64, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # [B, T] -> [B, T, V], [B, T]
        before = torch.cat((tokens.new_full((len(tokens), 1), STOP), tokens[:, :-1]), 1)
        hidden, _ = self.gru(self.embed(before))
        return self.policy(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def generate(model: Model) -> tuple[Tensor, Tensor]:
    """[B, T] tokens, and [B, T] which of them count: those up to STOP, STOP included."""
    tokens = torch.full((BATCH, LENGTH), STOP)
    for t in range(LENGTH):
        tokens[:, t] = torch.multinomial(model(tokens[:, : t + 1])[0][:, t].exp(), 1).squeeze(1)
    stops = (tokens == STOP).long()
    return tokens, stops.cumsum(1) - stops == 0


def score(tokens: Tensor, mask: Tensor) -> Tensor:
    """[B] how often the next letter of the alphabet follows (after the last one, the first): from 0 to 1."""
    follows = (tokens[:, 1:] == tokens[:, :-1] % LETTERS + 1) & (tokens[:, :-1] != STOP) & mask[:, 1:]
    return follows.sum(1) / (LENGTH - 1)


def train(iterations: int = 30, seed: int = 0) -> list[tuple[float, float, float]]:
    """Mean score of the rollout, and policy and value loss of its last epoch, for each iteration."""
    torch.manual_seed(seed)
    model = Model()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for _ in range(iterations):
        with torch.no_grad():
            tokens, mask = generate(model)
            index = tokens.unsqueeze(2)
            scores, (logprobs, values) = score(tokens, mask), model(tokens)
            old, ref = (x.gather(2, index).squeeze(2) for x in (logprobs, reference(tokens)[0]))
            values = values * mask
            rewards = -KL_COEF * (old - ref) * mask
            rewards[torch.arange(BATCH), mask.sum(1) - 1] += scores
            ids = segmentation.fixed_ngram(mask, N)
            advantages, returns = macro_gae(rewards, values, ids, gamma=GAMMA, lam=LAM)
            advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)
        for _ in range(EPOCHS):
            logprobs, new_values = model(tokens)
            new = logprobs.gather(2, index).squeeze(2)
            policy_loss = macro_policy_loss(new, old, advantages, ids, clip_low=CLIP, clip_high=CLIP).loss
            value_loss = macro_value_loss(new_values, values, returns, ids, clip=CLIP).loss
            optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            optimizer.step()
        history.append((scores.mean().item(), policy_loss.item(), value_loss.item()))
    return history


if __name__ == "__main__":
    for iteration, (mean_score, policy_loss, value_loss) in enumerate(train()):
        print(f"{iteration:3} score {mean_score:.3f} policy loss {policy_loss:+.4f} value loss {value_loss:.4f}")
