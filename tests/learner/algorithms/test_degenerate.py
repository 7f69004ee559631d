"""Every registered loss and estimator on inputs that break formulas: results, gradients and metrics stay finite."""

from __future__ import annotations

import math

import pytest
import torch

import rollmesh.learner.algorithms.advantages  # noqa: F401 - entering the registry
from rollmesh.learner.algorithms.aggregation import AGGREGATIONS, aggregate
from rollmesh.learner.algorithms.registry import ADVANTAGES, POLICY_LOSSES, build_policy_loss
from rollmesh.learner.algorithms.types import Estimate, Rollouts
from tests.learner.algorithms.samples import EVERY_LOSS, Sample, gradient, label, sample, select, token_loss


def shifted(data: Sample, shift: float) -> Sample:
    """Every second log-prob moved up by `shift`, the others down."""
    signs = torch.ones_like(data.anchor)
    signs[::2] = -1.0
    return Sample(data.anchor + shift * signs, data.anchor, data.tokens)


def impossible(data: Sample, *, current: bool, anchor: bool) -> Sample:
    """Every second token has probability 0."""
    data = Sample(data.log_probs.clone(), data.anchor.clone(), data.tokens)
    if current:
        data.log_probs[::2] = -math.inf
    if anchor:
        data.anchor[::2] = -math.inf
    return data


