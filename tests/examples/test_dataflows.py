"""The dataflow of `examples/dataflows`, stepped by hand on a batch in memory; and the example of distillation."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.dataflows.rejection_sampling import RejectionSampling, RejectionSamplingSettings, choose_best
from rollmesh.learner.algorithms.types import Group, Rollouts, UpdatePlan
from rollmesh.learner.builders import build_algorithm
from rollmesh.mesh.config import load_config
from tests.examples.batches import MemoryBatch, output, train_step
from tests.repository import REPOSITORY

DATAFLOWS = REPOSITORY / "examples" / "dataflows"
LENGTHS = torch.tensor([3, 2, 0, 4])


def rollouts(behaviour: Tensor, rewards: Tensor | None = None) -> Rollouts:
    return Rollouts(
        group_ids=torch.tensor([0, 1, 0, 1]),
        rewards=torch.zeros(4, dtype=behaviour.dtype) if rewards is None else rewards,
        lengths=LENGTHS,
        behaviour_log_probs=behaviour,
        staleness=torch.zeros(len(behaviour), dtype=torch.int32),
        truncated=torch.zeros(4, dtype=torch.bool),
    )


def memory_batch(seed: int, rewards: Tensor | None = None) -> MemoryBatch:
    rng = torch.Generator().manual_seed(seed)
    tokens, vocabulary = int(LENGTHS.sum()), 7
    logits = torch.randn(tokens, vocabulary, generator=rng, dtype=torch.float64)
    actions = torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1)
    behaviour = output(logits, actions).log_probs
    assert behaviour is not None
    return MemoryBatch(rollouts(behaviour, rewards), {"actor": logits}, actions)


def group(rewards: list[float], scored: list[bool]) -> Group:
    size = len(rewards)
    return Group(
        rewards=torch.tensor(rewards),
        scored=torch.tensor(scored),
        lengths=torch.ones(size, dtype=torch.int64),
        truncated=torch.zeros(size, dtype=torch.bool),
    )


def test_a_group_without_a_right_response_is_dropped_with_the_reason() -> None:
    algorithm = RejectionSampling(RejectionSamplingSettings(), UpdatePlan())
    assert algorithm.group_stage(group([0.0, 0.5], [True, True])) == "no_right_response"
    assert algorithm.group_stage(group([0.0, 1.0], [True, False])) == "no_right_response"
    assert algorithm.group_stage(group([0.0, 1.0], [True, True])) is None


def test_the_first_of_the_best_is_chosen() -> None:
    batch = memory_batch(5, torch.tensor([1.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    assert choose_best(batch.rollouts).tolist() == [True, False, False, True]


def test_rejection_sampling_raises_the_likelihood_of_the_chosen_alone() -> None:
    algorithm = RejectionSampling(RejectionSamplingSettings(), UpdatePlan())
    batch = memory_batch(6, torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    before = batch.infer("actor").log_probs
    after = output(train_step(algorithm, batch, 1.0), batch.actions).log_probs
    assert before is not None
    assert after is not None
    chosen = torch.tensor([True] * 3 + [False] * 2 + [True] * 4)
    assert (after[chosen] > before[chosen]).all()
    assert torch.equal(after[~chosen], before[~chosen])
    assert batch.reported["rejection_sampling/chosen"] == 2.0


def test_an_empty_batch_is_no_error() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    empty = Rollouts(
        group_ids=torch.zeros(0, dtype=torch.int64),
        rewards=nothing,
        lengths=torch.zeros(0, dtype=torch.int64),
        behaviour_log_probs=nothing,
        staleness=torch.zeros(0, dtype=torch.int32),
        truncated=torch.zeros(0, dtype=torch.bool),
    )
    batch = MemoryBatch(empty, {"actor": torch.zeros(0, 7, dtype=torch.float64)}, torch.zeros(0, dtype=torch.int64))
    algorithm = RejectionSampling(RejectionSamplingSettings(), UpdatePlan())
    assert train_step(algorithm, batch, 1.0).shape == (0, 7)


def test_the_configuration_is_valid_and_names_the_file() -> None:
    config = load_config(DATAFLOWS / "rejection_sampling.yaml")
    file, _, attribute = config.algorithm.name.rpartition(":")
    assert DATAFLOWS.parents[1] / file == DATAFLOWS / "rejection_sampling.py"
    assert attribute in (DATAFLOWS / "rejection_sampling.py").read_text()


def test_the_configuration_of_the_distillation_names_a_model_for_its_teacher() -> None:
    config = load_config(REPOSITORY / "examples" / "distillation" / "distillation.yaml")
    (teacher,) = build_algorithm(config).needs.roles
    assert config.learner.roles[teacher.name].path is not None
