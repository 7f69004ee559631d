"""Values of trained tokens: those of a response are found, and the policy's log-probs are those before the update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from rollmesh.learner.algorithms.interface import Batch
from rollmesh.learner.distributed.token_values import PolicyLogProbs
from rollmesh.learner.engines.interface import ACTOR
from rollmesh.learner.engines.world import World
from tests.learner.dataflow import Plain, make_engines, make_groups, make_plan, make_worker
from tests.learner.engines.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


class Inferring(Plain):
    """The same with log-probs in the batch stage."""

    def batch_stage(self, batch: Batch) -> None:
        batch.infer(ACTOR)
        super().batch_stage(batch)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_values_of_a_response(model: Path, tmp_path: Path, minibatches: int) -> None:
    groups = make_groups()
    plan = make_plan(groups, token_budget=30, minibatches=minibatches)
    found = []
    for name, algorithm in (("loss", Plain(silent=False)), ("stage", Inferring(silent=False))):
        worker = make_worker(algorithm, make_engines(model, algorithm), groups, tmp_path / name, token_budget=30)
        assert not worker.prepare(plan)
        found.append(worker.train(lambda: None).tokens)
        worker.close()
    of_loss, of_stage = found
    assert of_loss is not None
    assert of_stage is not None
    for group in groups:
        for member in group.scored_members:
            values, same = (tokens.of(group.group_id, member.meta.member) for tokens in (of_loss, of_stage))
            assert member.trajectory is not None
            trained = int(member.trajectory.response_mask.sum())
            assert {name: len(value) for name, value in values.items()} == {
                "advantages": trained,
                "policy_log_probs": trained,
            }
            assert np.isfinite(values["policy_log_probs"]).all()
            if minibatches == 1:
                np.testing.assert_allclose(values["policy_log_probs"], same["policy_log_probs"], rtol=1e-4)
    assert of_loss.of("another", 0) == {}


def test_each_process_gets_what_the_others_know() -> None:
    """Two know a token, one knows others, and one token has had no forward pass."""
    known = PolicyLogProbs(4, torch.device("cpu"))
    known.values = torch.tensor([-1.0, -2.0, torch.nan, torch.nan])
    theirs = torch.tensor([-1.0, -torch.inf, -3.0, -torch.inf])
    world = SimpleNamespace(max=lambda own: torch.maximum(own, theirs))
    for _ in range(2):
        known.gather(cast(World, world))
        torch.testing.assert_close(known.values, torch.tensor([-1.0, -2.0, -3.0, torch.nan]), equal_nan=True)
    nothing = PolicyLogProbs(4, torch.device("cpu"))
    nothing.gather(cast(World, world))
    assert nothing.values is None
