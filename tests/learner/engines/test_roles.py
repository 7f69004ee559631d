"""Several models in one process: they share ranks and process group and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import make_critic, make_engine, make_frozen, make_sequences
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import (
    critic_loss,
    log_probs,
    policy_loss,
    train_step,
    weights,
)

torch.set_num_threads(1)


def roles(folder):
    optimizer = OptimizerSection(lr=1e-2, schedule="cosine", warmup_steps=2)
    return {
        "reference": make_frozen(folder),
        "actor": make_engine(folder, optimizer=optimizer),
        "critic": make_critic(folder, optimizer=optimizer),
        "reward": make_engine(folder),
    }


def train_all(engines, seed: int):
    losses = {"actor": policy_loss(), "critic": critic_loss, "reward": policy_loss("token_sum")}
    return {role: train_step(engines[role], seed=seed, loss=loss) for role, loss in losses.items()}


def trained_weights(engines):
    return {role: weights(engine) for role, engine in engines.items() if engine.trained}


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_frozen_role_stays_where_the_actor_began(model_folder, param_dtype):
    actor, frozen = (
        make_engine(model_folder, param_dtype=param_dtype),
        make_frozen(model_folder, param_dtype=param_dtype),
    )
    try:
        batch = pack(make_sequences(1))
        before = log_probs(frozen, batch)
        torch.testing.assert_close(before, log_probs(actor, batch), atol=0, rtol=0)
        train_step(actor, seed=1)
        assert float((log_probs(actor, batch) - before).abs().max()) > 1e-3
        torch.testing.assert_close(log_probs(frozen, batch), before, atol=0, rtol=0)
    finally:
        actor.close()
        frozen.close()


# Each is the first, the second and the last once.
@pytest.mark.parametrize("order", [(0, 1, 2), pytest.param((1, 2, 0), marks=pytest.mark.exhaustive), (2, 0, 1)])
def test_the_process_group_ends_with_the_last_engine_in_any_order(model_folder, order):
    had_group = dist.is_initialized()
    engines = [
        make_engine(model_folder, param_dtype="bfloat16"),
        make_critic(model_folder, param_dtype="bfloat16"),
        make_frozen(model_folder, param_dtype="bfloat16"),
    ]
    batch = pack(make_sequences(1))
    left = list(range(3))
    for index in order:
        assert dist.is_initialized()
        assert engines[left[-1]].infer([batch])
        engines[index].close()
        engines[index].close()
        left.remove(index)
    assert dist.is_initialized() == had_group


def test_actor_and_critic_resume_exactly(model_folder, tmp_path):
    store = CheckpointStore(tmp_path)
    first = roles(model_folder)
    train_all(first, 1)
    path = store.begin(first, PolicyVersion(1, 1), {"cursor": 3}).result(240)
    assert {p.name for p in path.iterdir() if p.is_dir()} == {"critic", "reward"}
    expected = train_all(first, 2)

    second = roles(model_folder)
    assert load_checkpoint(second, path) == {"cursor": 3, "incarnation": 1, "version": 1}
    assert train_all(second, 2) == expected
    found, wanted = trained_weights(second), trained_weights(first)
    for role, tensors in wanted.items():
        assert_same(found[role], tensors, 0.0)


def test_a_role_without_state_is_named_and_nothing_changes(model_folder, tmp_path):
    path = CheckpointStore(tmp_path).begin({"actor": make_engine(model_folder)}, PolicyVersion(1, 1), {}).result(240)
    engines = roles(model_folder)
    train_all(engines, 1)
    before = weights(engines["actor"])
    with pytest.raises(DataError, match="no state of critic, reward"):
        load_checkpoint(engines, path)
    assert_same(weights(engines["actor"]), before, 0.0)


@pytest.mark.parametrize("make", [make_frozen, make_engine])
def test_between_its_calls_a_role_keeps_no_gathered_weights(model_folder, make):
    """One that is not trained keeps none of a layer after that layer either: no backward pass will use them."""
    engine = make(model_folder, param_dtype="bfloat16", memory=MemorySection(reshard_after_forward=False))
    groups = [
        group
        for module in engine._runner.module.modules()
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None
    ]
    most = []
    handle = engine._runner.transformer.base_model.norm.register_forward_hook(
        lambda *_: most.append(sum(group.is_unsharded for group in groups))
    )
    engine.infer([pack(make_sequences(seed)) for seed in (1, 2)])
    handle.remove()
    assert most == [1, 1] if make is make_frozen else most == [len(groups)] * 2
    assert not any(group.is_unsharded for group in groups)
    engine.close()
