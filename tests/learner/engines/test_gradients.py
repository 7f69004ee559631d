"""The gradient depends on the batch alone: not on micro-batches, shared prompts, recomputation or ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from rollmesh.learner.algorithms.aggregation import AGGREGATIONS
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.fsdp2.sharding import plain_name
from rollmesh.mesh.config.learner import MemorySection
from tests.learner.engines.models import ARCHITECTURES, make_engine, make_model, make_sequences
from tests.learner.engines.training import gradients, make_batches, policy_loss, take_step, train_step, weights

torch.set_num_threads(1)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_do_not_change_the_gradient(model_folder, aggregation):
    found = []
    for budget in (1 << 20, 64, 1):
        engine = make_engine(model_folder)
        result = train_step(engine, seed=1, token_budget=budget, loss=policy_loss(aggregation))
        found.append((gradients(engine), result.metrics))
    for gradient, metrics in found[1:]:
        assert_same(gradient, found[0][0])
        assert metrics == pytest.approx(found[0][1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma2", "gpt2", "qwen3_moe"])
def test_shared_prompts_do_not_change_the_gradient(tmp_path, architecture):
    """Against autograd through plain forward passes, one sequence at a time."""
    folder = make_model(tmp_path / "model", architecture)
    sequences = make_sequences(3, groups=3)
    packed = make_engine(folder)
    train_step(packed, seed=0, sequences=sequences, token_budget=1 << 20)
    alone = make_engine(folder)
    apart = [pack([sequence]) for sequence in sequences]
    take_step(alone, apart, policy_loss())
    assert_same(gradients(packed), gradients(alone))
    assert architecture in ARCHITECTURES


@pytest.mark.parametrize(("recompute", "offload"), [(True, False), (True, True), ("selective", False)])
def test_recomputed_activations_give_the_same_gradient_and_names(model_folder, recompute, offload):
    plain = make_engine(model_folder)
    memory = MemorySection(offload_activations=offload)
    recomputing = make_engine(model_folder, activation_checkpointing=recompute, memory=memory)
    for engine in (plain, recomputing):
        train_step(engine, seed=1)
    assert_same({plain_name(name): g for name, g in gradients(recomputing).items()}, gradients(plain))
    assert weights(recomputing).keys() == weights(plain).keys()


class _Products(TorchDispatchMode):
    """Counts the products of matrices, attention's too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        name = operation.name()
        self.count += name.startswith(("aten::mm", "aten::addmm", "aten::bmm")) or "attention" in name
        return operation(*arguments, **(keywords or {}))


def test_selective_recomputation_computes_no_product_again(model_folder):
    counts = {}
    for recompute in (False, "selective", True):
        engine = make_engine(model_folder, activation_checkpointing=recompute)
        with _Products() as products:
            train_step(engine, seed=1)
        counts[recompute] = products.count
    assert counts[False] == counts["selective"] < counts[True]


def test_the_vocabulary_is_gathered_apart_from_the_layers_unless_it_is_tied(model_folder, tmp_path):
    tied = make_engine(model_folder, param_dtype="bfloat16")
    untied = make_engine(make_model(tmp_path / "llama", "llama"), param_dtype="bfloat16")
    for engine, apart in ((tied, False), (untied, True)):
        model = engine._model
        assert [isinstance(module, FSDPModule) for module in (model.model.embed_tokens, model.lm_head)] == [apart] * 2
        engine.close()


def test_two_ranks_give_the_gradient_of_one(two_rank_results):
    engine = make_engine(two_rank_results.model)
    result = train_step(engine, seed=1)
    assert_same(two_rank_results.tensors["gradients"], gradients(engine))
    assert two_rank_results.figures["metrics"] == pytest.approx(result.metrics, rel=1e-4, abs=1e-5)
    # With more micro-batches, after a step that was given up in the middle.
    assert_same(two_rank_results.tensors["synchronized_once"], gradients(engine))
    train_step(engine, seed=2, groups=3, token_budget=16)
    assert_same(two_rank_results.tensors["uneven"], gradients(engine), 1e-3)
    train_step(engine, seed=3, groups=1, token_budget=1 << 20)
    assert_same(two_rank_results.tensors["idle_rank"], gradients(engine), 1e-2)


def test_a_gradient_may_be_accumulated_in_parts_and_given_up(model_folder):
    whole, parts = make_engine(model_folder), make_engine(model_folder)
    expected = train_step(whole, seed=1, token_budget=16)
    batches = make_batches(parts, seed=1, token_budget=16)
    counts = parts.global_counts(batches)
    before = weights(parts)
    for _ in range(2):
        for batch in batches:
            parts.accumulate([batch], policy_loss(), counts)
        parts.discard()
        assert_same(weights(parts), before, 0.0)
    for batch in batches:
        parts.accumulate([batch], policy_loss(), counts)
    assert parts.apply() == expected
    assert_same(weights(parts), weights(whole), 0.0)
    with pytest.raises(RuntimeError, match="no gradient"):
        parts.apply()


def test_a_gradient_that_is_not_finite_changes_nothing(model_folder):
    engine = make_engine(model_folder)
    before = weights(engine)
    batch = pack(make_sequences(1))

    def broken(output, tokens, counts: GlobalCounts) -> LossOutput:
        result = policy_loss()(output, tokens, counts)
        return dataclasses.replace(result, loss=result.loss * float("nan"))

    result = take_step(engine, [batch], broken)
    assert result.skipped
    assert_same(weights(engine), before, 0.0)
    assert not train_step(engine, seed=1).skipped


def test_a_batch_without_trained_tokens_changes_nothing_and_is_no_failure(model_folder):
    # Resampling may leave a minibatch without a sequence.
    engine = make_engine(model_folder)
    train_step(engine, seed=1)
    before = weights(engine)
    result = train_step(engine, seed=2, sequences=[])
    assert not result.skipped
    assert result.metrics == {}
    assert_same(weights(engine), before, 0.0)


def test_leaving_silent_sequences_out_changes_nothing(model_folder):
    sequences = make_sequences(1, groups=4)
    sequences = [dataclasses.replace(s, advantages=0.0) if i % 3 else s for i, s in enumerate(sequences)]
    sequences[:3] = [dataclasses.replace(s, advantages=0.0) for s in sequences[:3]]
    engines, losses = [], []
    for leave_out in (False, True):
        engine = make_engine(model_folder)
        batch = pack(sequences, leave_out_silent=leave_out)
        losses.append(take_step(engine, [batch], policy_loss()).metrics["loss"])
        engines.append(engine)
    assert pack(sequences, leave_out_silent=True).num_tokens < pack(sequences).num_tokens / 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_same(gradients(engines[1]), gradients(engines[0]))


def test_a_batch_without_any_advantage_steps_with_a_gradient_of_zero(model_folder):
    stepped = []
    for leave_out in (False, True):
        engine = make_engine(model_folder)
        train_step(engine, seed=1)
        batch = pack([dataclasses.replace(s, advantages=0.0) for s in make_sequences(2)], leave_out_silent=leave_out)
        result = take_step(engine, [batch], policy_loss())
        assert not result.skipped
        assert result.metrics["grad_norm"] == 0.0
        stepped.append(weights(engine))
    assert_same(stepped[1], stepped[0])
