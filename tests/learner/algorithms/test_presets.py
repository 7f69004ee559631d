"""Every algorithm by name: builds, declares what it needs, and goes through its dataflow with finite results."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rollmesh.learner.algorithms.load import load_algorithm, read_settings
from rollmesh.learner.algorithms.metrics import summarize
from rollmesh.learner.algorithms.registry import ALGORITHMS
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import (
    GlobalCounts,
    Group,
    ModelOutput,
    ModelRole,
    Needs,
    Rollouts,
    StepView,
    TokenBatch,
    UpdatePlan,
)
from tests.learner.algorithms.memory_batch import MemoryBatch

PLAN = UpdatePlan(minibatches=2, max_staleness=2, max_response_tokens=6, group_size=4)


def a_batch(seed: int = 0, groups: int = 3, size: int = 4, vocabulary: int = 5) -> MemoryBatch:
    draw = torch.Generator().manual_seed(seed)
    count = groups * size
    lengths = torch.randint(0, 7, (count,), generator=draw)
    total = int(lengths.sum())
    tokens = torch.randint(0, vocabulary, (total,), generator=draw)
    actor = torch.randn(total, vocabulary, generator=draw, dtype=torch.float64)
    drift = 0.3 * torch.randn(actor.shape, generator=draw, dtype=torch.float64)
    behaviour = (actor + drift).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    rewards = torch.randint(0, 2, (count,), generator=draw).double() + 0.1 * torch.rand(count, generator=draw)
    rollouts = Rollouts(
        group_ids=torch.arange(groups).repeat_interleave(size),
        rewards=rewards,
        lengths=lengths,
        behaviour_log_probs=behaviour,
        staleness=torch.randint(0, 3, (total,), generator=draw).int(),
        truncated=lengths == 6,
        components={"first": rewards, "second": torch.rand(count, generator=draw, dtype=torch.float64)},
        baseline_rewards=torch.full((count,), 0.5, dtype=torch.float64),
    )
    logits = {"actor": actor, "reference": actor + drift, "prm": actor - drift, "teacher": actor + 2.0 * drift}
    return MemoryBatch(rollouts, tokens, logits, {"critic": torch.randn(total, generator=draw, dtype=torch.float64)})


@pytest.mark.parametrize("name", ALGORITHMS.names)
def test_goes_through_its_dataflow(name):
    algorithm = load_algorithm(name, {}, PLAN)
    batch = a_batch()
    before = algorithm.state()
    algorithm.batch_stage(batch)
    data = batch.rollouts
    assert data.advantages is not None
    assert data.advantages.shape == (data.num_tokens,)
    assert torch.isfinite(data.advantages).all()
    assert all(torch.isfinite(torch.tensor(value)) for value in batch.reported.values()), batch.reported
    tokens = batch.token_batch()
    for role, loss in algorithm.losses(version=10**6).items():
        table = (batch.tables if role in batch.tables else batch.logits)[role].detach().clone().requires_grad_()
        (batch.tables if role in batch.tables else batch.logits)[role] = table
        output = batch.output(role)
        if role == "actor" and algorithm.needs.selection:
            log_probs, entropy = (part.detach() for part in output.policy())
            anchor = log_probs if tokens.proximal_log_probs is None else tokens.proximal_log_probs
            tokens.selected = algorithm.select(StepView(log_probs, entropy, anchor, data.advantages, batch.generator))
        result = loss(output, tokens, batch.counts())
        result.loss.backward()
        assert torch.isfinite(table.grad).all()
        assert table.grad.abs().sum() > 0
        summary = summarize([result.metrics], data.num_tokens)
        assert summary
        assert all(torch.isfinite(torch.tensor(value)) for value in summary.values()), summary
    algorithm.restore(before)
    assert algorithm.state() == before


@pytest.mark.parametrize("name", ALGORITHMS.names)
def test_a_preset_says_only_what_its_settings_know(name):
    algorithm_type, settings = read_settings(name, {})
    assert set(algorithm_type.defaults) <= {field.name for field in dataclasses.fields(settings)}
    assert algorithm_type.__doc__


@pytest.mark.parametrize(
    ("name", "params", "needs"),
    [
        ("grpo", {}, Needs(group_size=2)),
        ("remax", {}, Needs(greedy_baseline=True)),
        ("gdpo", {"advantage": {"weights": {"first": 1.0}}}, Needs(group_size=2, components=("first",))),
        ("grpo", {"kl": {"where": "loss"}}, Needs(roles=(ModelRole("reference"),), group_size=2)),
        ("grpo", {"entropy": {"coefficient": 0.01}}, Needs(group_size=2, entropy_gradient=True)),
        ("kl_cov", {}, Needs(group_size=2, selection=True)),
        ("ppo", {}, Needs(roles=(ModelRole("critic", kind="value_model", trained=True),))),
        ("prime", {}, Needs(roles=(ModelRole("prm", trained=True), ModelRole("reference")), group_size=2)),
    ],
)
def test_declares_what_it_needs(name, params, needs):
    assert load_algorithm(name, params, PLAN).needs == needs


def test_an_estimator_with_a_critic_is_refused_without_one():
    with pytest.raises(SettingsError, match="values") as caught:
        load_algorithm("grpo", {"advantage": "gae"}, PLAN)
    assert caught.value.field == "algorithm.advantage"
    assert "ppo" in caught.value.hint


def test_a_stale_run_that_corrects_for_nothing_is_refused_by_name():
    with pytest.raises(SettingsError, match="max_staleness") as caught:
        load_algorithm("grpo", {"correction": {"mode": "none"}}, PLAN)
    assert caught.value.field == "algorithm.correction.mode"
    load_algorithm("grpo", {"correction": {"mode": "none", "accept_uncorrected": True}}, PLAN)
    load_algorithm("grpo", {"correction": {"mode": "none"}}, dataclasses.replace(PLAN, max_staleness=0))


def test_a_users_settings_go_over_the_preset():
    _, settings = read_settings("dapo", {"loss": {"clip_low": 0.1}})
    assert dict(settings.loss.params) == {"clip_low": 0.1, "clip_high": 0.28}
    _, settings = read_settings("dapo", {"loss": "gspo"})
    assert settings.loss.name == "gspo"
    assert not settings.loss.params


def test_the_adaptive_kl_coefficient_follows_the_distance():
    params = {"kl": {"where": "reward", "coefficient": 0.1, "target": 1e-6, "horizon": 100}}
    algorithm = load_algorithm("grpo", params, PLAN)
    algorithm.batch_stage(a_batch())
    assert algorithm.state()["kl_coefficient"] > 0.1


@pytest.mark.parametrize("mode", ["truncated_is", "masked_is", "behaviour"])
def test_the_unbiased_kl_has_the_gradient_of_the_divergence_whatever_policy_sampled(mode):
    """Over every token of a vocabulary of four, weighed by the probability that the behaviour policy samples it."""
    settings = {"kl": {"where": "loss", "coefficient": 1.0, "unbiased": True}, "correction": {"mode": mode}}
    algorithm = load_algorithm("grpo", settings, UpdatePlan(max_staleness=4, group_size=4))
    logits = torch.tensor([0.3, -0.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    behaviour = torch.log_softmax(torch.tensor([1.0, 0.2, -0.7, 0.4], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, 0.1, -0.3], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    expected = torch.zeros(4, dtype=torch.float64)
    for token in torch.arange(4).split(1):
        tokens = TokenBatch(
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            sequence_lengths=torch.ones(1, dtype=torch.int64),
            behaviour_log_probs=behaviour[token],
            advantages=torch.zeros(1, dtype=torch.float64),
            staleness=torch.full((1,), 3, dtype=torch.int32),
            sequence_rewards=torch.zeros(1, dtype=torch.float64),
            reference_log_probs=reference[token],
        )
        output = ModelOutput(log_probs=policy[token], entropy=torch.ones(1, dtype=torch.float64))
        loss = algorithm.loss(output, tokens, GlobalCounts(1, 1)).loss
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        expected += behaviour[token].exp() * gradient
    torch.testing.assert_close(expected, exact)


def test_a_rejected_group_has_no_say_in_the_whitening_of_the_others():
    def advantages(reward: float) -> torch.Tensor:
        rollouts = Rollouts(
            group_ids=torch.tensor([0, 0, 1, 1]),
            rewards=torch.tensor([0.0, 1.0, 0.0, reward]),
            lengths=torch.full((4,), 3),
            behaviour_log_probs=torch.full((12,), -1.0),
            staleness=torch.tensor([0, 0, 9, 9], dtype=torch.int32).repeat_interleave(3),
            truncated=torch.zeros(4, dtype=torch.bool),
        )
        settings = {"normalize_advantages": "batch", "correction": {"max_age": 2}}
        batch = MemoryBatch(rollouts, torch.zeros(12, dtype=torch.int64), {"actor": torch.zeros(12, 3)})
        load_algorithm("dr_grpo", settings, UpdatePlan(max_staleness=9, group_size=2)).batch_stage(batch)
        return rollouts.advantages[rollouts.keep]

    assert torch.equal(advantages(100.0), advantages(1.0))


def equal_group(rewards: torch.Tensor) -> Group:
    no = torch.zeros(rewards.numel(), dtype=torch.bool)
    return Group(rewards, ~no, torch.arange(rewards.numel()), truncated=no)


SILENT_WHERE_EQUAL = (
    "bnpo", "cispo", "dapo", "decoupled_ppo", "dppo_kl", "dppo_tv", "dr_grpo", "gmpo", "gpg", "grpo", "grpo_passk",
    "gspo", "luspo", "opo", "policy_gradient", "rloo", "sapo", "vespo",
)  # fmt: skip


def test_a_group_that_is_expected_to_be_silent_is():
    """Ranks are balanced, from metadata alone, by the result of the batch stage: advantages of exactly 0."""
    silent = []
    for name in ALGORITHMS.names:
        algorithm, batch = load_algorithm(name, {}, PLAN), a_batch(seed=3)
        rewards = batch.rollouts.rewards
        rewards[:4] = 0.3
        assert algorithm.expected_cost(equal_group(rewards[4:8])) == 1.0
        assert algorithm.expected_cost(equal_group(rewards[:1])) == 1.0, "the only member of a group keeps its reward"
        if algorithm.expected_cost(equal_group(rewards[:4])) < 1.0:
            silent.append(name)
            algorithm.batch_stage(batch)
            assert algorithm.silent_without_advantage
            assert not batch.rollouts.advantages[batch.rollouts.sequence_ids < 4].any()
            assert batch.rollouts.advantages.any()
    assert tuple(silent) == SILENT_WHERE_EQUAL


@pytest.mark.parametrize(
    "params",
    [
        {"kl": {"where": "loss"}},
        {"kl": {"where": "reward"}},
        {"entropy": {"coefficient": 0.01}},
        {"top_entropy_quantile": 0.2},
        {"reward": {"overlong_buffer_tokens": 2}},
        {"reward": {"length_reward": "cosine"}},
        {"reward": {"truncation_penalty": 0.5}},
        {"normalize_advantages": "batch"},
        {"advantage": "grpo_length_penalty"},
        {"loss": "dro"},
    ],
)
def test_what_trains_groups_without_advantage_is_known(params):
    algorithm = load_algorithm("grpo", params, PLAN)
    assert algorithm.expected_cost(equal_group(torch.ones(4))) == 1.0


def test_a_look_at_the_policy_is_a_share_of_the_cost():
    once = dataclasses.replace(PLAN, minibatches=1)
    group = equal_group(torch.ones(4))
    assert load_algorithm("grpo", {}, once).expected_cost(group) == 0.0
    assert load_algorithm("grpo", {}, PLAN).expected_cost(group) == 0.25


def test_kl_in_the_reward_reaches_the_advantages():
    plain, shaped = (
        load_algorithm("ppo", {}, PLAN),
        load_algorithm("ppo", {"kl": {"where": "reward", "coefficient": 0.5}}, PLAN),
    )
    first, second = a_batch(), a_batch()
    plain.batch_stage(first)
    shaped.batch_stage(second)
    assert not torch.allclose(first.rollouts.advantages, second.rollouts.advantages)


def test_the_critic_warms_up_alone():
    algorithm = load_algorithm("ppo", {"critic_warmup": 3}, PLAN)
    assert list(algorithm.losses(2)) == ["critic"]
    assert list(algorithm.losses(3)) == ["critic", "actor"]
    assert (algorithm.begins_at("critic"), algorithm.begins_at("actor")) == (0, 3)


def test_the_positive_example_loss_is_the_mean_over_tokens_of_correct_responses():
    batch = a_batch()
    with_it = load_algorithm("vapo", {"positive_lm_coefficient": 1.0}, PLAN)
    with_it.batch_stage(batch)
    output = batch.output("actor")
    result = with_it.loss(output, batch.token_batch(), batch.counts())
    summary = summarize([result.metrics], batch.rollouts.num_tokens)
    correct = (batch.rollouts.rewards > 0.5)[batch.rollouts.sequence_ids]
    assert summary["actor/positive_lm_loss"] == pytest.approx(float(-output.log_probs[correct].mean()))


def test_prime_trains_its_reward_model_before_it_rewards():
    before, after = a_batch(), a_batch()
    load_algorithm("prime", {}, PLAN).batch_stage(before)
    load_algorithm("prime", {"prm_update": "after"}, PLAN).batch_stage(after)
    assert not torch.allclose(before.rollouts.extra["prm_log_probs"], after.rollouts.extra["prm_log_probs"])
    assert torch.allclose(before.logits["prm"], after.logits["prm"])


def test_truncated_responses_can_be_left_out():
    batch = a_batch()
    load_algorithm("grpo", {"filter": {"truncated": "mask"}}, PLAN).batch_stage(batch)
    data = batch.rollouts
    assert data.keep is not None
    assert torch.equal(~data.keep, data.truncated[data.sequence_ids])
