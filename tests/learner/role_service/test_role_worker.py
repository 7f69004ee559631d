"""One rank of a role keeps no half of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.role_service.role_worker import RoleWorker
from rollmesh.mesh.errors import DataError
from tests.learner.dataflow import Probe, weights
from tests.learner.engines.models import make_model
from tests.learner.roles.serving import builder


def test_a_model_that_could_not_be_loaded_again_is_missed_by_name_and_tried_again(tmp_path: Path) -> None:
    role = next(role for role in Probe().needs.roles if role.trained)
    build, gone = builder(make_model(tmp_path / "qwen3", "qwen3"), role), False

    def load() -> Engine:
        if gone:
            raise DataError("the model's folder is gone")
        return build()

    worker = RoleWorker(role, Probe(), load, token_budget=30)
    initial = weights(worker.engine)
    with pytest.raises(DataError):
        worker.attach(str(tmp_path))  # no checkpoint
    gone = True
    with pytest.raises(DataError, match="the model's folder is gone"):
        worker.attach("")
    with pytest.raises(DataError, match="has no model: it could not be loaded again"):
        worker.discard()
    gone = False
    worker.attach("")
    assert all((found == initial[name]).all() for name, found in weights(worker.engine).items())
    worker.close()
