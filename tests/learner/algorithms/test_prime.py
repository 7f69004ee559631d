"""The loss of PRIME's implicit reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.prime import others_mean, prm_loss, process_rewards
from rollmesh.learner.algorithms.types import GlobalCounts, TokenBatch

CASES = json.loads((Path(__file__).parent / "fixtures" / "vapo_prime.json").read_text(encoding="utf-8"))


def batch(lengths: Tensor, rewards: Tensor) -> TokenBatch:
    total = int(lengths.sum())
    return TokenBatch(
        sequence_ids=torch.repeat_interleave(torch.arange(lengths.numel()), lengths),
        sequence_lengths=lengths,
        behaviour_log_probs=torch.zeros(total),
        advantages=torch.zeros(total),
        staleness=torch.zeros(total, dtype=torch.int32),
        sequence_rewards=rewards,
    )


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_outcome(case: dict[str, Any], normalize: bool):
    lengths = torch.tensor([len(row) for row in case["values"]])
    tokens = batch(lengths, torch.tensor(case["outcomes"], dtype=torch.float64))
    output = prm_loss(
        flat(case["prm_log_probs"]),
        flat(case["reference_log_probs"]),
        tokens,
        GlobalCounts(int(lengths.sum()), lengths.numel()),
        beta=case["beta"],
        normalize=normalize,
    )
    expected = case["prime_loss_normalized" if normalize else "prime_loss"]
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-9)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    split=st.integers(0, 8),
    normalize=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_gradients_do_not_depend_on_the_micro_batches(lengths: list[int], split: int, normalize: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    sizes, total = torch.tensor(lengths), sum(lengths)
    log_probs = -torch.rand(total, generator=generator, dtype=torch.float64)
    reference = -torch.rand(total, generator=generator, dtype=torch.float64)
    rewards = (torch.rand(len(lengths), generator=generator) < 0.5).double()
    counts = GlobalCounts(total, int((sizes > 0).sum()))

    def gradient(cuts: list[slice]) -> tuple[float, Tensor, float]:
        leaf, loss, right = log_probs.clone().requires_grad_(), 0.0, 0.0
        for cut in cuts:
            start, end = sum(lengths[: cut.start]), sum(lengths[: cut.stop])
            output = prm_loss(
                leaf[start:end], reference[start:end], batch(sizes[cut], rewards[cut]), counts, normalize=normalize
            )
            output.loss.backward()
            loss += float(output.loss.detach())
            right += float(output.metrics.sums["prm/accuracy"])
        assert leaf.grad is not None
        return loss, leaf.grad, right

    middle, end = min(split, len(lengths)), len(lengths)
    whole, parts = gradient([slice(0, end)]), gradient([slice(0, middle), slice(middle, end)])
    assert parts[0] == pytest.approx(whole[0])
    torch.testing.assert_close(parts[1], whole[1])
    assert parts[2] == pytest.approx(whole[2])


def test_impossible_tokens_and_empty_batches_stay_finite():
    lengths = torch.tensor([2, 0, 3])
    log_probs = torch.tensor([-torch.inf, -1.0, -torch.inf, -2.0, 0.0]).requires_grad_()
    reference = torch.tensor([-torch.inf, -torch.inf, -1.0, -5000.0, -1.0])
    output = prm_loss(log_probs, reference, batch(lengths, torch.tensor([1.0, 1.0, 0.0])), GlobalCounts(5, 2), beta=5.0)
    output.loss.backward()
    assert output.loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    nothing = torch.zeros(0, requires_grad=True)
    empty = prm_loss(
        nothing, torch.zeros(0), batch(torch.zeros(0, dtype=torch.int64), torch.zeros(0)), GlobalCounts(0, 0)
    )
    empty.loss.backward()
    assert float(empty.loss.detach()) == 0.0


def test_a_confident_and_right_model_has_no_loss():
    lengths, rewards = torch.tensor([3, 3]), torch.tensor([1.0, 0.0])
    log_probs = torch.tensor([-1.0] * 3 + [-9.0] * 3)
    output = prm_loss(log_probs, torch.full((6,), -5.0), batch(lengths, rewards), GlobalCounts(6, 2), beta=5.0)
    assert float(output.loss.detach()) < 1e-9
    assert float(output.metrics.sums["prm/accuracy"]) == 6.0


def test_process_rewards_are_scaled_log_ratios():
    rewards = process_rewards(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0]), 0.05)
    torch.testing.assert_close(rewards, torch.tensor([0.05, -0.05]))


def test_the_mean_of_the_others_leaves_out_what_does_not_count():
    values = torch.tensor([1.0, 2.0, 9.0, 5.0])
    counted = torch.tensor([True, True, False, True])
    means = others_mean(values, counted, torch.tensor([0, 0, 0, 1]), 2)
    torch.testing.assert_close(means, torch.tensor([2.0, 1.0, 1.5, 0.0]))
