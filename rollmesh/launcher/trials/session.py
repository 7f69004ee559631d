"""The placement of one run as the launcher handles it: kept, as configured, or found by trials."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil

from rollmesh.launcher.folder import write_launch
from rollmesh.launcher.memory import MemoryWatch
from rollmesh.launcher.mesh_client import MeshClient, Snapshot
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.services import LEARNER, ServiceCatalogue, drain_order
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.launcher.trials.candidates import Candidate, candidates
from rollmesh.launcher.trials.control import MeshControl
from rollmesh.launcher.trials.disturbances import MeshState, batches_of_data, disturbance, groups_in_progress
from rollmesh.launcher.trials.measuring import least_batches
from rollmesh.launcher.trials.memory import refused_by_plan, refused_together
from rollmesh.launcher.trials.opening import chosen_before, digest_here, steps_left
from rollmesh.launcher.trials.record import PlacementRecord
from rollmesh.launcher.trials.trials import Trials
from rollmesh.mesh.config.derived.generator_places import generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import SHARES_DEVICES
from rollmesh.mesh.runtime.threads import available_cores
from rollmesh.mesh.tables import EVAL

_ASK_EVERY_S = 1.0


class RunPlacement:
    """The placement of one run.

    Args:
        asked: the configuration as the user gave it, with the run's own secrets.
        config: that in which the run begins (`opening`).
        devices: of the services at the beginning.
        report: shows an event.

    Attributes:
        config: of the run in its present placement.
    """

    def __init__(self, asked: Config, config: Config, devices: DevicePlan, report: Callable[[str], None]) -> None:
        self._asked = asked
        self.config = config
        self._visible = devices.visible
        self._report = report
        self._trials: Trials | None = None
        self._kept = PlacementRecord(config.placement.mode, asked.placement.mode, name=config.placement.mode)

    @property
    def record(self) -> PlacementRecord:
        """The present state."""
        return self._kept if self._trials is None else self._trials.record

    def begin(self) -> None:
        """Reports and records the placement of the beginning; the run folder is this launcher's."""
        before = chosen_before(self._asked) if self._asked.placement.mode == "auto" else None
        if before is not None:
            self._kept = before
            self._report(f"placement {before.text}, as measured before")
            return
        if self._asked.placement.mode == "auto":
            self._report(self._intention())
        with contextlib.suppress(OSError):
            self._kept.write(self._asked.run.folder)

    def _intention(self) -> str:
        first, trial = least_batches(self._asked)
        left = steps_left(self._asked)
        if left < first + trial:
            why = f"{left} steps are left, and a measurement with one trial takes {first + trial} or more"
            self._kept = replace(self._kept, undecided=why)
            return f"placement auto: {why}, so the run stays in turns"
        return f"placement auto: measures {first} batches or more in turns, then tries what may be faster"

    async def run(
        self,
        supervisor: Supervisor,
        catalogue: ServiceCatalogue,
        mesh: Callable[[], str],
        memory: MemoryWatch,
        latest: Callable[[], Snapshot],
    ) -> None:
        """Tries placements where that was asked for, and nothing is known yet; returns once one stays.

        Args:
            supervisor: of the services.
            catalogue: of their specifications.
            mesh: gives the mesh address.
            memory: watches the services.
            latest: gives the last snapshot of the mesh.
        """
        if self._asked.placement.mode != "auto" or self._kept.decided or self._kept.undecided:
            return
        found, left_out = candidates(self._asked, self._visible, available_cores())

        async def place(candidate: Candidate) -> None:
            before, self.config = self.config, candidate.config
            ending = [LEARNER, *(place.name for place in generator_places(before))]
            catalogue.place(candidate.config, candidate.threads, candidate.devices)
            write_launch(candidate.config)
            memory.rules = replace(memory.rules, in_turns=candidate.config.placement.learner_takes_turns)
            await supervisor.replace(ending, catalogue.placed(mesh()), drain_order)

        async def refusal(candidate: Candidate) -> str:
            if not self._visible.names:
                return refused_together(memory.by_phase.to_mib())
            scratch = self._asked.run.folder / "services" / "candidate.yaml"
            return await refused_by_plan(candidate.config, len(self._visible.names), scratch)

        def strangers() -> list[str]:
            own = set(supervisor.pids().values())
            sharing = [one for one in latest().generators() if one.gauges.get(SHARES_DEVICES)]
            return [one.member_id for one in sharing if one.pid not in own]

        await supervisor.until_healthy([LEARNER, *(place.name for place in generator_places(self.config))])
        launched = _started_at(supervisor.pids().get(LEARNER))
        async with MeshClient(mesh(), self._asked.security) as client:
            looks = _Looks(client)

            async def look() -> MeshState:
                names = [place.name for place in generator_places(self.config)]
                return await looks.state(latest(), supervisor.pids(), names)

            control = MeshControl(
                place, lambda: supervisor.trial_error, supervisor.keep, strangers, refusal, look, self._report, launched
            )
            self._trials = Trials(self._asked, found, left_out, digest_here(self._asked), control)
            await self._trials.run()


def _started_at(pid: int | None) -> float:
    """Unix time at which a process was started. The first learner's has loaded its code during the checks already."""
    try:
        return psutil.Process(pid).create_time() if pid is not None else time.time()
    except psutil.Error:
        return time.time()


class _Looks:
    """Looks at the mesh; whether it evaluates is asked for once a second.

    Args:
        client: of the mesh.
    """

    def __init__(self, client: MeshClient) -> None:
        self._client = client
        self._evaluates, self._asked_at = False, -math.inf

    async def state(self, seen: Snapshot, pids: Mapping[str, int], generators: Sequence[str]) -> MeshState:
        now = time.monotonic()
        if now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            with contextlib.suppress(RollmeshError):
                self._evaluates = groups_in_progress(await self._client.describe(EVAL)) > 0
        return MeshState(disturbance(seen, pids, generators), self._evaluates, batches_of_data(seen.table))
