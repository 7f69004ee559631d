"""Receiving the policy, and relaying it: announcements, transfers, verification, and the swap."""

from rollmesh.generators.weights.receiver import WeightReceiver
from rollmesh.generators.weights.relay import Relay

__all__ = ["Relay", "WeightReceiver"]
