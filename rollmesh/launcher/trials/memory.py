"""The check that both sides fit beside each other: by measured memory on a CPU, by `rollmesh plan` on devices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import psutil

from rollmesh.launcher.interpreters import command_of
from rollmesh.launcher.placement.nvidia_smi import device_sizes
from rollmesh.mesh.config import save_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

_PLAN_S = 120.0
_MIB_PER_GIB = 1024
# Share of a host's memory for everything else.
_LEFT_FREE = 0.1


def refused_together(peaks_mb: Mapping[str, Mapping[str, Mapping[str, float]]], total_bytes: int | None = None) -> str:
    """The reason why services do not fit next to each other on a host; empty where they do.

    Args:
        peaks_mb: MiB of their own by phase of turns and service, as `summary.json` has them.
        total_bytes: memory of the host; None: of this one.
    """
    most: dict[str, float] = {}
    for services in peaks_mb.values():
        for name, memory in services.items():
            # `all` is the sum at one moment, when one side sleeps.
            if name != "all":
                most[name] = max(most.get(name, 0.0), memory.get("anon", 0.0))
    needed = sum(most.values()) / _MIB_PER_GIB
    total = (total_bytes or psutil.virtual_memory().total) / 2**30
    if needed <= total * (1 - _LEFT_FREE):
        return ""
    return f"both sides together took {needed:.1f} GiB at their peaks, and the machine has {total:.1f}"


async def refused_by_plan(config: Config, devices: int, scratch: Path) -> str:
    """The reason why `rollmesh plan` refuses a placement on CUDA devices; empty where it fits, or cannot be planned.

    The formulas need torch, which the launcher does not load: a process of its own computes them.

    Args:
        config: of the run in this placement.
        devices: their number.
        scratch: file for the configuration.
    """
    sizes = await asyncio.to_thread(device_sizes)
    if not sizes:
        return ""
    await asyncio.to_thread(save_config, config, scratch)
    host = f"{psutil.virtual_memory().total >> 20}M"
    command = (
        *command_of(None),
        "plan",
        str(scratch),
        "--devices",
        f"{devices}xGPU-{min(sizes) >> 30}G",
        "--json",
    )
    process = await asyncio.create_subprocess_exec(
        *command, "--host-memory", host, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _PLAN_S)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await asyncio.to_thread(scratch.unlink, missing_ok=True)
    if process.returncode != ConfigError.exit_code:
        return ""
    try:
        return f"rollmesh plan: {json.loads(output)['problems'][0]}"
    except (ValueError, LookupError):
        return ""
