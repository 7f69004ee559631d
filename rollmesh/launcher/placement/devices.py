"""The assignment of this machine's CUDA devices to the processes of a run, as CUDA_VISIBLE_DEVICES.

Invariants: a device has two users at one time only where the configuration names it twice. Impossible assignments are
refused before anything is started, with the numbers that would do.

- `split`: the learner's ranks come first, then one generator after the other, each with as many devices as its engine
  divides the model over.
- `collocated`, `auto`: the same devices in the same order, but generators begin with the learner's first one again.
- `hybrid`: as `split`, and further generators on the learner's devices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollmesh.launcher.placement.device_sharing import check_sharing
from rollmesh.launcher.placement.visible import VARIABLE, VisibleDevices, has_driver, visible_devices
from rollmesh.mesh.config.derived.generator_places import GeneratorPlace, devices_per_generator, generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

_LEARNER = "placement.devices.learner"
_GENERATORS = "placement.devices.generators"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The devices of each process.

    Attributes:
        visible: devices that can be assigned.
        learner: numbers of the ranks' devices; empty: it computes on the CPU.
        generators: numbers of each generator's devices, in the order of `generator_places`; empty: they compute on the
            CPU, or elsewhere.
        names: of the generators that have devices.
    """

    visible: VisibleDevices = field(default_factory=VisibleDevices)
    learner: tuple[int, ...] = ()
    generators: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()

    def for_learner(self) -> dict[str, str]:
        """Variables of the learner; none at all on a machine without devices."""
        return self._environment(self.learner)

    def for_generator(self, index: int) -> dict[str, str]:
        """Variables of a generator, by its number among `generator_places`."""
        return self._environment(self.generators[index]) if self.generators else {}

    def describe(self) -> str:
        """The description of the devices, one line for the start of a run."""
        if not self.visible.names:
            return "no CUDA device: everything computes on the CPU"
        users = {"learner": self.learner} | dict(zip(self.names, self.generators, strict=True))
        given = "; ".join(f"{user} {_listed(devices)}" for user, devices in users.items())
        return f"{len(self.visible.names)} CUDA device(s): {given}"

    def _environment(self, devices: Sequence[int]) -> dict[str, str]:
        names = self.visible.names
        return {VARIABLE: ",".join(names[number] for number in devices)} if names else {}


def device_plan(config: Config) -> DevicePlan:
    """Asks the machine, and plans.

    Raises:
        ConfigError: as `assign_devices`; an interpreter's torch does not answer.
    """
    return assign_devices(config, visible_devices(config, os.environ) if has_driver() else VisibleDevices())


def assign_devices(config: Config, visible: VisibleDevices) -> DevicePlan:
    """Gives every rank and every generator its devices.

    Raises:
        ConfigError: the machine has too few. A list in the configuration does not fit. An engine would take a device
            whole that others use at the same time. Sides that take turns have no device in common.
    """
    learner, rollout, named = config.learner, config.rollout, config.placement.devices
    places = generator_places(config)
    _check_usable(_LEARNER, named.learner, learner.device, visible.learner)
    _check_usable(_GENERATORS, named.generators, rollout.device, visible.generators)
    ranks = learner.ranks if _on_cuda("learner.device", learner.device, visible.learner) else 0
    each = devices_per_generator(rollout) if _on_cuda("rollout.device", rollout.device, visible.generators) else 0
    _check_same_kind(config, on_cuda=(bool(ranks), bool(each)))
    by_name = _configured_generators(named.generators, places, each, visible)
    for_learner = _learner_devices(config, ranks, by_name, places, visible)
    generators = by_name or _dealt(config, for_learner, each, places, visible)
    _check_transport(config, for_learner, generators, places)
    check_sharing(config, for_learner, generators, places)
    given = tuple(map(tuple, generators))
    return DevicePlan(visible, tuple(for_learner), given, tuple(place.name for place in places) if given else ())


def _check_usable(key: str, named: object, device: str, usable: int) -> None:
    """Refuses to compute on the CPU where devices are named."""
    if named and device == "auto" and not usable:
        raise ConfigError(
            f"{key} names CUDA devices, and none can be used here",
            hint=f"see nvidia-smi and {VARIABLE}, or leave {key} out: then this part computes on the CPU",
        )


def _on_cuda(key: str, setting: str, seen: int) -> bool:
    if setting == "cuda" and not seen:
        raise ConfigError(f"{key} is cuda, but torch finds no CUDA device", hint=f"set {key}: cpu")
    return setting != "cpu" and seen > 0


def _check_same_kind(config: Config, on_cuda: tuple[bool, bool]) -> None:
    """Sides that take turns have devices in common. A generator whose engine is elsewhere needs none."""
    mode = config.placement.mode
    if mode == "split" or on_cuda[0] == on_cuda[1] or (on_cuda[0] and not devices_per_generator(config.rollout)):
        return
    where = ["on CUDA" if side else "on the CPU" for side in on_cuda]
    raise ConfigError(
        f"placement.mode is {mode}, and the learner computes {where[0]}, generators {where[1]}: they share no device",
        hint="set placement.mode: split, or learner.device and rollout.device alike",
    )


