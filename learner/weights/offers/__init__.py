"""How published versions are made available besides the Weights service: one module per transport."""

from __future__ import annotations

from learner.weights.offers.base import Offer
from learner.weights.offers.shm import SHARED_MEMORY, SharedMemory, shared_memory

__all__ = ["SHARED_MEMORY", "Offer", "SharedMemory", "shared_memory"]
