"""Settings that would be without effect under Megatron-Core are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.megatron.requirements import ModelFacts
from rollmesh.learner.engines.megatron.unsupported import check_optimizer, check_settings
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import LearnerSection, MemorySection, OptimizerSection
from rollmesh.mesh.errors import ConfigError

DENSE, EXPERTS = ModelFacts("dense", experts=0), ModelFacts("experts", experts=4)


@pytest.mark.parametrize(
    ("values", "said", "works"),
    [
        ({"attention": "exact"}, "learner.attention: exact is for engine fsdp2", "learner.attention: auto"),
        ({"compile": True}, "learner.compile: true is for engine fsdp2", "learner.compile: false"),
        (
            {"memory": MemorySection(offload_activations=True)},
            "learner.memory.offload_activations: true is for engine fsdp2",
            "learner.memory.offload_activations: false",
        ),
    ],
)
def test_settings_of_other_engines_are_refused(values: dict[str, Any], said: str, works: str) -> None:
    for settings in (LearnerSection(**values), EngineSpec(ModelSection(path="m"), None, 1, **values)):
        with pytest.raises(ConfigError) as refused:
            check_settings(settings)
        assert refused.value.message.startswith(said)
        assert f"set {works}," in str(refused.value.hint)


def test_other_settings_are_taken() -> None:
    check_settings(LearnerSection(gradient_sync="step", memory=MemorySection(offload_params=True)))
    check_optimizer(OptimizerSection(schedule="cosine", max_grad_norm=2.0))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (OptimizerSection(name="muon"), "x.optimizer.name: muon is for"),
        (OptimizerSection(state_dtype="8bit"), "x.optimizer.state_dtype: 8bit is for"),
    ],
)
def test_optimizers_of_other_engines_are_refused(optimizer: OptimizerSection, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_optimizer(optimizer, "x.optimizer")
    assert refused.value.message.startswith(said)
