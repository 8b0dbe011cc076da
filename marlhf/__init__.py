"""A thin trainer for macro-action PPO: SFT, reward model, and PPO over the ops of `marlhf_kernels`."""

__version__ = "0.1.0"