INPUTS = {
    "no sequences": lambda: sample([]),
    "sequences without tokens": lambda: sample([0, 0, 0]),
    "some sequences without tokens": lambda: sample([0, 3, 0, 2, 0]),
    "one token": lambda: sample([1]),
    "no advantage": lambda: sample([3, 2], advantages=torch.zeros(5, dtype=torch.float64)),
    "huge advantages": lambda: sample([3, 2], advantages=torch.full((5,), 1e6, dtype=torch.float64)),
    "equal policies": lambda: sample([3, 2], drift=0.0),
    "certain tokens": lambda: Sample(torch.zeros(5).double(), torch.zeros(5).double(), sample([3, 2]).tokens),
    "huge ratios": lambda: shifted(sample([3, 2]), 200.0),
    "infinite ratios": lambda: impossible(sample([3, 2]), current=False, anchor=True),
    "impossible tokens": lambda: impossible(sample([3, 2]), current=True, anchor=False),
    "impossible under both": lambda: impossible(sample([3, 2]), current=True, anchor=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", INPUTS)
def test_losses_stay_finite(case, dtype):
    for component in EVERY_LOSS:
        data, name = INPUTS[case]().to(dtype), label(component)
        select(component, data)
        loss, leaf, metrics = token_loss(component, data)
        assert loss.shape == leaf.shape, name
        assert loss.dtype == dtype, name
        assert torch.isfinite(loss).all(), name
        for mode in AGGREGATIONS:
            assert torch.isfinite(aggregate(loss, data.tokens, data.counts, mode, horizon=4.0)), (name, mode)
        assert torch.isfinite(gradient(loss.sum(), leaf)).all(), name
        parts = [*metrics.sums.values(), *metrics.weights.values(), *metrics.log_ratios.values()]
        assert all(torch.isfinite(value).all() and not value.requires_grad for value in parts), name


@pytest.mark.parametrize("by_policy", ["drifted", "impossible"])
@pytest.mark.parametrize("component", EVERY_LOSS, ids=label)
def test_a_loss_that_says_so_is_silent_without_advantage(component, by_policy):
    """Sequences 0 and 2 have no advantage: they are left out of the computation where the loss is said to be silent."""
    lengths = [3, 4, 2]
    advantages = torch.tensor([0.0] * 3 + [1.0, -2.0, 0.0, 0.5] + [0.0] * 2, dtype=torch.float64)
    data = sample(lengths, advantages=advantages)
    if by_policy == "impossible":
        data = impossible(data, current=True, anchor=False)
    select(component, data)
    _, _, traits = build_policy_loss(component)
    loss, leaf, _ = token_loss(component, data)
    quiet = torch.isin(data.tokens.sequence_ids, torch.tensor([0, 2]))
    if traits.silent_without_advantage:
        assert not loss[quiet].any()
        assert not gradient(loss.sum(), leaf)[quiet].any()


def test_losses_that_are_not_silent_speak_without_advantage():
    """The promise is not withheld without need: these pull towards the anchor, or look at all tokens."""
    loud = {"clip_cov", "dro", "kl_cov", "probability_band"}
    silent = {"cispo", "dppo_kl", "dppo_tv", "gmpo", "gpg", "gspo", "ppo", "reinforce", "sapo", "vespo"}
    promises = {name: POLICY_LOSSES.get(name, "loss").traits.silent_without_advantage for name in loud | silent}
    assert promises == dict.fromkeys(loud, False) | dict.fromkeys(silent, True)
    data = sample([4, 4], advantages=torch.zeros(8, dtype=torch.float64))
    for component in (entry for entry in EVERY_LOSS if entry.name in loud - {"clip_cov"}):
        select(component, data)
        loss, leaf, _ = token_loss(component, data)
        assert gradient(loss.sum(), leaf).any(), component


def rollouts(
    lengths: list[int], groups: list[int], rewards: list[float] | None = None, *, log_prob: float = -1.0
) -> Rollouts:
    """A batch with every field that an estimator may ask for."""
    draw = torch.Generator().manual_seed(0)
    count, total = len(lengths), sum(lengths)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    given = normal(count) if rewards is None else torch.tensor(rewards, dtype=torch.float64)
    log_probs = torch.full((total,), log_prob, dtype=torch.float64)
    return Rollouts(
        group_ids=torch.tensor(groups, dtype=torch.int64),
        rewards=given,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        behaviour_log_probs=log_probs,
        staleness=torch.zeros(total, dtype=torch.int32),
        truncated=torch.zeros(count, dtype=torch.bool),
        components={"first": given, "second": torch.zeros(count, dtype=torch.float64)},
        baseline_rewards=torch.zeros(count, dtype=torch.float64),
        token_rewards=torch.zeros(total, dtype=torch.float64),
        proximal_log_probs=log_probs.clone() if math.isinf(log_prob) else log_probs + normal(total),
        reference_log_probs=torch.full((total,), -2.0, dtype=torch.float64),
        values=normal(total),
        sum_pi_squared=torch.full((total,), 0.5, dtype=torch.float64),
        importance_weights=torch.ones(total, dtype=torch.float64),
        extra={"prm_log_probs": log_probs.clone()},
    )


BATCHES = {
    "no sequences": lambda: rollouts([], []),
    "sequences without tokens": lambda: rollouts([0, 0, 0, 0], [0, 0, 1, 1]),
    "some sequences without tokens": lambda: rollouts([0, 3, 2, 0], [0, 0, 1, 1]),
    "singleton groups": lambda: rollouts([2, 3, 1], [0, 1, 2]),
    "scattered groups": lambda: rollouts([2, 3, 1, 4], [1, 0, 1, 0]),
    "zero variance": lambda: rollouts([2, 3, 1, 4], [0, 0, 1, 1], [1.0, 1.0, 0.0, 0.0]),
    "all rewards 0": lambda: rollouts([2, 3], [0, 0], [0.0, 0.0]),
    "huge rewards": lambda: rollouts([2, 3, 1, 4], [0, 0, 1, 1], [1e8, -1e8, 1e8, 1e8]),
    "tiny differences": lambda: rollouts([2, 3], [0, 0], [1.0, 1.0 + 1e-15]),
    "one token": lambda: rollouts([1], [0]),
    "impossible tokens": lambda: rollouts([2, 3, 1, 4], [0, 0, 1, 1], log_prob=-math.inf),
}


@pytest.mark.parametrize("case", BATCHES)
def test_advantages_stay_finite(case):
    for name in ADVANTAGES.names:
        batch = BATCHES[case]()
        estimate = ADVANTAGES.get(name, "advantage").target(batch)
        if isinstance(estimate, Estimate):
            values = [estimate.advantages] if estimate.returns is None else [estimate.advantages, estimate.returns]
            assert all(value.shape == (batch.num_tokens,) for value in values), name
        else:
            values = [estimate]
            assert estimate.shape in ((batch.num_sequences,), (batch.num_tokens,)), name
        assert all(torch.isfinite(value).all() for value in values), name
