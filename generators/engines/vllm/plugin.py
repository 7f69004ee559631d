"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`), long before it builds a model.

Registers our back end of the weight transfer by name; its module is imported where a worker asks for it. Keeps what the
workers say to one another on this machine. And ties the life of vLLM's processes to that of the generator: one that is
killed outright must not leave an engine running.
"""

from __future__ import annotations

import os
import select
import signal
import threading

from rollmesh.generators.engines.vllm.engine_args import SHARED
from rollmesh.mesh.runtime.ranks import on_loopback

# Process id of the generator, in the environment of vLLM's processes.
OWNER = "ROLLMESH_VLLM_OWNER"


def register() -> None:
    """The entry point; may be called several times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if SHARED not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            SHARED, "rollmesh.generators.engines.vllm.worker_transfer", "SharedMemoryTransfer"
        )
    owner = int(os.environ.get(OWNER, "0"))
    if owner and owner != os.getpid():
        os.environ.update(on_loopback())
        _die_with(owner)


def _die_with(owner: int) -> None:
    """Ends this process when that one has ended."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="rollmesh-owner").start()
