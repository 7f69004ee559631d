"""The contract of engines, by Megatron-Core's: all of it where processes have least in common, and in other layouts the
tests of what they change. `make test-all` runs whole parts of the contract there.

`test_equivalence` compares the steps of all layouts, and `test_checkpoint_matrix` continues checkpoints across them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract import EngineContract
from rollmesh.testing.contract_adapters import AdapterContract
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineLayout

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("megatron")

ONE = EngineLayout("one_process", 1, "megatron")


class TestStages(EngineContract):
    """The last stage alone has results, and no stage all names."""

    layouts = (EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),)
    also_continued_in = (ONE, EngineLayout("fsdp2"), EngineLayout("fsdp2_two_ranks", 2))


class OtherLayout(Suite):
    """A part of the contract in another layout.

    Attributes:
        changes: beginnings of the names of tests of what the layout changes. The others prove as much in stages.
    """

    changes: ClassVar[Sequence[str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """See `Suite`; the tests of what it changes are in the first tier."""
        name = metafunc.function.__name__.removeprefix("test_")
        marks = () if name.startswith(tuple(self.changes)) else pytest.mark.exhaustive
        layouts = [pytest.param(layout, marks=marks, id=layout.name) for layout in self.layouts]
        metafunc.parametrize("world", layouts, indirect=True)


class TestDividedMatrices(OtherLayout, StateContract):
    """Tensors are put together from parts of rows and columns, without the padding of the vocabulary."""

    layouts = (EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),)
    changes = ("weights_have", "every_process_may_hold", "another_layout", "a_run_continues")


class TestDividedOptimizer(OtherLayout, MemoryContract):
    """Each rank has all parameters and a part of the optimizer."""

    layouts = (EngineLayout("dp2", 2, "megatron"),)
    changes = ("a_step_continues", "a_turn_of_others", "what_rests")


class TestMemory(OtherLayout, MemoryContract):
    """Each rank has a part of the parameters."""

    layouts = (EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),)
    changes = ("memory_is_given_back",)


class TestAdapters(OtherLayout, AdapterContract):
    """Each rank has rows of some layers and columns of others, and the tokens of both; or layers of its own."""

    layouts = (
        EngineLayout("fsdp2"),
        EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
        EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),
    )
    changes = ("all_layouts", "a_checkpoint_holds", "an_exported_folder")


class TestOneProcess(OtherLayout, TrainingContract):
    """Nothing is divided."""

    layouts = (ONE,)
    changes = ("a_gradient_is", "ways_to_compute", "a_value_models")
