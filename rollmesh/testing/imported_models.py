"""The models of the engines' contract, imported once for many processes, with what transformers keeps of the first one.

The server that forks the processes of worlds loads this module: each of them would take as long for it as for a test.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rollmesh.learner.engines.fsdp2 import engine  # noqa: F401 - imported for the processes
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.testing import contract, contract_adapters  # noqa: F401 - as above
from rollmesh.testing.engine_cases import ARCHITECTURES, make_model

with tempfile.TemporaryDirectory() as _folder:
    for _name in ARCHITECTURES:
        with StoredModel(make_model(Path(_folder) / _name, _name)):
            pass
freeze_heap()
