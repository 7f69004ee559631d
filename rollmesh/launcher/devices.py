"""The assignment of this machine's CUDA devices to the processes of a run, as CUDA_VISIBLE_DEVICES.

Invariants: a device has two users only where the configuration names it twice. Impossible assignments are refused
before anything is started. The process that plans never initializes CUDA; another one counts the devices.

The learner's ranks come first, then one generator after the other, each with as many devices as its engine divides the
model over. Devices are numbered as CUDA shows them to `rollmesh run`: where CUDA_VISIBLE_DEVICES is set, within it.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.rollout import RolloutSection
from rollmesh.mesh.errors import ConfigError

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEADLINE_S = 120.0
# Shares of a device's memory that engines may take together: next to the learner, and among themselves.
_MOST_WITH_LEARNER = 0.5
_MOST_AMONG_ENGINES = 0.9


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


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The devices of each process.

    Attributes:
        visible: devices that can be assigned.
        learner: numbers of the ranks' devices; empty: it computes on the CPU.
        generators: numbers of each replica's devices; empty: it computes on the CPU, or elsewhere.
    """

    visible: VisibleDevices = VisibleDevices()
    learner: tuple[int, ...] = ()
    generators: tuple[tuple[int, ...], ...] = ()

    def for_learner(self) -> dict[str, str]:
        """Variables of the learner; none at all on a machine without devices."""
        return self._environment(self.learner)

    def for_generator(self, index: int) -> dict[str, str]:
        """Variables of a generator."""
        return self._environment(self.generators[index]) if self.generators else {}

    def describe(self) -> str:
        """The description of the devices, one line for the start of a run."""
        if not self.visible.names:
            return "no CUDA device: everything computes on the CPU"
        users = {"learner": self.learner} | {f"generator-{n}": given for n, given in enumerate(self.generators)}
        given = "; ".join(f"{user} {_listed(devices)}" for user, devices in users.items())
        return f"{len(self.visible.names)} CUDA device(s): {given}"

    def _environment(self, devices: Sequence[int]) -> dict[str, str]:
        names = self.visible.names
        return {_VARIABLE: ",".join(names[number] for number in devices)} if names else {}


def device_plan(config: Config) -> DevicePlan:
    """Asks the machine, and plans.

    Raises:
        ConfigError: as `assign_devices`; an interpreter's torch does not answer.
    """
    return assign_devices(config, visible_devices(config, os.environ) if _has_driver() else VisibleDevices())


def assign_devices(config: Config, visible: VisibleDevices) -> DevicePlan:
    """Gives every rank and every generator its devices.

    Raises:
        ConfigError: the machine has too few; a list in the configuration does not fit; an engine would take a device
            whole that others share.
    """
    learner, rollout = config.learner, config.rollout
    _check_named("learner", learner.devices, learner.device, visible.learner)
    _check_named("rollout", rollout.devices, rollout.device, visible.generators)
    ranks = learner.ranks if _on_cuda("learner.device", learner.device, visible.learner) else 0
    each = devices_per_generator(rollout) if _on_cuda("rollout.device", rollout.device, visible.generators) else 0
    for_generators = each * rollout.replicas
    named_learner = _configured_devices("learner.devices", learner.devices, ranks, visible)
    named_rollout = _configured_devices("rollout.devices", rollout.devices, for_generators, visible)
    free = [n for n in range(len(visible.names)) if n not in {*named_learner, *named_rollout}]
    for_learner = named_learner or _taken(free, ranks)
    generators = named_rollout or _taken(free, for_generators)
    if len(for_learner) < ranks or len(generators) < for_generators:
        raise ConfigError(
            f"the learner needs {ranks} CUDA device(s) and {rollout.replicas} generator(s) {each} each, "
            f"but only {len(visible.names)} are here",
            hint="lower learner.ranks or rollout.replicas, set learner.device or rollout.device to cpu, or share: "
            "learner.devices and rollout.devices may name the same device",
        )
    if len(set(for_learner)) < len(for_learner):
        raise ConfigError("learner.devices: every rank needs a device of its own", hint="name each device once")
    replicas = tuple(tuple(generators[n * each : (n + 1) * each]) for n in range(rollout.replicas))
    for index, devices in enumerate(replicas):
        if len(set(devices)) < len(devices):
            raise ConfigError(
                f"rollout.devices: generator-{index} would have a device twice", hint=f"give each {each} different ones"
            )
    if config.weights.transport == "nccl" and not for_learner:
        raise ConfigError("weights.transport is nccl, and the learner has no CUDA device", hint="set it to auto")
    if config.weights.transport == "nccl" and rollout.replicas and not generators:
        raise ConfigError("weights.transport is nccl, and the generators have no CUDA device", hint="set it to auto")
    _check_sharing(config, for_learner, generators)
    return DevicePlan(visible, tuple(for_learner), replicas)


