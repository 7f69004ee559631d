"""A device without what Megatron-Core needs on it is refused."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.megatron.create import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import ConfigError


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
def test_cuda_without_transformer_engine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="needs Transformer Engine on CUDA") as refused:
        create_engine(EngineSpec(ModelSection(path="nowhere"), None, 1, device="cuda"), "language_model")
    assert "transformer-engine[pytorch]" in str(refused.value.hint)
