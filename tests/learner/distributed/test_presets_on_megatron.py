"""Every preset trains on Megatron-Core without a line of its own, and each role may have an engine of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.engine_cases import assert_same, export_critic
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.distributed.preset_case import Outcome, presets, sample_groups, train_presets, train_roles
from tests.learner.engines.models import make_model

ONE_RANK = EngineLayout("one_rank")
TENSORS = EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)})
STAGES = EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)})
# One for each way to use engines: selected tokens, a teacher, roles that are trained, a baseline, a critic, none of it.
EACH_KIND = ("clip_cov", "grpo", "on_policy_distillation", "prime", "remax", "vapo")
_QUANTILE = re.compile(r"/p\d+$")
# Role -> names of its metrics.
_OF_ROLES = {"actor": ("loss", "grad_norm"), "critic": ("vf_loss", "grad_norm"), "prm": ("loss", "grad_norm")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, engine_worlds: GetWorld) -> Mapping[str, Path]:
    """Another model for each role, and a critic with a head."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    roles = ("actor", "reference", "prm", "teacher")
    found = {role: make_model(folder / role, "qwen3", seed) for seed, role in enumerate(roles)}
    engine_worlds(ONE_RANK).run(export_critic, found["actor"], folder / "critic")
    return found | {"critic": folder / "critic"}


@pytest.fixture(scope="module")
def groups(models: Mapping[str, Path]) -> Any:
    return sample_groups(models["actor"])


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Quantiles are read off a histogram, where a value between two bins falls into either.
        assert found[name] == pytest.approx(value, rel=0.02 if _QUANTILE.search(name) else 1e-4, abs=1e-6), name


def assert_same_outcome(found: Outcome, expected: Outcome) -> None:
    assert_same_metrics(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for role, tensors in expected[1].items():
        assert_same(found[1][role], tensors, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        # Results of stages reach the algorithm by the longest way. Divided tensors give them to all, whatever uses
        # them, as the test of roles below shows of PPO.
        pytest.param(STAGES, EACH_KIND, id="stages"),
        pytest.param(STAGES, None, id="stages, every preset", marks=pytest.mark.exhaustive),
        pytest.param(TENSORS, ("grpo", "prime", "vapo"), id="tensors", marks=pytest.mark.exhaustive),
    ],
)
def test_every_preset_trains_as_on_one_rank_of_fsdp2(
    layout: EngineLayout,
    names: tuple[str, ...] | None,
    models: Mapping[str, Path],
    groups: Any,
    engine_worlds: GetWorld,
    tmp_path: Path,
) -> None:
    for name in ("alone", "divided"):
        (tmp_path / name).mkdir()
    (expected,) = engine_worlds(ONE_RANK).run(train_presets, models, groups, tmp_path / "alone", names)
    found, other = engine_worlds(layout).run(train_presets, models, groups, tmp_path / "divided", names)
    chosen = {name: algorithm for name, algorithm in presets() if names is None or name in names}
    assert list(found) == list(chosen)
    for name, algorithm in chosen.items():
        metrics = expected[name][0]
        trained = ["actor", *(role.name for role in algorithm.needs.roles if role.trained)]
        for key in (f"{role}/{metric}" for role in trained for metric in _OF_ROLES[role]):
            assert metrics[key] != 0, f"{name}: the batch shows nothing of {key}"
        try:
            assert_same_outcome(found[name], expected[name])
            assert other[name][0] == found[name][0]
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_roles_may_have_engines_of_their_own(
    models: Mapping[str, Path], groups: Any, engine_worlds: GetWorld, tmp_path: Path
) -> None:
    """PPO with an actor divided by tensors, a critic by layers, and a reference of FSDP2, in the same processes."""
    (expected,) = engine_worlds(ONE_RANK).run(train_roles, models["actor"], groups, tmp_path / "one", ())
    settings = (
        *("learner.ranks=2", "learner.engine=megatron", "learner.parallel.tp=2"),
        "learner.roles={reference: {engine: fsdp2}, critic: {parallel: {pp: 2}}}",
    )
    for found in engine_worlds(TENSORS).run(train_roles, models["actor"], groups, tmp_path / "two", settings):
        assert_same_metrics(found[0], expected[0])
        if found[1]["actor"]:
            assert_same_outcome(found, expected)
    assert expected[0]["actor/grad_norm"] != 0
    assert expected[0]["critic/grad_norm"] != 0
