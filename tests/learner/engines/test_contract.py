"""The contract of engines, on those of this package, and what FSDP2 promises beyond it on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract import EngineContract
from rollmesh.testing.contract_adapters import AdapterContract
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines import compiled, two_ranks
from tests.learner.engines.models import make_model, one_layer_models

torch.set_num_threads(1)
ONE, TWO = EngineLayout("one_process"), EngineLayout("two_ranks", processes=2)
SEQUENCES = EngineLayout("divided_sequences", processes=2, changes={"parallel": ParallelSection(sp=2)})


@pytest.fixture(scope="module")
def engine_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Models of one layer. `test_equivalence` has several."""
    return one_layer_models(tmp_path_factory.mktemp("one-layer"))


class TestFsdp2(EngineContract):
    """On two ranks what ranks can change, in one process the rest; each rule once.

    `test_equivalence` has the gradient of experts on two ranks. Memory is given back in `experts/test_division`, which
    divides dense layers as this does.
    """

    layouts = (ONE, TWO)
    FIRST_TIER = (
        "test_a_gradient_is_that_of_plain_forward_passes one_process-dense",
        "test_ways_to_compute_a_gradient_do_not_change_it one_process-logits",
        "test_a_gradient_is_that_of_plain_forward_passes two_ranks-tied-ranks without",
        "test_ways_to_compute_a_gradient_do_not_change_it two_ranks-both",
        "test_the_entropy_is_differentiated_where_it_is_asked_for one_process",
        "test_half_precision_keeps_float32_masters two_ranks",
        "test_a_value_models_gradient_is_that_of_plain_forward_passes two_ranks",
        "test_a_gradient_may_be_accumulated_in_parts two_ranks",
        "test_a_step_that_is_given_up_leaves_nothing two_ranks-half precision",
        "test_a_gradient_that_is_not_finite_changes_nothing two_ranks",
        "test_a_step_without_tokens_changes_nothing_and_is_no_failure two_ranks",
        "test_a_step_without_micro_batches_follows_a_gradient_of_zero two_ranks",
        "test_the_rate_follows_its_schedule one_process",
        "test_there_is_no_step_without_a_gradient one_process",
        "test_log_probs_are_those_of_plain_forward_passes two_ranks-experts",
        "test_a_new_value_model_begins_at_zero one_process",
        "test_nothing_to_infer_is_no_failure two_ranks",
        "test_ranks_bring_their_values_to_every_process_in_order two_ranks",
        "test_counts_are_those_of_all_ranks two_ranks",
        "test_layouts_fit_together two_ranks",
        "test_a_base_that_does_not_exist_is_refused one_process",
        "test_a_frozen_model_stays_as_it_was two_ranks-on the host",
        "test_outputs_follow_steps_amid_which_there_were_others two_ranks-stays",
        "test_weights_have_the_models_names_once two_ranks-tied",
        "test_every_process_may_hold_a_part two_ranks-experts",
        "test_an_exported_folder_gives_the_same_log_probs one_process-experts",
        "test_an_exported_folder_gives_the_same_log_probs two_ranks-tied",
        "test_a_run_continues_as_if_nothing_had_happened two_ranks-after",
        "test_training_goes_on_while_a_checkpoint_is_written two_ranks",
        "test_gradients_that_no_step_has_used_have_no_part_in_a_checkpoint one_process-not finite",
        "test_another_layout_continues two_ranks",
        "test_a_checkpoint_is_of_a_moment_between_two_steps one_process",
        "test_a_folder_that_is_no_checkpoint_of_the_model_is_refused_and_changes_nothing one_process-half",
        "test_a_folder_that_is_no_checkpoint_of_the_model_is_refused_and_changes_nothing two_ranks-another",
        "test_a_step_continues_after_a_rest two_ranks-params optimizer gradients",
        "test_a_turn_of_others_changes_nothing one_process-language_model",
        "test_what_rests_between_calls_changes_nothing one_process",
        "test_a_call_that_needs_what_rests_is_refused one_process",
        "test_a_model_trains_the_same_beside_others one_process",
        "test_engines_close_in_any_order two_ranks",
    )


class TestAdapters(AdapterContract):
    """As above."""

    layouts = (ONE, TWO)
    FIRST_TIER = (
        "test_an_adapter_begins_as_the_base_which_never_changes one_process-experts",
        "test_all_layouts_train_the_same_adapter two_ranks-some",
        "test_an_exported_folder_has_the_adapter_merged one_process",
        "test_a_checkpoint_holds_the_adapter_alone_and_another_layout_continues two_ranks",
        "test_a_checkpoint_of_another_rank_is_refused one_process",
        "test_layers_that_the_model_lacks_are_refused one_process",
    )


def test_two_ranks_pass_the_probe_together_and_are_refused_together(engine_worlds, engine_models):
    (traceless, told), *others = engine_worlds(TWO).run(two_ranks.probe, engine_models["tied"])
    assert traceless
    assert told.endswith("computes values that are not finite: model.norm.weight holds some")
    assert [other for _, other in others] == [told]


def test_the_first_rank_never_holds_more_than_a_batch_of_full_tensors(engine_worlds, engine_models):
    whole, small, held = engine_worlds(TWO).run(two_ranks.export, engine_models["dense"])[0]
    assert list(small) == list(whole)
    assert_same(small, whole, 0.0)
    sizes = [tensor.nbytes for tensor in small.values()]
    assert max(sizes) <= held <= max(two_ranks.GATHER_BYTES + 64, max(sizes))
    assert 2 * held < sum(sizes)


