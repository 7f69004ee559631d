"""A process that has imported vLLM, from which engine cores are forked: they start in a third of the time.

It is for engines on a CPU whose processes end while they sleep. It computes nothing, has no threads, and ends with this
process. Its price is the memory of what it has imported, for as long as the generator lives.

The environment of engine cores is that of its own start, as is the file that their log is written to.
"""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing import forkserver

from rollmesh.generators.engines.types import EngineSettings
from rollmesh.generators.engines.vllm.engine_args import on_cpu

# Modules of vLLM that start processes, and those that these processes load.
_STARTERS = ("vllm.v1.engine.coordinator", "vllm.v1.engine.utils")
_IMPORTED_ONCE = [
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.worker.cpu_worker",
    "rollmesh.generators.engines.vllm.plugin",
]


def serves(settings: EngineSettings) -> bool:
    """True for an engine on a CPU whose processes end while it sleeps."""
    return on_cpu(settings) and settings.release == "process"


def start() -> None:
    """Starts it, unless it runs; after the environment was prepared, and the log.

    Before this process imports vLLM: both import it, side by side.
    """
    forkserver.set_forkserver_preload(_IMPORTED_ONCE)
    forkserver.ensure_running()


def use() -> None:
    """Has engine cores forked from here on; imports vLLM.

    vLLM's own setting of the method knows `spawn` and `fork` alone.
    """
    context = multiprocessing.get_context("forkserver")
    for name in _STARTERS:
        vars(importlib.import_module(name))["get_mp_context"] = lambda: context


def pids() -> list[int]:
    """Its process id; empty while none was started. Python starts a new one where it has ended."""
    # Python has no public name for it.
    pid = vars(forkserver._forkserver)["_forkserver_pid"]
    return [] if pid is None else [pid]
