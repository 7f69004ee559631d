"""The contract of every training engine, whatever computes in it and however it is laid out: a suite to inherit from.

    from rollmesh.testing.contract import EngineContract
    from rollmesh.testing.worlds import EngineLayout

    class TestMine(EngineContract):
        layouts = (EngineLayout("one process", 1, "mine"), EngineLayout("two ranks", 2, "mine"))

A `conftest.py` next to it imports the fixtures of `rollmesh.testing.fixtures`. Every test runs in each layout, in
processes that are kept for the session. Nothing but the interface of engines is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from rollmesh.testing.contract_inference import InferenceContract
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract
from rollmesh.testing.worlds import EngineLayout


class EngineContract(TrainingContract, InferenceContract, StateContract, MemoryContract):
    """All of it.

    Attributes:
        layouts: in which it is run.
    """

    layouts: ClassVar[Sequence[EngineLayout]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs every test in each layout."""
        if "world" in metafunc.fixturenames:
            names = [layout.name for layout in self.layouts]
            metafunc.parametrize("world", self.layouts, ids=names, indirect=True)
