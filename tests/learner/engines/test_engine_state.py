"""State that an engine keeps and hands out: checkpoints at another world size, weights, Hugging Face folders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import LossOutput
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.engines.fsdp2.state import load_state, save_state
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import EXPORT_GATHER_BYTES, make_engine, make_model, make_sequences
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import log_probs, make_batches, policy_loss, take_step, train_step, weights

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "keys",
    [{"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}, {"state_dtype": "bfloat16"}, {"name": "muon"}],
)
def test_resume_continues_exactly(model_folder, tmp_path, keys):
    store = CheckpointStore(tmp_path)
    optimizer = OptimizerSection(lr=1e-2, **keys)
    first = make_engine(model_folder, optimizer=optimizer)
    train_step(first, seed=1)
    path = store.save({"actor": first}, PolicyVersion(1, 1), {"cursor": {"epoch": 3}})
    expected = train_step(first, seed=2)

    second = make_engine(model_folder, optimizer=optimizer)
    extra = load_checkpoint({"actor": second}, path)
    assert extra == {"cursor": {"epoch": 3}, "incarnation": 1, "version": 1}
    assert train_step(second, seed=2) == expected
    assert_same(weights(second), weights(first), 0.0)


@pytest.mark.parametrize("keys", [{}, {"state_dtype": "bfloat16"}, {"name": "muon"}])
def test_a_checkpoint_before_the_first_step_changes_nothing(model_folder, tmp_path, keys):
    """Neither for the engine that wrote it nor for the one that continues from it. The optimizer has taken no step,
    by its own count too.
    """
    optimizer = OptimizerSection(lr=1e-2, **keys)
    untouched, saved, resumed = (make_engine(model_folder, optimizer=optimizer) for _ in range(3))
    path = CheckpointStore(tmp_path).save({"actor": saved}, PolicyVersion(1, 0), {})
    load_checkpoint({"actor": resumed}, path)
    for engine in (untouched, saved, resumed):
        train_step(engine, seed=1)
    assert_same(weights(saved), weights(untouched), 0.0)
    assert_same(weights(resumed), weights(untouched), 0.0)


def not_finite(output, tokens, counts):
    """A loss whose gradient no optimizer may follow."""
    return LossOutput(policy_loss()(output, tokens, counts).loss * float("inf"), Metrics())


def test_gradients_that_no_step_has_used_have_no_part_in_a_checkpoint(model_folder, tmp_path):
    """A first step that was not finite, and a first claim that was refused, leave gradients and no moments."""
    untouched = make_engine(model_folder)
    train_step(untouched, seed=2)
    for name in ("not_finite", "refused"):
        saved, resumed = (make_engine(model_folder) for _ in range(2))
        batches = make_batches(saved, seed=1)
        if name == "not_finite":
            assert take_step(saved, batches, not_finite).skipped
        else:
            saved.accumulate(batches, policy_loss(), saved.global_counts(batches))
            saved.discard()
        path = CheckpointStore(tmp_path / name).save({"actor": saved}, PolicyVersion(1, 0), {})
        load_checkpoint({"actor": resumed}, path)
        for engine in (saved, resumed):
            train_step(engine, seed=2)
            assert_same(weights(engine), weights(untouched), 0.0)


def test_a_parameter_that_has_had_no_gradient_yet_is_resumed(tmp_path):
    """An expert without a token, say: its moments begin with its first gradient."""
    world: Any = SimpleNamespace(process=0, processes=1, barrier=lambda: None)

    def make() -> tuple[torch.nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(0)
        experts = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))
        return experts, torch.optim.AdamW(experts.parameters(), lr=0.1, fused=True)

    def step(experts: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, used: int) -> None:
        optimizer.zero_grad()
        experts[used](torch.ones(4)).sum().backward()
        optimizer.step()

    untouched, saved, resumed = make(), make(), make()
    for experts, optimizer in (untouched, saved):
        step(experts, optimizer, 0)
    save_state(tmp_path, world, *saved, 1, {})
    load_state(tmp_path, world, *resumed)
    for experts, optimizer in (untouched, saved, resumed):
        for used in (1, 0):
            step(experts, optimizer, used)
        assert_same(experts.state_dict(), untouched[0].state_dict(), 0.0)


def test_two_ranks_resume_what_one_wrote(two_rank_results):
    engine = make_engine(two_rank_results.model)
    assert engine.load_checkpoint(two_rank_results.checkpoint)["cursor"] == 11
    assert two_rank_results.figures["extra"]["cursor"] == 11
    train_step(engine, seed=5)
    assert_same(two_rank_results.tensors["resumed"], weights(engine), 1e-3)


def test_one_rank_resumes_what_two_wrote(two_rank_results):
    engine = make_engine(two_rank_results.model)
    ((version, path),) = CheckpointStore(two_rank_results.checkpoints).list()
    assert version == PolicyVersion(1, 3)
    assert engine.load_checkpoint(path)["cursor"] == 7
    train_step(engine, seed=4)
    assert_same(two_rank_results.tensors["after_checkpoint"], weights(engine), 1e-3)


def test_a_folder_that_is_no_checkpoint_is_refused(model_folder, tmp_path):
    with pytest.raises(DataError, match="cannot load checkpoint"):
        make_engine(model_folder).load_checkpoint(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(model_folder, tmp_path):
    path = CheckpointStore(tmp_path / "c").save({"actor": make_engine(model_folder)}, PolicyVersion(1, 0), {})
    other = make_engine(make_model(tmp_path / "gpt2", "gpt2"))
    with pytest.raises(DataError, match="cannot load checkpoint"):
        other.load_checkpoint(path)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_exported_folder_gives_the_same_log_probs(tmp_path, architecture):
    engine = make_engine(make_model(tmp_path / "model", architecture))
    train_step(engine, seed=1)
    engine.export_hf(tmp_path / "exported")
    again = make_engine(tmp_path / "exported")
    batch = pack(make_sequences(2))
    torch.testing.assert_close(log_probs(again, batch), log_probs(engine, batch), atol=1e-6, rtol=0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.architectures


def test_weights_carry_the_models_names_once_in_wire_dtype(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    engine = make_engine(folder, model=ModelSection(path=str(folder), dtype="bfloat16"))
    exported = dict(engine.export_weights())
    model = AutoModelForCausalLM.from_pretrained(folder)
    # Tied embeddings travel once.
    assert exported.keys() == dict(model.named_parameters()).keys()
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    missing, unexpected = model.load_state_dict(exported, strict=False)
    assert unexpected == []
    assert missing in ([], ["lm_head.weight"])


def test_the_size_of_a_gathered_batch_changes_nothing(two_rank_results):
    small, large = (two_rank_results.tensors[name] for name in ("in_small_batches", "resumed"))
    assert list(small) == list(large)
    assert_same(small, large, 0.0)


def test_the_first_rank_never_holds_more_than_a_batch_of_full_tensors(two_rank_results):
    sizes = [tensor.nbytes for tensor in two_rank_results.tensors["in_small_batches"].values()]
    held = two_rank_results.figures["held_bytes"]
    assert max(sizes) <= held <= max(EXPORT_GATHER_BYTES + 64, max(sizes))
    assert 2 * held < sum(sizes)


def test_sharded_bfloat16_folder_loads(tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    engine = make_engine(tmp_path / "sharded")
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    assert_same(weights(engine), state, 0.0)


@pytest.mark.parametrize(
    ("path", "message"), [("./nowhere", "does not exist"), ("some-org/no-such-model-offline", "from the hub")]
)
def test_a_missing_model_is_named(path, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=message):
        make_engine(path)


def test_a_folder_without_configuration_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"config\.json"):
        make_engine(tmp_path)


def test_bfloat16_compute_keeps_float32_masters(model_folder):
    engine = make_engine(model_folder, param_dtype="bfloat16")
    try:
        batch = pack(make_sequences(1))
        exact, rounded = log_probs(make_engine(model_folder), batch), log_probs(engine, batch)
        assert 0 < float((exact - rounded).abs().max()) < 0.5
        train_step(engine, seed=1)
        assert {tensor.dtype for tensor in weights(engine).values()} == {torch.float32}
    finally:
        engine.close()
