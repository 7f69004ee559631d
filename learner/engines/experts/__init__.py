"""Mixtures of experts, whatever the engine: layers that have some, their balance, and the replay of a choice."""
