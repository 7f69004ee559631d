"""Receiving the policy: announcements, transfers, verification, and the swap."""

from generators.weights.receiver import WeightReceiver

__all__ = ["WeightReceiver"]
