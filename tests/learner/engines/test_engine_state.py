"""State that an engine keeps and hands out: checkpoints at another world size, weights, Hugging Face folders."""

from __future__ import annotations

from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.engines.fsdp2.optimizer_state import saved_state
from rollmesh.learner.engines.tensors.state import StateWriter, load_state
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import make_engine, make_model
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import make_batches, policy_loss, train_step, weights

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "keys",
    [{"state_dtype": "bfloat16", "weight_decay": 0.1}, {"state_dtype": "8bit"}, {"name": "muon"}],
)
def test_resume_continues_exactly(model_folder, tmp_path, keys):
    store = CheckpointStore(tmp_path)
    optimizer = OptimizerSection(lr=1e-2, **keys)
    first = make_engine(model_folder, optimizer=optimizer)
    train_step(first, seed=1)
    path = store.begin({"actor": first}, PolicyVersion(1, 1), {"cursor": {"epoch": 3}}).result(240)
    expected = train_step(first, seed=2)

    second = make_engine(model_folder, optimizer=optimizer)
    extra = load_checkpoint({"actor": second}, path)
    assert extra == {"cursor": {"epoch": 3}, "incarnation": 1, "version": 1}
    assert _dtypes(second) == _dtypes(first)
    assert train_step(second, seed=2) == expected
    assert_same(weights(second), weights(first), 0.0)


def test_what_rests_between_calls_returns_to_the_host_after_a_call_that_ends_early(model_folder):
    engine = make_engine(model_folder)
    engine.rest_between_calls(params=True)
    engine.offload()
    shards = engine.exported_shards()
    next(shards)
    assert not engine.resting_bytes["params"]
    shards.close()
    assert engine.resting_bytes["params"]


def test_an_engine_that_rests_in_files_keeps_no_copy_of_a_checkpoint(model_folder, tmp_path):
    engine = make_engine(model_folder, rest_folder=tmp_path / "resting")
    for number in (1, 2):
        train_step(engine, seed=number)
        (folder := tmp_path / str(number)).mkdir()
        engine.begin_checkpoint(folder, {}).result(240)
        assert engine._writer._stager is None
    expected = weights(engine)
    train_step(engine, seed=3)
    engine.load_checkpoint(folder)
    assert_same(weights(engine), expected, 0.0)


def _dtypes(engine):
    return {value.dtype for state in engine._optimizer.state.values() for value in state.values()}


@pytest.mark.parametrize("keys", [{}, {"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"name": "muon"}])
def test_settings_are_those_of_the_configuration(model_folder, tmp_path, keys):
    """A checkpoint has none, whatever the groups are."""
    first, second = (
        make_engine(model_folder, optimizer=OptimizerSection(lr=1e-2, weight_decay=decay, **keys))
        for decay in (0.1, 0.3)
    )
    train_step(first, seed=1)
    path = CheckpointStore(tmp_path).begin({"actor": first}, PolicyVersion(1, 1), {}).result(240)
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    parameters = [name for name, _ in first._runner.named_tensors()]
    moments = {name.removeprefix("optimizer.state.") for name in names if name.startswith("optimizer.")}
    assert {name.rpartition(".")[0] for name in moments} == set(parameters)
    assert {name for name in names if not name.startswith(("optimizer.state.", "random."))} == {
        f"model.{name}" for name in parameters
    }
    before = [{**group, "params": len(group["params"])} for group in second._optimizer.param_groups]
    load_checkpoint({"actor": second}, path)
    assert [{**group, "params": len(group["params"])} for group in second._optimizer.param_groups] == before
    assert {group["weight_decay"] for group in before} == {0.3, 0.0}
    assert_same(weights(second), weights(first), 0.0)


@pytest.mark.parametrize("keys", [{"state_dtype": "bfloat16"}, {"state_dtype": "8bit"}, {"name": "muon"}])
def test_a_checkpoint_before_the_first_step_changes_nothing(model_folder, tmp_path, keys):
    """Neither for the engine that wrote it nor for the one that continues from it. The optimizer has taken no step,
    by its own count too.
    """
    optimizer = OptimizerSection(lr=1e-2, **keys)
    untouched, saved, resumed = (make_engine(model_folder, optimizer=optimizer) for _ in range(3))
    path = CheckpointStore(tmp_path).begin({"actor": saved}, PolicyVersion(1, 0), {}).result(240)
    load_checkpoint({"actor": resumed}, path)
    for engine in (untouched, saved, resumed):
        train_step(engine, seed=1)
    assert_same(weights(saved), weights(untouched), 0.0)
    assert_same(weights(resumed), weights(untouched), 0.0)


def test_each_part_rests_by_a_switch_of_its_own(model_folder):
    batches = make_batches(make_engine(model_folder), seed=1)
    for number, key in enumerate(("offload_params", "offload_gradients", "offload_optimizer")):
        engine = make_engine(model_folder, memory=MemorySection(**{key: True}))
        for _ in range(2):
            engine.accumulate(batches, policy_loss(), engine.global_counts(batches))
            engine.apply()
        engine.accumulate(batches, policy_loss(), engine.global_counts(batches))
        parameters, moments = engine._runner.parameters, engine._optimizer.state
        parts = (parameters, [p.grad for p in parameters], [moments[p]["exp_avg"] for p in parameters])
        resting = [{tensor.untyped_storage().nbytes() == 0 for tensor in part} for part in parts]
        assert resting == [{number == place} for place in range(3)]


def test_a_parameter_that_has_had_no_gradient_yet_is_resumed(tmp_path):
    """An expert without a token, say: its moments begin with its first gradient."""
    world = World("cpu", need_group=False)

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

    def state(experts: torch.nn.ModuleList, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return saved_state(experts.named_parameters(), optimizer)

    StateWriter(world).begin(tmp_path, state(*saved), 1, {}).result(180)
    load_state(tmp_path, world, state(*resumed))
    for experts, optimizer in (untouched, saved, resumed):
        for used in (1, 0):
            step(experts, optimizer, used)
        assert_same(experts.state_dict(), untouched[0].state_dict(), 0.0)


def test_sharded_bfloat16_folder_loads(tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    engine = make_engine(tmp_path / "sharded")
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    assert_same(weights(engine), state, 0.0)


@pytest.mark.parametrize(
    ("path", "message"), [("./nowhere", "no such folder"), ("some-org/no-such-model-offline", "from the hub")]
)
def test_a_missing_model_is_named(path, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=message):
        make_engine(path)


def test_a_folder_without_configuration_is_named(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"config\.json"):
        make_engine(tmp_path)


def test_a_model_that_cannot_make_another_pass_says_so(model_folder, monkeypatch):
    engine = make_engine(model_folder)
    batches = make_batches(engine, seed=1)
    counts = engine.global_counts(batches)

    def broken(*_):
        raise ArithmeticError("of the user")

    monkeypatch.setattr("rollmesh.learner.engines.fsdp2.step.recover", lambda _: False)
    engine.accumulate(batches, policy_loss(), counts)
    engine.discard()
    with pytest.raises(ArithmeticError):
        engine.accumulate(batches, broken, counts)
    engine.discard()
    with pytest.raises(ConfigError, match="has broken off, and torch before"):
        engine.accumulate(batches, policy_loss(), counts)
