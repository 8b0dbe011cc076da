"""Named sets of defaults."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # What the code released with MA-RLHF (Chai et al., arXiv 2410.02743) does where the paper says otherwise. Rewards
    # go through the value weights, so that the KL of a macro action of n tokens is divided by n; the score is not,
    # since the last token stands alone. What that code calls `position` is `ppo.value_weights: position_reversed`.
    # Its empty macro actions are a fault that nothing here reproduces.
    "released_code": {
        "sft": {"train_on_prompt": True},
        "reward": {"loss": "divergence"},
        "ppo": {
            "rollout": {"top_k": 50, "allow_mismatched_sampling": True},
            "termination": {"lengths": [1, 2, 3, 5, 10], "isolate_last": True},
            "reward_weights": "${ppo.value_weights}",
            "score_clip": 2.5,
            "whiten_advantages": False,
            "value_clip": 0.2,
        },
    },
}
