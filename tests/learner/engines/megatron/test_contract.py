"""The contract of engines, by Megatron-Core's: each test where it can find most, and all of them with `make test-all`.

Where processes have least in common: what reaches the others. In one process: what none of them does otherwise. In
other layouts: what they change.

`test_equivalence` compares the steps of all layouts, and `test_checkpoint_matrix` continues checkpoints across them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract import EngineContract
from rollmesh.testing.contract_adapters import AdapterContract
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineLayout

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("megatron")

ONE = EngineLayout("one_process", 1, "megatron")


class InPart(Suite):
    """A part of the contract of which the first tier has some tests.

    Attributes:
        first: beginnings of their names by layout. Each test of the contract has a layout of this module there.
    """

    first: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """See `Suite`."""
        name = metafunc.function.__name__.removeprefix("test_")
        layouts = [
            pytest.param(
                layout,
                marks=() if name.startswith(self.first.get(layout.name, ())) else pytest.mark.exhaustive,
                id=layout.name,
            )
            for layout in self.layouts
        ]
        metafunc.parametrize("world", layouts, indirect=True)


class TestStages(InPart, EngineContract):
    """The last stage alone has results, and no stage all names: all but what a process does by itself."""

    layouts = (EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),)
    also_continued_in = (ONE, EngineLayout("fsdp2_two_ranks", 2))
    first = {
        "pp2": (
            "a_gradient",
            "ways_to_compute",
            "the_",
            "half_precision",
            "a_value_models",
            "a_step_that",
            "a_step_without",
            "log_probs",
            "values_are",
            "a_new_value_model",
            "nothing_to_infer",
            "ranks_bring",
            "counts_are",
            "layouts_fit",
            "weights_have",
            "every_process",
            "an_exported_folder",
            "a_run_continues",
            "training_goes_on",
            "another_layout",
            "memory_is_given_back",
        )
    }


class TestOneProcess(InPart, EngineContract):
    """Nothing is divided."""

    layouts = (ONE,)
    first = {
        "one_process": (
            "a_gradient_is",
            "there_is_no_step",
            "a_base_that",
            "a_frozen_model",
            "outputs_follow",
            "gradients_that_no_step",
            "a_checkpoint_is_of_a_moment",
            "a_folder_that",
            "a_step_continues",
            "a_turn_of_others",
            "what_rests",
            "a_call_that_needs",
            "a_model_trains",
            "engines_close",
        )
    }


class TestDividedMatrices(InPart, StateContract):
    """Tensors are put together from parts of rows and columns, without the padding of the vocabulary."""

    layouts = (EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),)
    first = {"tp2": ("weights_have", "every_process_may_hold")}


class TestMemory(InPart, MemoryContract):
    """Each rank has all parameters and a part of the optimizer, or a part of both."""

    layouts = (
        EngineLayout("dp2", 2, "megatron"),
        EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
    )
    first = {"dp2": ("a_turn_of_others", "what_rests")}


class TestAdapters(InPart, AdapterContract):
    """Each rank has rows of some layers and columns of others, and the tokens of both; or layers of its own."""

    layouts = (
        EngineLayout("fsdp2"),
        EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
        EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),
    )
    first = {
        "tp2": ("all_layouts", "a_checkpoint_holds"),
        "pp2": ("an_adapter_begins", "an_exported_folder", "a_checkpoint_of_another", "layers_that"),
    }
