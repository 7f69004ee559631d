"""The contract of every training engine, whatever computes in it and however it is laid out: a suite to inherit from.

    from rollmesh.testing.contract import EngineContract
    from rollmesh.testing.worlds import EngineLayout

    class TestMine(EngineContract):
        layouts = (EngineLayout("one process", 1, "mine"), EngineLayout("two ranks", 2, "mine"))

The topmost `conftest.py` names `rollmesh.testing.fixtures` in its `pytest_plugins`. Every test runs in each layout, in
processes that are kept for the session. Nothing but the interface of engines is used.
"""

from __future__ import annotations

from rollmesh.testing.contract_inference import InferenceContract
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract


class EngineContract(TrainingContract, InferenceContract, StateContract, MemoryContract):
    """All of it."""
