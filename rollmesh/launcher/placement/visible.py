"""The CUDA devices of this machine, as the interpreters of a run see them. This process never initializes CUDA.

Devices are numbered as CUDA shows them to `rollmesh run`: where CUDA_VISIBLE_DEVICES is set, within it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """CUDA devices that a process started here would see.

    Attributes:
        names: as CUDA_VISIBLE_DEVICES has them, in the order of their numbers.
        learner, generators: how many the torch of each role can use; 0 for one that is built without CUDA.
    """

    names: tuple[str, ...] = ()
    learner: int = 0
    generators: int = 0


def visible_devices(config: Config, environment: Mapping[str, str]) -> VisibleDevices:
    """Devices that CUDA would show to the services that may use it; each interpreter is asked once.

    Raises:
        ConfigError: an interpreter's torch does not answer.
    """
    roles = (config.learner, config.rollout)
    counts = {python: _count(python) for python in {role.python for role in roles if role.device != "cpu"}}
    learner, generators = (counts[role.python] if role.device != "cpu" else 0 for role in roles)
    count = max(learner, generators)
    listed = environment.get(VARIABLE)
    names = [name.strip() for name in listed.split(",")] if listed is not None else [str(n) for n in range(count)]
    return VisibleDevices(tuple(names[:count]), learner, generators)


def has_driver() -> bool:
    """True where NVIDIA's driver is installed; loading its library touches no device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _count(python: Path | None) -> int:
    """CUDA devices that an interpreter's torch can use."""
    command = [str(python or sys.executable), "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{command[0]} does not say how many CUDA devices there are: {error}",
            hint="repair its torch, or set learner.device or rollout.device to cpu",
        ) from error
