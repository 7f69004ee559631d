"""Actor, critic, reference and teacher in four worlds of different layouts: equal to one world, 1e-5 in float32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same, export_critic
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout, EngineWorld, Processes
from tests.learner.dataflow import weights
from tests.learner.distributed.preset_case import sample_groups
from tests.learner.engines.models import make_model
from tests.learner.roles.serving import builder, role_on_ranks, serve_role
from tests.learner.roles.taught import BATCHES, make_taught, train_as_rank, train_in_one_world

TWO_RANKS = EngineLayout("two_ranks", processes=2)
REFERENCE: dict[str, Any] = {"backend": "megatron", "parallel": ParallelSection(tp=2)}
TEACHER: dict[str, Any] = {"parallel": ParallelSection(sp=2)}
# Quantiles are read off a histogram, where a value between two bins falls into either.
_QUANTILE = re.compile(r"/p\d+$")


@pytest.fixture
def two_worlds() -> Iterator[tuple[EngineWorld, EngineWorld]]:
    """Two worlds of two processes each, apart from those of the actor."""
    with ExitStack() as closers:
        processes = [Processes(2), Processes(2)]
        for some in processes:
            closers.callback(some.close)
        first, second = (EngineWorld(TWO_RANKS, some) for some in processes)
        yield first, second


# Siblings in `make test`: `test_contract` has roles in worlds of other layouts, and a learner of several ranks.
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_four_worlds_are_as_one(
    engine_worlds: GetWorld, two_worlds: tuple[EngineWorld, EngineWorld], tmp_path: Path
) -> None:
    """The actor has two data-parallel ranks, the critic one, the reference parts of tensors, the teacher of tokens."""
    pytest.importorskip("megatron.core")
    torch.set_num_threads(1)
    models = {name: make_model(tmp_path / name, "qwen3", seed) for seed, name in enumerate(("actor", "reference"))}
    models["teacher"] = make_model(tmp_path / "teacher", "llama", 2)
    models["critic"] = tmp_path / "critic"
    engine_worlds(EngineLayout("one_rank")).run(export_critic, models["actor"], models["critic"])
    groups = sample_groups(models["actor"])
    expected = train_in_one_world(models, groups, tmp_path / "one")
    roles = {role.name: role for role in make_taught().needs.roles}
    with ExitStack() as closers:
        addresses = []
        for name, world, changes in zip(("reference", "teacher"), two_worlds, (REFERENCE, TEACHER), strict=True):
            (folder := tmp_path / f"{name}-served").mkdir()
            address, finish = closers.enter_context(
                role_on_ranks(world, folder, models[name], roles[name], changes, make_taught)
            )
            closers.callback(finish)
            addresses.append(address)
        critic = closers.enter_context(
            serve_role(roles["critic"], make_taught(), builder(models["critic"], roles["critic"]), token_budget=30)
        )
        ranks = engine_worlds(TWO_RANKS).run(
            train_as_rank, models, groups, tmp_path / "four", [*addresses, critic.address], deadline_s=300.0
        )
        assert_same(weights(critic.worker.engine), expected["critic"])
    assert_same(ranks[0]["actor"], expected["actor"])
    for found in ranks:
        assert len(found["seen"]) == len(found["metrics"]) == BATCHES
        for seen, before in zip(found["seen"], expected["seen"], strict=True):
            assert seen.keys() == before.keys()
            for name, values in before.items():
                torch.testing.assert_close(seen[name], values, rtol=1e-5, atol=1e-5, msg=name)
        for metrics, before in zip(found["metrics"], expected["metrics"], strict=True):
            assert metrics.keys() == before.keys()
            for name, value in before.items():
                rel = 0.02 if _QUANTILE.search(name) else 1e-5
                assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-5), name