def _learner_devices(
    config: Config,
    ranks: int,
    named_generators: Sequence[Sequence[int]],
    places: Sequence[GeneratorPlace],
    visible: VisibleDevices,
) -> list[int]:
    """The ranks' devices: as named, else the first that no generator has for itself."""
    named = config.placement.devices.learner
    if named is not None and ranks:
        if len(named) != ranks:
            raise ConfigError(f"{_LEARNER} names {len(named)} device(s), {ranks} are needed", hint="one for every rank")
        _check_numbers(_LEARNER, named, visible)
        if len(set(named)) < len(named):
            raise ConfigError(f"{_LEARNER}: every rank needs a device of its own", hint="name each device once")
        return list(named)
    own = {n for place, devices in zip(places, named_generators, strict=False) for n in devices if _owns(place)}
    free = [number for number in range(len(visible.names)) if number not in own]
    # Where generators are named that share, their devices are the learner's.
    shared = [n for place, devices in zip(places, named_generators, strict=False) for n in devices if not _owns(place)]
    first = list(dict.fromkeys(shared))
    taken = [*first, *(number for number in free if number not in first)][:ranks]
    if len(taken) < ranks:
        raise _too_few(config, ranks, visible)
    return sorted(taken)


def _dealt(
    config: Config, for_learner: Sequence[int], each: int, places: Sequence[GeneratorPlace], visible: VisibleDevices
) -> list[list[int]]:
    """Devices for generators that the configuration does not name."""
    if not each:
        return []
    free = [number for number in range(len(visible.names)) if number not in for_learner]
    own = [place for place in places if _owns(place)]
    shared = len(places) - len(own)
    if len(own) * each > len(free):
        raise _too_few(config, len(for_learner), visible)
    if shared * each > len(for_learner):
        raise _too_few_to_share(config, len(for_learner), each, shared)
    return [
        *([free[n * each : (n + 1) * each] for n in range(len(own))]),
        *([list(for_learner[n * each : (n + 1) * each]) for n in range(shared)]),
    ]


def _configured_generators(
    listed: Sequence[Sequence[int]] | None, places: Sequence[GeneratorPlace], each: int, visible: VisibleDevices
) -> list[list[int]]:
    """The generators' devices by name; none where the configuration leaves the choice, or no device is needed."""
    if listed is None or not each or not places:
        return []
    names = ", ".join(place.name for place in places)
    if len(listed) != len(places):
        raise ConfigError(
            f"{_GENERATORS} has {len(listed)} list(s), and there are {len(places)} generator(s): {names}",
            hint=f"give one list for each, in this order, of {each} device(s)",
        )
    for place, devices in zip(places, listed, strict=True):
        if len(devices) != each:
            raise ConfigError(
                f"{_GENERATORS}: {place.name} has {len(devices)} device(s), {each} are needed",
                hint="as many as its engine divides the model over, and one more for a sender over NCCL",
            )
        _check_numbers(_GENERATORS, devices, visible)
        if len(set(devices)) < len(devices):
            raise ConfigError(
                f"{_GENERATORS}: {place.name} would have a device twice", hint=f"give it {each} different ones"
            )
    return [list(devices) for devices in listed]


def _check_numbers(key: str, listed: Sequence[int], visible: VisibleDevices) -> None:
    if unknown := [number for number in listed if number >= len(visible.names)]:
        raise ConfigError(
            f"{key}: no CUDA device {unknown[0]}, the last one here is {len(visible.names) - 1}",
            hint="numbers count within CUDA_VISIBLE_DEVICES where it is set",
        )


def _check_transport(
    config: Config, for_learner: Sequence[int], generators: Sequence[object], places: Sequence[GeneratorPlace]
) -> None:
    """NCCL needs a device on both sides."""
    if config.weights.transport != "nccl":
        return
    if not for_learner:
        raise ConfigError("weights.transport is nccl, and the learner has no CUDA device", hint="set it to auto")
    if places and not generators:
        raise ConfigError("weights.transport is nccl, and the generators have no CUDA device", hint="set it to auto")


def _owns(place: GeneratorPlace) -> bool:
    return not place.shares_devices


def _too_few(config: Config, ranks: int, visible: VisibleDevices) -> ConfigError:
    """Devices of their own for both sides are not there."""
    each, replicas = devices_per_generator(config.rollout), config.rollout.replicas
    count = len(visible.names)
    if config.placement.all_take_turns:
        return ConfigError(
            f"the learner needs {ranks} CUDA device(s), but only {count} are here",
            hint=f"set learner.ranks: {count}" if count else "set learner.device: cpu",
        )
    fit = (count - ranks) // max(each, 1)
    fewer = f"rollout.replicas: {fit} would fit; " if 0 < fit < replicas else ""
    return ConfigError(
        f"the learner needs {ranks} CUDA device(s) and {replicas} generator(s) {each} each, but only {count} are here",
        hint=f"{fewer}lower learner.ranks or rollout.replicas, set learner.device or rollout.device to cpu, or share: "
        "placement: collocated takes turns on the same devices, and with placement: split placement.devices may name "
        "one twice",
    )


def _too_few_to_share(config: Config, ranks: int, each: int, shared: int) -> ConfigError:
    """Generators that share need more devices than the learner has."""
    hybrid = config.placement.mode == "hybrid"
    key = "placement.shared_generators" if hybrid else "rollout.replicas"
    fit = ranks // each
    hint = f"{key}: {fit} fit, or learner.ranks: {shared * each}"
    if not fit:
        hint = f"set learner.ranks: {each}, or divide the model of a generator over {ranks} device(s)"
    return ConfigError(
        f"placement.mode is {config.placement.mode}: {shared} generator(s) with {each} device(s) each do not fit the "
        f"learner's {ranks}",
        hint=hint,
    )


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices)) if devices else "CPU"
