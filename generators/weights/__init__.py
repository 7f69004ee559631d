"""Receiving the policy, and relaying it: announcements, transfers, verification, and the swap."""

from generators.weights.receiver import WeightReceiver
from generators.weights.relay import Relay

__all__ = ["Relay", "WeightReceiver"]
