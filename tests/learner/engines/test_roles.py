"""Several models in one process: they share ranks and process group and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import make_critic, make_engine, make_frozen, make_sequences
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import (
    critic_loss,
    log_probs,
    make_batches,
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


def test_a_frozen_role_is_not_trained(model_folder):
    frozen = make_frozen(model_folder)
    assert not frozen.trained
    with pytest.raises(ConfigError, match="without an optimizer"):
        train_step(frozen, seed=1)


def test_a_base_that_does_not_exist_any_more_is_refused(model_folder):
    with pytest.raises(ConfigError, match="has no adapter"):
        make_engine(model_folder).infer([], adapter=False)


def test_a_frozen_role_may_rest_in_host_memory(model_folder):
    batch = pack(make_sequences(1))
    expected = log_probs(make_frozen(model_folder), batch)
    offloaded = make_frozen(model_folder, offload=True)
    for _ in range(2):
        torch.testing.assert_close(log_probs(offloaded, batch), expected, atol=0, rtol=0)


def test_later_roles_do_not_touch_the_random_numbers(model_folder):
    actor = make_engine(model_folder, seed=3)
    state = torch.get_rng_state()
    others = [make_critic(model_folder, seed=4), make_frozen(model_folder, seed=5)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(other.layout == actor.layout for other in others)


def test_an_actor_trains_the_same_beside_others(model_folder):
    alone = make_engine(model_folder, optimizer=OptimizerSection(lr=1e-2, schedule="cosine", warmup_steps=2))
    together = roles(model_folder)
    for seed in (1, 2):
        train_step(alone, seed=seed)
        train_all(together, seed)
    assert_same(weights(together["actor"]), weights(alone), 0.0)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
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
    path = store.save(first, PolicyVersion(1, 1), {"cursor": 3})
    assert {p.name for p in path.iterdir() if p.is_dir()} == {"critic", "reward"}
    expected = train_all(first, 2)

    second = roles(model_folder)
    assert load_checkpoint(second, path) == {"cursor": 3, "incarnation": 1, "version": 1}
    assert train_all(second, 2) == expected
    found, wanted = trained_weights(second), trained_weights(first)
    for role, tensors in wanted.items():
        assert_same(found[role], tensors, 0.0)


def test_two_ranks_and_one_resume_the_critic_of_one_another(two_rank_results):
    """Written by two ranks next to the actor, read by one."""
    engines = {"actor": make_engine(two_rank_results.model), "critic": make_critic(two_rank_results.critic)}
    ((_, path),) = CheckpointStore(two_rank_results.checkpoints).list()
    assert load_checkpoint(engines, path)["cursor"] == 7
    assert_same(two_rank_results.tensors["critic"]["weights"], weights(engines["critic"]), 0.0)


def test_a_role_without_state_is_named_and_nothing_changes(model_folder, tmp_path):
    path = CheckpointStore(tmp_path).save({"actor": make_engine(model_folder)}, PolicyVersion(1, 1), {})
    engines = roles(model_folder)
    train_all(engines, 1)
    before = weights(engines["actor"])
    with pytest.raises(DataError, match="no state of critic, reward"):
        load_checkpoint(engines, path)
    assert_same(weights(engines["actor"]), before, 0.0)


def test_values_of_all_ranks_are_gathered_in_order(two_rank_results, model_folder):
    gathered = two_rank_results.tensors["gathered"]
    assert [part.tolist() for part in gathered["uneven"]] == [[], [1.0, 1.5]]
    assert [part.tolist() for part in gathered["nothing"]] == [[], []]
    assert [part.tolist() for part in gathered["flags"]] == [[True], [False, True]]
    (own,) = make_engine(model_folder).gather(torch.arange(3))
    assert own.tolist() == [0, 1, 2]


def test_the_entropy_is_differentiated_where_it_was_asked_for(model_folder):
    bonus = policy_loss(entropy_bonus=0.5)
    plain, without, differentiated = (
        make_engine(model_folder),
        make_engine(model_folder),
        make_engine(model_folder, entropy_gradient=True),
    )
    results = [train_step(plain, seed=1), train_step(without, seed=1, loss=bonus)]
    results.append(train_step(differentiated, seed=1, loss=bonus))
    assert_same(weights(without), weights(plain), 0.0)
    assert results[2].metrics["loss"] == pytest.approx(results[1].metrics["loss"])
    assert results[2].metrics["grad_norm"] != pytest.approx(results[0].metrics["grad_norm"], rel=1e-3)
    # A bonus moves the policy to a higher entropy than it would reach without.
    batches = make_batches(plain, seed=1)
    entropies = [
        float(torch.cat([output.policy()[1] for output in engine.infer(batches)]).mean())
        for engine in (plain, differentiated)
    ]
    assert entropies[1] > entropies[0]
