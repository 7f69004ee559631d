"""The gradient depends on the batch alone: not on micro-batches, shared prompts, recomputation or ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.fsdp2.preparation.recomputation import plain_name
from rollmesh.mesh.config.learner import MemorySection
from tests.learner.engines.models import ARCHITECTURES, make_engine, make_model, make_sequences
from tests.learner.engines.training import gradients, policy_loss, take_step, train_step, weights

torch.set_num_threads(1)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


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
        model = engine._runner.module
        assert [isinstance(module, FSDPModule) for module in (model.model.embed_tokens, model.lm_head)] == [apart] * 2
        engine.close()


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
