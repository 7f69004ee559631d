"""On-policy distillation: its gradient is that of the reverse KL, its teachers count as they are set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput, ModelRole, Rollouts, UpdatePlan
from tests.learner.algorithms.memory_batch import MemoryBatch

NAME = "on_policy_distillation"
VOCABULARY = 5
LENGTHS = (3, 2, 0, 4)
TWO: dict[str, Any] = {"teachers": {"math": 3.0, "code": 1.0}}


def logits(seed: int, rows: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rollouts(lengths: tuple[int, ...], behaviour: Tensor, sources: tuple[str, ...] = ()) -> Rollouts:
    count = len(lengths)
    return Rollouts(
        group_ids=torch.arange(count) % 2,
        rewards=torch.arange(count).double(),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        behaviour_log_probs=behaviour,
        staleness=torch.zeros(sum(lengths), dtype=torch.int32),
        truncated=torch.zeros(count, dtype=torch.bool),
        data_sources=sources,
    )


def a_batch(lengths: tuple[int, ...] = LENGTHS, sources: tuple[str, ...] = ()) -> MemoryBatch:
    rows = sum(lengths)
    tables = {role: logits(seed, rows) for seed, role in enumerate(("actor", "teacher", "math", "code", "reference"))}
    tokens = torch.arange(rows) % VOCABULARY
    behaviour = tables["actor"].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return MemoryBatch(rollouts(lengths, behaviour, sources), tokens, tables)


def log_probs(batch: MemoryBatch, role: str) -> Tensor:
    found, _ = batch.infer(role).policy()
    return found


def advantages(batch: MemoryBatch, params: dict[str, Any]) -> Tensor:
    load_algorithm(NAME, params, UpdatePlan(group_size=2)).batch_stage(batch)
    assert batch.rollouts.advantages is not None
    return batch.rollouts.advantages


def test_the_gradient_is_that_of_the_reverse_divergence_whatever_policy_sampled() -> None:
    """Over every token of the vocabulary, weighed by the probability that the behaviour policy samples it."""
    params = {**TWO, "correction": {"cap": 1e9}}
    algorithm = load_algorithm(NAME, params, UpdatePlan(max_staleness=4))
    tables = {role: logits(seed, 1) for seed, role in enumerate(("actor", "math", "code"))}
    leaf = tables["actor"].clone().requires_grad_()
    policy, math, code = leaf.log_softmax(-1), tables["math"].log_softmax(-1), tables["code"].log_softmax(-1)
    divergence = (policy.exp() * (policy - 0.75 * math - 0.25 * code)).sum()
    (exact,) = torch.autograd.grad(divergence, leaf, retain_graph=True)
    behaviour = logits(7, 1).log_softmax(-1)
    expected = torch.zeros_like(leaf)
    for token in range(VOCABULARY):
        batch = MemoryBatch(rollouts((1,), behaviour[:, token]), torch.tensor([token]), tables)
        algorithm.batch_stage(batch)
        tokens = batch.token_batch()
        output = ModelOutput(log_probs=policy[:, token], entropy=torch.ones(1, dtype=torch.float64))
        loss = algorithm.loss(output, tokens, GlobalCounts(1, 1)).loss
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        expected += behaviour[0, token].exp() * gradient
    torch.testing.assert_close(expected, exact)


def test_no_reward_has_a_part_unless_it_is_given_one() -> None:
    batch = a_batch()
    plain = advantages(batch, {})
    torch.testing.assert_close(plain, log_probs(batch, "teacher") - log_probs(batch, "actor"))
    rewarded = advantages(a_batch(), {"advantage": "reward", "reward_coefficient": 0.5})
    per_token = batch.rollouts.per_token(torch.arange(len(LENGTHS)).double())
    torch.testing.assert_close(rewarded, plain + 0.5 * per_token)


def test_earlier_tokens_get_the_later_judgements_by_the_discount() -> None:
    batch = a_batch()
    found = advantages(batch, {"discount": 1.0})
    own = log_probs(batch, "teacher") - log_probs(batch, "actor")
    torch.testing.assert_close(found[:3], own[:3].flip(0).cumsum(0).flip(0))
    torch.testing.assert_close(found[3:5], own[3:5].flip(0).cumsum(0).flip(0))


def test_several_teachers_judge_by_their_weights() -> None:
    batch = a_batch()
    found = advantages(batch, TWO)
    student, math, code = (log_probs(batch, role) for role in ("actor", "math", "code"))
    torch.testing.assert_close(found, 0.75 * math + 0.25 * code - student)
    assert batch.reported["distillation/reverse_kl"] == pytest.approx(float(-found.mean()))
    assert batch.reported["distillation/code/reverse_kl"] == pytest.approx(float((student - code).mean()))
    assert batch.reported["distillation/math/share"] == 0.75


def test_a_source_chooses_its_teacher_and_others_have_all() -> None:
    batch = a_batch(sources=("gsm8k", "mbpp", "gsm8k", "chat"))
    found = advantages(batch, {**TWO, "by_data_source": {"gsm8k": "math", "mbpp": "code"}})
    student, math, code = (log_probs(batch, role) for role in ("actor", "math", "code"))
    torch.testing.assert_close(found[:3], (math - student)[:3])
    torch.testing.assert_close(found[3:5], (code - student)[3:5])
    torch.testing.assert_close(found[5:], (0.75 * math + 0.25 * code - student)[5:])
    judged = (student - code)[3:]
    assert batch.reported["distillation/code/reverse_kl"] == pytest.approx(float(judged.mean()))
    assert batch.reported["distillation/code/share"] == pytest.approx((2 + 4 * 0.25) / 9)


def test_tokens_of_an_older_student_are_weighed() -> None:
    batch = a_batch()
    batch.rollouts.behaviour_log_probs = batch.rollouts.behaviour_log_probs - 5.0
    advantages(batch, {"correction": {"cap": 1.5}})
    weights = batch.rollouts.importance_weights
    assert weights is not None
    assert torch.equal(weights, torch.full_like(weights, 1.5))


def test_the_student_comes_to_the_teacher() -> None:
    algorithm, rows = load_algorithm(NAME, {}, UpdatePlan()), 64
    teacher, table, draw = logits(1, rows), logits(0, rows), torch.Generator().manual_seed(2)

    def gap() -> float:
        student, target = table.log_softmax(-1), teacher.log_softmax(-1)
        return float((student.exp() * (student - target)).sum(-1).mean())

    start = gap()
    for _ in range(80):
        tokens = torch.multinomial(table.softmax(-1), 1, generator=draw)
        behaviour = table.log_softmax(-1).gather(1, tokens)[:, 0]
        batch = MemoryBatch(rollouts((rows,), behaviour), tokens[:, 0], {"actor": table, "teacher": teacher})
        algorithm.batch_stage(batch)
        batch.logits["actor"] = leaf = table.clone().requires_grad_()
        algorithm.loss(batch.output("actor"), batch.token_batch(), batch.counts()).loss.backward()
        assert leaf.grad is not None
        table = table - 50.0 * leaf.grad
    assert gap() < 0.3 * start


def test_an_empty_batch_is_no_error() -> None:
    assert advantages(a_batch(lengths=()), {}).shape == (0,)


def test_teachers_are_roles_and_groups_matter_to_rewards_alone() -> None:
    needs = load_algorithm(NAME, TWO, UpdatePlan()).needs
    assert needs.roles == (ModelRole("math"), ModelRole("code"))
    assert needs.group_size == 1
    needs = load_algorithm(NAME, {"reward_coefficient": 0.1, "kl": {"where": "loss"}}, UpdatePlan()).needs
    assert needs.roles == (ModelRole("teacher"), ModelRole("reference"))
    assert needs.group_size == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"teachers": {}}, "algorithm.teachers: expected roles with weights above 0"),
        ({"teachers": {"math": 0.0}}, "algorithm.teachers: expected roles with weights above 0"),
        ({"teachers": {"reference": 1.0}}, "algorithm.teachers: 'reference' is another role"),
        ({"by_data_source": {"gsm8k": "math"}}, "algorithm.by_data_source.gsm8k: 'math' is no teacher"),
        ({"discount": 2.0}, "algorithm.discount: expected 0 .. 1"),
        ({"reward_coefficient": -1.0}, "algorithm.reward_coefficient: expected a weight"),
        ({"kl": {"where": "reward"}}, "algorithm.kl.where: 'reward' has no part"),
    ],
)
def test_settings_that_contradict_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_algorithm(NAME, params, UpdatePlan())
    assert str(caught.value).startswith(message)