def test_two_ranks_publish_what_one_publishes_while_they_train_on(engine_worlds, engine_models, tmp_path):
    """Each writes about half of a version, which is that of the moment at which it was exported."""
    (own, manifests, fetched, expected), (other, *nothing, _) = engine_worlds(TWO).run(
        two_ranks.publish, engine_models["tied"], tmp_path
    )
    assert nothing == [[], []]
    assert 0.4 * sum(own) < sum(other) < 2.5 * sum(own)
    for found, wanted in zip(fetched, expected, strict=True):
        assert list(found) == list(wanted)
        assert_same(found, wanted, 0.0)
    alone = engine_worlds(ONE).run(two_ranks.publish, engine_models["tied"], tmp_path)[0]
    for here, there in zip(alone[2], fetched, strict=True):
        assert list(here) == list(there)
        assert_same(here, there, 1e-4)
    assert manifests[0] != manifests[1]
    assert not list(tmp_path.iterdir())


def test_ranks_publish_the_base_once_and_then_adapters_alone(engine_worlds, engine_models, tmp_path):
    for layout in (ONE, TWO):
        (names, found, expected), *_ = engine_worlds(layout).run(
            two_ranks.publish_adapter, engine_models["tied"], tmp_path
        )
        assert names
        assert all(name.startswith("base_model.model.model.layers.") and ".lora_" in name for name in names)
        assert list(found) == list(expected)
        assert_same(found, expected, 1e-6)
    assert not list(tmp_path.iterdir())


def test_ranks_say_that_there_is_no_memory_for_a_version(engine_worlds, engine_models):
    first, second = engine_worlds(TWO).run(two_ranks.publish_without_memory, engine_models["tied"])
    assert first.startswith("no memory for ")
    assert second == "rank 0 has no memory for a version of the weights"


def test_checkpoints_are_written_in_a_group_with_the_deadline_of_all_others(engine_worlds, engine_models):
    """From the start on, and one that the next engine uses again."""
    assert engine_worlds(TWO).run(two_ranks.writers_group, engine_models["tied"]) == [(600.0, True)] * 2


@pytest.mark.parametrize("architecture", ["qwen3_moe", "olmo_hybrid", "gpt2"])
def test_a_part_of_every_tensor_is_on_each_rank(engine_worlds, tmp_path, architecture):
    """Rows, experts, and rows of tensors that are made of several stored ones."""
    folder = make_model(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = engine_worlds(TWO).run(two_ranks.load, folder)[0]
    assert_same(found, {name: parameter.detach() for name, parameter in model.named_parameters()}, 0.0)


def test_two_ranks_make_the_steps_of_muon_that_one_makes(engine_worlds, engine_models):
    """With embedding and output layer in groups of their own."""
    (before, found), _ = engine_worlds(TWO).run(two_ranks.step_with_muon, engine_models["dense"])
    ((_, expected),) = engine_worlds(ONE).run(two_ranks.step_with_muon, engine_models["dense"])
    assert_same(found, expected, 1e-3)
    assert max(float((found[name] - before[name]).abs().max()) for name in found) > 5e-3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_layers_give_the_same_where_ranks_divide_sequences(engine_worlds, engine_models):
    """And models, in half precision."""
    results = engine_worlds(SEQUENCES).run(compiled.step, engine_models["dense"])
    (plain, found, graphs), (*_, others) = results
    assert 0 < graphs == others
    assert_same(found, plain, 0.0)


def test_each_rank_continues_from_its_own_random_state(engine_worlds, engine_models, tmp_path):
    """Another number of ranks continues from the first one's, as all of them begin with the same."""
    first, second = engine_worlds(TWO).run(two_ranks.draw_and_save, engine_models["tied"], tmp_path)
    assert not torch.equal(first, second)
    found = engine_worlds(TWO).run(two_ranks.load_and_draw, engine_models["tied"], tmp_path)
    assert [drawn.tolist() for drawn in found] == [first.tolist(), second.tolist()]
    (alone,) = engine_worlds(ONE).run(two_ranks.load_and_draw, engine_models["tied"], tmp_path)
    assert torch.equal(alone, first)


def test_a_rank_without_rows_of_a_matrix_has_no_moments_in_8_bits_of_it(engine_worlds, engine_models, tmp_path):
    """The head of a value model is a single row."""
    (first, found, resumed), _ = engine_worlds(TWO).run(two_ranks.critic_in_8_bits, engine_models["tied"], tmp_path)
    assert_same(resumed, found, 0.0)
    ((expected, *_),) = engine_worlds(ONE).run(two_ranks.critic_in_8_bits, engine_models["tied"], tmp_path / "one")
    assert_same(first, expected)
    assert expected["value_head.weight"].any()


def test_a_checkpoint_of_two_ranks_is_put_together(engine_worlds, engine_models, tmp_path):
    """Without them, into the folder that they have exported."""
    engine_worlds(TWO).run(two_ranks.save_and_export, engine_models["tied"], tmp_path)
    with StoredModel(engine_models["tied"]) as stored:
        described = stored.describe()
        tensors = read_tensors(tmp_path / "checkpoint", described, torch.float32)
        write_folder(tmp_path / "out", stored, described, tensors, torch.float32)
    found, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "exported"))
    assert_same(found, exported, 0.0)
