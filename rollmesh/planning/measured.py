"""The memory that a run took, from its folder, compared with the plan's: host memory by service, and that of devices.

Host memory is resident memory at its peak, all processes of a service together. A device's is that of tensors, on the
rank that had most in any step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import DataError
from rollmesh.planning.host import of_generator, of_learner
from rollmesh.planning.plan import DTYPE_BYTES, Plan, device_of
from rollmesh.report.summary import read_summary

_GIB = 1 << 30
_DEVICE_METRIC = "perf/max_memory_allocated_gb"
_GENERATOR = re.compile(r"(?:generator|shared)-\d+")
_LEARNER, _GENERATORS = "learner", "generator"


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that has ended.

    Attributes:
        folder: of the run.
        peak_bytes: by service.
        device_bytes: of a rank's device; None: it computed on CPUs.
    """

    folder: str
    peak_bytes: dict[str, int]
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A memory, as planned and as measured.

    Attributes:
        name: of the service and of its memory.
        planned: bytes; None: it has no plan.
        measured: bytes.
        ratio: planned over measured.
    """

    name: str
    planned: int | None
    measured: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run compared with its plan."""

    folder: str
    rows: tuple[Compared, ...]

    def lines(self) -> Iterator[str]:
        """The comparison as lines for a terminal."""
        cells = [("GiB at the peak", "planned", "measured", "planned / measured")]
        for row in self.rows:
            planned = "-" if row.planned is None else f"{row.planned / _GIB:.2f}"
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
            cells.append((row.name, planned, f"{row.measured / _GIB:.2f}", ratio))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        yield f"measured in {self.folder}:"
        for first, *rest in cells:
            numbers = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
            yield "  ".join([f"  {first.ljust(widths[0])}", *numbers])


def read_measured(folder: Path) -> MeasuredRun:
    """Reads what a run took.

    Raises:
        DataError: it has not ended, or no such folder.
    """
    summary = read_summary(folder)
    if not summary.peak_memory_mb:
        raise DataError(f"{folder} has no peak memory", hint="it is written when a run ends")
    services = {name: round(size * (1 << 20)) for name, size in summary.peak_memory_mb.items()}
    device = summary.speed.get(_DEVICE_METRIC)
    return MeasuredRun(str(folder), services, None if device is None else round(device * _GIB))


def compare(run: MeasuredRun, config: Config, plan: Plan) -> ComparedRun:
    """Compares a run with the plan of a configuration, planned services first."""
    return ComparedRun(run.folder, tuple(_rows(run, config, plan)))


def _rows(run: MeasuredRun, config: Config, plan: Plan) -> Iterator[Compared]:
    host = _hosts(config, plan)
    planned = {name: host.get(_GENERATORS if _GENERATOR.fullmatch(name) else name) for name in run.peak_bytes}
    for name in sorted(planned, key=lambda name: (planned[name] is None, name)):
        yield _row(f"{name}, host memory", planned[name], run.peak_bytes[name])
    if run.device_bytes is not None:
        on_device = device_of(config.learner.device, plan.cluster) == "cuda"
        yield _row("learner, memory of a device", plan.learner_peak if on_device else None, run.device_bytes)


def _row(name: str, planned: int | None, measured: int) -> Compared:
    return Compared(name, planned, measured, None if planned is None or not measured else planned / measured)


def _hosts(config: Config, plan: Plan) -> dict[str, int]:
    """Bytes of host memory of the learner on the first rank's node, and of one generator there."""
    placement, cluster = plan.placement, plan.cluster
    setups = [role.setup for role in plan.roles]
    travelling = DTYPE_BYTES[config.model.dtype]
    ranks = placement.ranks_per_node
    learner = sum(of_learner(config, setups, setups[0].shape, travelling, placement).values()) + ranks * cluster.process
    if device_of(config.learner.device, cluster) == "cpu":
        learner += ranks * plan.learner_peak
    if plan.generator is None:
        return {_LEARNER: learner}
    received = of_generator(config, setups[0].shape, travelling, same_node=True)
    generator = sum(received.values()) + max(placement.devices_per_generator, 1) * cluster.process
    if device_of(config.rollout.device, cluster) == "cpu":
        generator += plan.generator.total
    return {_LEARNER: learner, _GENERATORS: generator}
