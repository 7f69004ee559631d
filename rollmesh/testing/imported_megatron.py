"""The Megatron engine, imported once for many processes, or for many tests in one.

The server that forks the processes of worlds loads this module, and does without where Megatron-Core is not installed.
To import it takes as long as several tests. Searches for garbage would go through all of it at the end of every engine.
"""

from __future__ import annotations

import importlib

from rollmesh.learner.engines.megatron.local.cpu import import_on_cpu
from rollmesh.mesh.runtime.memory_tuning import freeze_heap

# Before anything else imports Megatron-Core.
import_on_cpu()
importlib.import_module("rollmesh.learner.engines.megatron.engine")
freeze_heap()
