"""Each role is built by its own engine, in its own division."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollmesh.learner import builders
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.types import ModelRole, Needs
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.tolerances import Difference, Evidence
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.derived.memory_release import rest_folder
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], None),
        (["placement.mode=collocated"], "r/n/resting"),
        (["placement.mode=hybrid", "placement.rest_dir=/disk"], "/disk"),
    ],
)
def test_state_rests_in_files_where_a_cpu_is_shared(changes: list[str], expected: str | None) -> None:
    """On CUDA, pinned memory is faster."""
    values = {"model": {"path": "m"}, "data": {"train": "t"}, "run": {"dir": "r", "name": "n"}}
    config = load_config(values, changes)
    found = rest_folder(config, on_cpu=True)
    assert found == (None if expected is None else Path(expected))
    assert rest_folder(config, on_cpu=False) is None


def test_a_learner_that_could_not_rest_does_not_start(tmp_path: Path) -> None:
    """A swap that fails is tried again by another learner; a wrong configuration is not."""
    (tmp_path / "blocked").touch()
    rests = ["placement=collocated", "learner.device=cpu", f"placement.rest_dir={tmp_path}/blocked/x"]
    config = load_config({"model": {"path": "m"}, "data": {"train": "t"}}, rests)
    with pytest.raises(ConfigError, match=r"placement\.rest_dir: files cannot be written"):
        builders.build_engines(config, cast(Algorithm, SimpleNamespace(needs=Needs())))


def test_roles_are_built_by_their_engines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(
        {"model": {"path": "m"}, "data": {"train": "t"}},
        [
            "learner={device: cpu, ranks: 4, engine: megatron, parallel: {tp: 2, pp: 2}}",
            "learner.megatron.overlap_grad_reduce=true",
            "learner.roles={reference: {engine: fsdp2}, critic: {parallel: {tp: 4}}}",
        ],
    )
    made: list[tuple[str, str, EngineSpec]] = []

    def create(spec: EngineSpec, *, model_type: str, backend: str) -> Any:
        made.append((backend, model_type, spec))
        return SimpleNamespace(
            device=SimpleNamespace(type="cpu"),
            layout=SimpleNamespace(leads=True),
            world=SimpleNamespace(process=0),
            packing=Packing.REPEATED,
            probe=lambda: Evidence(Difference(5e-7, 4e-6 if spec.optimizer else None), leak=0.0),
        )

    monkeypatch.setattr(builders, "create_engine", create)
    critic = ModelRole("critic", kind="value_model", trained=True)
    needs = Needs(roles=[ModelRole("reference"), critic, ModelRole("teacher")])
    with caplog.at_level("INFO"):
        engines = builders.build_engines(config, cast(Algorithm, SimpleNamespace(needs=needs)))
    assert list(engines) == ["actor", "reference", "critic", "teacher"]
    proven = "it computes as transformers does: its outputs are 5e-07 apart"
    assert [record.getMessage() for record in caplog.records][1:3] == [
        f"role reference: fsdp2 on 4 ranks, packing repeated; {proven}",
        f"role critic: megatron on 4 ranks: tp 4, packing repeated; {proven}, its gradient 4e-06",
    ]
    assert [(backend, kind, spec.parallel) for backend, kind, spec in made] == [
        ("megatron", "language_model", ParallelSection(tp=2, pp=2)),
        ("fsdp2", "language_model", ParallelSection()),
        ("megatron", "value_model", ParallelSection(tp=4)),
        ("megatron", "language_model", ParallelSection(tp=2, pp=2)),
    ]
    assert [spec.optimizer is not None for *_, spec in made] == [True, False, True, False]
    assert all(spec.megatron.overlap_grad_reduce for *_, spec in made)