def _check_named(section: str, named: Sequence[int] | None, device: str, usable: int) -> None:
    """Refuses to compute on the CPU where devices are named."""
    if named and device == "auto" and not usable:
        raise ConfigError(
            f"{section}.devices names CUDA devices, and none can be used here",
            hint=f"see nvidia-smi and {_VARIABLE}, or leave {section}.devices out: then this part computes on the CPU",
        )


def devices_per_generator(rollout: RolloutSection) -> int:
    """CUDA devices over which one generator's engine spreads, those it sends weights from included."""
    if rollout.engine == "hf":
        return 1
    # Two processes of one NCCL group cannot share a device: the sender has one of its own.
    if rollout.engine == "vllm":
        return rollout.vllm.tensor_parallel * rollout.vllm.data_parallel + int(rollout.vllm.transfer == "nccl")
    sender = int(rollout.sglang.transfer == "distributed")
    if rollout.sglang.address is not None:
        return sender
    return rollout.sglang.tensor_parallel * rollout.sglang.data_parallel + sender


def visible_devices(config: Config, environment: Mapping[str, str]) -> VisibleDevices:
    """Devices that CUDA would show to the services that may use it; each interpreter is asked once.

    Raises:
        ConfigError: an interpreter's torch does not answer.
    """
    roles = (config.learner, config.rollout)
    counts = {python: _count(python) for python in {role.python for role in roles if role.device != "cpu"}}
    learner, generators = (counts[role.python] if role.device != "cpu" else 0 for role in roles)
    count = max(learner, generators)
    listed = environment.get(_VARIABLE)
    names = [name.strip() for name in listed.split(",")] if listed is not None else [str(n) for n in range(count)]
    return VisibleDevices(tuple(names[:count]), learner, generators)


def _on_cuda(field: str, setting: str, seen: int) -> bool:
    if setting == "cuda" and not seen:
        raise ConfigError(f"{field} is cuda, but torch finds no CUDA device", hint=f"set {field}: cpu")
    return setting != "cpu" and seen > 0


def _configured_devices(field: str, listed: Sequence[int] | None, needed: int, visible: VisibleDevices) -> list[int]:
    """The devices that the configuration lists; none where it leaves the choice, or no device is needed."""
    if listed is None or not needed:
        return []
    if len(listed) != needed:
        raise ConfigError(
            f"{field} names {len(listed)} device(s), {needed} are needed",
            hint="one for every rank; for every generator as many as its engine divides the model over",
        )
    if unknown := [number for number in listed if number >= len(visible.names)]:
        raise ConfigError(
            f"{field}: no CUDA device {unknown[0]}, the last one here is {len(visible.names) - 1}",
            hint="numbers count within CUDA_VISIBLE_DEVICES where it is set",
        )
    return list(listed)


def _taken(free: list[int], count: int) -> list[int]:
    taken = free[:count]
    del free[:count]
    return taken


def _check_sharing(config: Config, learner: Sequence[int], generators: Sequence[int]) -> None:
    """Devices that are named twice must leave room, and no NCCL group may need them twice."""
    users = Counter([*learner, *generators])
    shared = sorted(number for number in set(generators) if users[number] > 1)
    if not shared:
        return
    rollout = config.rollout
    keys = {
        "vllm": ("rollout.vllm.gpu_memory_utilization", rollout.vllm.gpu_memory_utilization),
        "sglang": ("rollout.sglang.mem_fraction", rollout.sglang.mem_fraction),
    }
    if rollout.engine in keys:
        key, share = keys[rollout.engine]
        engines = Counter(generators)
        for number in shared:
            most = (_MOST_WITH_LEARNER if number in learner else _MOST_AMONG_ENGINES) / engines[number]
            if share is None or share > most:
                raise ConfigError(
                    f"{key} leaves too little of device {number}, which has {users[number]} users",
                    hint=f"set it to {_floor(most):g} or less, or give each its own device",
                )
    if config.weights.transport == "nccl":
        raise ConfigError(
            f"weights.transport is nccl, and device {shared[0]} has two users: NCCL takes a device once",
            hint="set weights.transport: auto, or give each its own device",
        )


def _floor(share: float) -> float:
    return math.floor(100 * share) / 100


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices)) if devices else "CPU"


def _has_driver() -> bool:
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
