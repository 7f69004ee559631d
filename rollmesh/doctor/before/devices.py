"""CUDA devices of this machine: driver and torch fit one another, and no one else computes on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.doctor.findings import Finding, not_checked, note, ok, problem, warning
from rollmesh.launcher.placement import nvidia_smi
from rollmesh.launcher.placement.devices import device_plan
from rollmesh.launcher.placement.visible import has_driver
from rollmesh.mesh.config.models import Config

CHECK = "devices"
_DEADLINE_S = 120.0
_PROBE = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.device_count()]))"
# Share of a device's memory that a desktop or a context without data may take.
_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch of one interpreter.

    Attributes:
        field: the key that names the interpreter.
        version: of torch.
        cuda: version of CUDA that it was built for; None: without CUDA.
        devices: that it can use.
    """

    field: str
    version: str
    cuda: str | None
    devices: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The devices, as driver and torch see them.

    Attributes:
        driver: NVIDIA's driver is installed.
        driver_cuda: newest version of CUDA that it runs; empty: not known.
        builds: of the interpreters that may use devices.
        used: bytes in use of each device, and its size; empty: not known.
        wants_cuda: a part of the run is configured for CUDA, and not for whatever is there.
    """

    driver: bool
    driver_cuda: str
    builds: Sequence[TorchBuild]
    used: Sequence[tuple[int, int]]
    wants_cuda: bool


def check_devices(config: Config) -> Iterator[Finding]:
    """Devices, and who uses them; then their assignment to the run's processes."""
    facts = gather(config)
    yield from judge(facts)
    # Refuses what cannot be, with the numbers that would do.
    yield ok(CHECK, device_plan(config).describe())


def gather(config: Config) -> DeviceFacts:
    """Asks the driver, and torch in each interpreter where there is a driver."""
    learner, rollout = config.learner, config.rollout
    wants = "cuda" in (learner.device, rollout.device)
    driver = has_driver()
    builds: dict[Path | None, TorchBuild] = {}
    for key, device, python in (
        ("learner.python", learner.device, learner.python),
        ("rollout.python", rollout.device, rollout.python),
    ):
        if device != "cpu" and driver and python not in builds:
            builds[python] = _torch_of(key, python)
    used = nvidia_smi.device_use() if driver else []
    return DeviceFacts(driver, _driver_cuda() if driver else "", list(builds.values()), used, wants)


def judge(facts: DeviceFacts) -> Iterator[Finding]:
    """Says what does not fit."""
    if not facts.driver:
        if facts.wants_cuda:
            yield problem(
                CHECK,
                "learner.device or rollout.device is cuda, and this machine has no NVIDIA driver",
                "install the driver (in a container: --gpus all), or set both to cpu",
            )
        return
    for build in facts.builds:
        yield from _judge_build(build, facts)
    if not facts.used:
        yield not_checked(CHECK, "nvidia-smi does not answer, so it is not known who uses the devices")
    for number, (used, size) in enumerate(facts.used):
        if size and used > _IDLE_SHARE * size:
            yield warning(
                CHECK,
                f"device {number}: {used / 2**30:.1f} of {size / 2**30:.1f} GiB are in use already",
                "`nvidia-smi` names the processes: end them, or choose others with CUDA_VISIBLE_DEVICES or "
                "placement.devices",
                device=number,
                used_bytes=used,
            )


def _judge_build(build: TorchBuild, facts: DeviceFacts) -> Iterator[Finding]:
    if build.cuda is None:
        yield problem(
            CHECK,
            f"{build.field}: torch {build.version} is built without CUDA, and this machine has NVIDIA devices",
            "install a CUDA build of torch there (pytorch.org), or set learner.device=cpu and rollout.device=cpu",
        )
    elif facts.driver_cuda and _number(build.cuda)[:1] > _number(facts.driver_cuda)[:1]:
        yield problem(
            CHECK,
            f"{build.field}: torch {build.version} is built for CUDA {build.cuda}, and the driver runs CUDA "
            f"{facts.driver_cuda} at most",
            f"update NVIDIA's driver, or install torch for CUDA {facts.driver_cuda.partition('.')[0]}",
        )
    elif not build.devices:
        yield problem(
            CHECK,
            f"{build.field}: torch {build.version} sees no device, though there is a driver",
            "is CUDA_VISIBLE_DEVICES empty, or the container started without --gpus? `nvidia-smi` lists the devices",
        )
    else:
        yield note(CHECK, f"{build.field}: torch {build.version} for CUDA {build.cuda}, {build.devices} device(s)")


def _torch_of(key: str, python: Path | None) -> TorchBuild:
    command = [str(python or sys.executable), "-c", _PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    version, cuda, devices = json.loads(done.stdout.splitlines()[-1])
    return TorchBuild(key, version, cuda, devices)


def _driver_cuda() -> str:
    found = re.search(r"CUDA Version:\s*([\d.]+)", nvidia_smi.overview())
    return found[1] if found else ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
