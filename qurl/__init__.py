"""Reinforcement learning of reasoning models with quantized rollouts."""

__version__ = "0.1.0"
