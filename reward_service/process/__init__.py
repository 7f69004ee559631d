"""Rewards of steps, by a process reward model."""
