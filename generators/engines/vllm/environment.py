"""The environment of vLLM's processes, this one included; set before vLLM is imported."""

from __future__ import annotations

import math
import os
from importlib.metadata import entry_points

from rollmesh.generators.engines.allocator import without_growing_segments
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.generators.engines.vllm.engine_args import SHARED, eager, on_cpu, section_of, workers
from rollmesh.generators.engines.vllm.plugin import OWNER
from rollmesh.mesh.errors import ConfigError

_GROUP = "vllm.general_plugins"


def prepare(settings: EngineSettings) -> None:
    """Sets the variables that vLLM reads."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # This process has threads (gRPC's among them), which a fork would lose in the middle of their work.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Where its processes listen for one another; all are on this machine.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ[OWNER] = str(os.getpid())
    # Its own deadlines of a start are not shorter than ours.
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(section_of(settings).start_timeout_s))
    os.environ.update(without_growing_segments(os.environ))
    if on_cpu(settings):
        from rollmesh.generators.engines.vllm import cpu

        cpu.prepare(threads=settings.threads, workers=workers(settings), eager=eager(settings))


def check_build(settings: EngineSettings, *, for_cpu: bool) -> None:
    """Refuses a device for which this vLLM was not built.

    Args:
        settings: name the device.
        for_cpu: it was built for CPUs.

    Raises:
        ConfigError: it was built for the other kind.
    """
    if on_cpu(settings) and not for_cpu:
        raise ConfigError(
            "this vLLM is built for CUDA, and the generator has no CUDA device or is configured to use none",
            hint="set rollout.device: cuda, or name an environment with vLLM's CPU build in rollout.python",
        )
    if for_cpu and not on_cpu(settings):
        raise ConfigError(
            "this vLLM is built for CPUs, and the generator is to use CUDA",
            hint="set rollout.device: cpu, or make its environment again: make vllm DEVICE=cuda",
        )


def check_plugin() -> None:
    """Checks that vLLM's processes will find our plugin.

    Raises:
        EngineError: they will not; says why.
    """
    if not any(entry.name == SHARED for entry in entry_points(group=_GROUP)):
        raise EngineError(
            f"vLLM's processes will not find rollmesh: no entry point {SHARED!r} in {_GROUP}",
            hint="install rollmesh into this environment again",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and SHARED not in allowed.split(","):
        raise EngineError(
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading rollmesh", hint=f"add {SHARED}, or unset VLLM_PLUGINS"
        )
