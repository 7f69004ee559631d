"""The plugin that vLLM calls in each of its processes (entry point `vllm.general_plugins`), before it builds a model.

It registers our back end of the weight transfer by name; its module is imported where a worker asks for it. It keeps
the workers' connections on this machine. And it ties the life of vLLM's processes to that of the generator: one that is
killed outright must not leave an engine running. These processes do not look for garbage in what they have imported.
On a CPU it makes an engine core fork its workers.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import threading

from rollmesh.generators.engines.vllm.engine_args import SHARED
from rollmesh.mesh.runtime.ranks import on_loopback

# Process id of the generator, in the environment of vLLM's processes.
OWNER = "ROLLMESH_VLLM_OWNER"
# There too, where an engine core is to fork its workers.
FORKS_WORKERS = "ROLLMESH_VLLM_FORKS_WORKERS"


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
        # Each collection would take half a second, and copy pages that are shared with its parent: a start makes six.
        gc.freeze()
        _die_with(owner)
        if FORKS_WORKERS in os.environ:
            _fork_workers(owner)


def _fork_workers(owner: int) -> None:
    """Makes this process fork its workers from here on; each of them would import vLLM again, for ten seconds.

    It has no device, and no threads that they would miss. Without a reason against it vLLM does so too. On a CPU it has
    one: it assigns cores to each worker by variables that OpenMP reads once.
    """
    core = os.getpid()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    # A fork takes no threads along. It also holds open the descriptor whose closing tells the generator of the core's
    # death.
    os.register_at_fork(after_in_child=lambda: _die_with(owner, core))


def _die_with(*owners: int) -> None:
    """Ends this process when one of those has ended."""
    try:
        descriptors = [os.pidfd_open(owner) for owner in owners]
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        select.select(descriptors, [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="rollmesh-owner").start()
