"""The dataflows of `examples/dataflows`, stepped by hand on a batch in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from examples.dataflows.distillation import Distillation, DistillationSettings
from examples.dataflows.rejection_sampling import RejectionSampling, RejectionSamplingSettings, choose_best
from rollmesh.learner.algorithms.correction import CorrectionSettings
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import Group, Rollouts, UpdatePlan
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
    logits = {
        role: torch.randn(tokens, vocabulary, generator=rng, dtype=torch.float64) for role in ("actor", "teacher")
    }
    actions = torch.multinomial(logits["actor"].softmax(-1), 1, generator=rng).squeeze(1)
    behaviour = output(logits["actor"], actions).log_probs
    assert behaviour is not None
    return MemoryBatch(rollouts(behaviour, rewards), logits, actions)


def test_distillation_follows_the_teacher_token_by_token() -> None:
    algorithm = Distillation(DistillationSettings(), UpdatePlan())
    assert [(role.name, role.kind, role.trained) for role in algorithm.needs.roles] == [
        ("teacher", "language_model", False)
    ]
    batch = memory_batch(0)
    before = batch.infer("actor").log_probs
    teacher = batch.infer("teacher").log_probs
    assert before is not None
    assert teacher is not None
    after = output(train_step(algorithm, batch, 0.5), batch.actions).log_probs
    assert after is not None
    assert torch.equal(torch.sign(after - before), torch.sign(teacher - before))
    assert batch.reported["distillation/reverse_kl"] == pytest.approx(float((before - teacher).mean()))


def test_several_teachers_judge_by_their_weights() -> None:
    algorithm = Distillation(DistillationSettings(teachers={"teacher": 3.0, "other": 1.0}), UpdatePlan())
    assert [role.name for role in algorithm.needs.roles] == ["teacher", "other"]
    batch = memory_batch(0)
    batch.logits["other"] = torch.randn(batch.logits["actor"].shape, dtype=torch.float64)
    algorithm.batch_stage(batch)
    student, teacher, other = (batch.infer(role).log_probs for role in ("actor", "teacher", "other"))
    assert student is not None
    assert teacher is not None
    assert other is not None
    assert batch.rollouts.advantages is not None
    torch.testing.assert_close(batch.rollouts.advantages, 0.75 * teacher + 0.25 * other - student)
    with pytest.raises(SettingsError, match="weights above 0"):
        DistillationSettings(teachers={})


def test_distillation_brings_the_student_to_the_teacher() -> None:
    algorithm = Distillation(DistillationSettings(), UpdatePlan())
    batch = memory_batch(1)
    rng = torch.Generator().manual_seed(2)

    def gap(logits: Tensor) -> float:
        student, teacher = logits.log_softmax(-1), batch.logits["teacher"].log_softmax(-1)
        return float((student.exp() * (student - teacher)).sum(-1).mean())

    logits = batch.logits["actor"]
    start = gap(logits)
    for _ in range(300):
        actions = torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(1)
        behaviour = output(logits, actions).log_probs
        assert behaviour is not None
        step = MemoryBatch(rollouts(behaviour), {"actor": logits, "teacher": batch.logits["teacher"]}, actions)
        logits = train_step(algorithm, step, 0.5)
    assert gap(logits) < 0.3 * start


def test_distillation_weighs_what_an_older_student_sampled() -> None:
    batch = memory_batch(3)
    batch.rollouts.behaviour_log_probs = batch.rollouts.behaviour_log_probs - 5.0
    Distillation(DistillationSettings(correction=CorrectionSettings(cap=1.5)), UpdatePlan()).batch_stage(batch)
    weights = batch.rollouts.importance_weights
    assert weights is not None
    assert torch.equal(weights, torch.full_like(weights, 1.5))


def test_distillation_of_stale_data_is_corrected_or_refused() -> None:
    uncorrected = DistillationSettings(correction=CorrectionSettings(mode="none"))
    with pytest.raises(SettingsError, match="corrects for nothing"):
        Distillation(uncorrected, UpdatePlan(max_staleness=2))
    Distillation(uncorrected, UpdatePlan(max_staleness=0))


def test_discounted_distillation_gives_earlier_tokens_the_later_judgements() -> None:
    batch = memory_batch(4)
    Distillation(DistillationSettings(discount=1.0), UpdatePlan()).batch_stage(batch)
    student, teacher = batch.infer("actor").log_probs, batch.infer("teacher").log_probs
    assert student is not None
    assert teacher is not None
    assert batch.rollouts.advantages is not None
    assert float(batch.rollouts.advantages[0]) == pytest.approx(float((teacher - student)[:3].sum()))


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


@pytest.mark.parametrize("name", ["distillation", "rejection_sampling"])
def test_an_empty_batch_is_no_error(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    empty = Rollouts(
        group_ids=torch.zeros(0, dtype=torch.int64),
        rewards=nothing,
        lengths=torch.zeros(0, dtype=torch.int64),
        behaviour_log_probs=nothing,
        staleness=torch.zeros(0, dtype=torch.int32),
        truncated=torch.zeros(0, dtype=torch.bool),
    )
    logits = torch.zeros(0, 7, dtype=torch.float64)
    batch = MemoryBatch(empty, {"actor": logits, "teacher": logits}, torch.zeros(0, dtype=torch.int64))
    algorithm = (
        Distillation(DistillationSettings(), UpdatePlan())
        if name == "distillation"
        else RejectionSampling(RejectionSamplingSettings(), UpdatePlan())
    )
    assert train_step(algorithm, batch, 1.0).shape == (0, 7)


@pytest.mark.parametrize("name", ["distillation", "rejection_sampling"])
def test_the_configurations_are_valid_and_name_the_files(name: str) -> None:
    config = load_config(DATAFLOWS / f"{name}.yaml")
    file, _, attribute = config.algorithm.name.rpartition(":")
    assert DATAFLOWS / f"{name}.py" == DATAFLOWS.parents[1] / file
    assert attribute in (DATAFLOWS / f"{name}.py").read_text()
