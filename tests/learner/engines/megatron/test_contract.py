"""The contract of engines, by Megatron-Core's: each test where it can find most, and all of them with `make test-all`.

Where processes have least in common: what reaches the others. In one process: what none of them does otherwise. In
other layouts: what they change.

`test_equivalence` compares the steps of all layouts, of experts and critics too. `test_checkpoint_matrix` continues
checkpoints across them.
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
    """The last stage alone has results, and no stage all names: all but what a process does by itself."""

    layouts = (EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),)
    also_continued_in = (ONE, EngineLayout("fsdp2_two_ranks", 2))
    FIRST_TIER = (
        "test_a_gradient_is_that_of_plain_forward_passes tied-ranks without",
        "test_ways_to_compute_a_gradient_do_not_change_it both",
        "test_ways_to_compute_a_gradient_do_not_change_it everything",
        "test_half_precision_keeps_float32_masters",
        "test_a_gradient_may_be_accumulated_in_parts",
        "test_a_gradient_that_is_not_finite_changes_nothing",
        "test_a_step_without_tokens_changes_nothing_and_is_no_failure",
        "test_log_probs_are_those_of_plain_forward_passes experts",
        "test_a_new_value_model_begins_at_zero",
        "test_nothing_to_infer_is_no_failure",
        "test_ranks_bring_their_values_to_every_process_in_order",
        "test_counts_are_those_of_all_ranks",
        "test_layouts_fit_together",
        "test_weights_have_the_models_names_once tied",
        "test_every_process_may_hold_a_part tied",
        "test_another_layout_continues",
        "test_memory_is_given_back",
    )


class TestOneProcess(EngineContract):
    """Nothing is divided."""

    layouts = (ONE,)
    FIRST_TIER = (
        "test_the_entropy_is_differentiated_where_it_is_asked_for",
        "test_there_is_no_step_without_a_gradient",
        "test_a_frozen_model_stays_as_it_was on the host",
        "test_gradients_that_no_step_has_used_have_no_part_in_a_checkpoint given up",
        "test_a_checkpoint_is_of_a_moment_between_two_steps",
        "test_a_folder_that_is_no_checkpoint_of_the_model_is_refused_and_changes_nothing another",
        "test_a_step_continues_after_a_rest params optimizer gradients",
        "test_a_turn_of_others_changes_nothing language_model",
        "test_a_call_that_needs_what_rests_is_refused",
        "test_a_model_trains_the_same_beside_others",
        "test_engines_close_in_any_order",
    )


class TestDividedMatrices(StateContract, MemoryContract):
    """Tensors are put together from parts of rows and columns, without the padding of the vocabulary."""

    layouts = (EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),)
    FIRST_TIER = ("test_weights_have_the_models_names_once tied", "test_every_process_may_hold_a_part experts")


class TestCopies(TrainingContract, MemoryContract):
    """Each rank has all parameters, batches of its own, and a part of the optimizer."""

    layouts = (EngineLayout("dp2", 2, "megatron"),)
    FIRST_TIER = ("test_a_gradient_is_that_of_plain_forward_passes tied-ranks",)


class TestAdapters(AdapterContract):
    """Each rank has rows of some layers and columns of others, and the tokens of both; or layers of its own.

    Whatever the engine, the same code refuses a checkpoint of another rank: that of FSDP2 has it in its first tier.
    """

    layouts = (
        EngineLayout("fsdp2"),
        EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
        EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),
    )
    FIRST_TIER = (
        "test_an_adapter_begins_as_the_base_which_never_changes pp2-experts",
        "test_all_layouts_train_the_same_adapter tp2-some",
        "test_an_exported_folder_has_the_adapter_merged pp2",
        "test_a_checkpoint_holds_the_adapter_alone_and_another_layout_continues tp2",
        "test_layers_that_the_model_lacks_are_refused pp2",
    )
