"""The contract of engines, by Megatron-Core's: all of it where processes have least in common, and in other layouts the
parts that they change.

`test_equivalence` compares the steps of all layouts, and `test_checkpoint_matrix` continues checkpoints across them.
"""

from __future__ import annotations

import pytest
import torch

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract import EngineContract
from rollmesh.testing.contract_adapters import AdapterContract
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract
from rollmesh.testing.worlds import EngineLayout

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("megatron")

ONE = EngineLayout("one_process", 1, "megatron")


class TestStages(EngineContract):
    """The last stage alone has results, and no stage all names."""

    layouts = (EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),)
    also_continued_in = (ONE, EngineLayout("fsdp2"), EngineLayout("fsdp2_two_ranks", 2))


class TestDividedMatrices(StateContract):
    """Tensors are put together from parts of rows and columns, without the padding of the vocabulary."""

    layouts = (EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),)


class TestMemory(MemoryContract):
    """Each rank has all parameters and a part of the optimizer, or a part of both."""

    layouts = (
        EngineLayout("dp2", 2, "megatron"),
        EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
    )


class TestAdapters(AdapterContract):
    """Each rank has rows of some layers and columns of others, and the tokens of both; or layers of its own."""

    layouts = (
        EngineLayout("fsdp2"),
        EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
        EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),
    )


class TestOneProcess(TrainingContract):
    """Nothing is divided."""

    layouts = (ONE,)
