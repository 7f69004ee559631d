"""Results of a data-parallel rank: in every process those of all tokens, with the gradient of the one that leads."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.engines.megatron.computing.results import gather_context, led_by
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.megatron.computing.result_case import ENTROPIES, LOG_PROBS, PLACES, PULL, compute

torch.set_num_threads(1)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("used", [0, 1])
def test_every_process_has_all_results_and_its_part_of_the_leaders_gradient(engine_worlds, processes, used):
    for leader in range(processes):
        answers = engine_worlds(EngineLayout(f"results-{processes}", processes)).run(compute, leader, used)
        for (results, gradient, differentiable), places in zip(answers, PLACES[processes], strict=True):
            for result, wanted in zip(results, (LOG_PROBS, ENTROPIES, LOG_PROBS.exp()), strict=True):
                assert torch.equal(result, wanted)
            assert torch.equal(gradient, PULL[places])
            assert not differentiable


def test_a_process_alone_has_its_own_results_in_the_order_of_the_tokens():
    places = torch.tensor([2, 0, 1])
    own = torch.tensor([20.0, 0.0, 10.0], requires_grad=True)
    (result,) = led_by(gather_context([own], places, 3, None), None, True)
    assert result.tolist() == [0.0, 10.0, 20.0]
    (result * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert own.grad.tolist() == [3.0, 1.0, 2.0]


def test_a_loss_may_change_results_in_place():
    own = torch.ones(2, 3, requires_grad=True)
    first, second = gather_context(list(own), torch.arange(3), 3, None)
    (first.mul_(2.0) * second).sum().backward()
    assert own.grad.tolist() == [[2.0] * 3, [2.0] * 3]
