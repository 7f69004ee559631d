"""The engine of each kind of model."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec

from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.megatron.environment import prepare_environment
from rollmesh.learner.engines.registry import ModelType
from rollmesh.mesh.errors import ConfigError


def create_engine(spec: EngineSpec, model_type: ModelType) -> Engine:
    """See `registry.create_engine`."""
    prepare_environment()
    _quieten()
    if spec.device == "cpu":
        from rollmesh.learner.engines.megatron.local.cpu import import_on_cpu

        # Before anything else imports Megatron-Core.
        import_on_cpu()
    else:
        _check_transformer_engine()
    from rollmesh.learner.engines.megatron.engine import MegatronEngine

    return MegatronEngine(spec, value_model=model_type == "value_model")


def _quieten() -> None:
    """Megatron describes its optimizers at length, and warns of each package that it does without."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    # Its schedules ask every received tensor for a gradient; the place named is the one that calls torch here.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")


def _check_transformer_engine() -> None:
    if find_spec("transformer_engine") is None:
        raise ConfigError(
            "learner.engine: megatron needs Transformer Engine on CUDA, and it is not installed for this interpreter",
            hint='pip install "transformer-engine[pytorch]", or set learner.engine: fsdp2',
        )
