"""The placement of one run as the launcher handles it: kept, as configured, or found by trials."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from rollmesh.launcher.folder import write_launch
from rollmesh.launcher.memory import MemoryWatch
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.services import LEARNER, ServiceCatalogue, drain_order
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.launcher.trials.candidates import Candidate, candidates
from rollmesh.launcher.trials.memory import refused_by_plan, refused_together
from rollmesh.launcher.trials.opening import chosen_before, digest_here
from rollmesh.launcher.trials.record import PlacementRecord
from rollmesh.launcher.trials.trials import MeshControl, Trials
from rollmesh.mesh.config.generator_places import generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.membership import SHARES_DEVICES
from rollmesh.mesh.runtime.threads import available_cores


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
        self._kept = PlacementRecord(config.placement.mode, asked.placement.mode)

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
            least = self._asked.placement.trial_batches
            self._report(f"placement auto: measures at least {least} batches in turns, then tries what may be faster")
        with contextlib.suppress(OSError):
            self._kept.write(self._asked.run.folder)

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
        if self._asked.placement.mode != "auto" or self._kept.decided:
            return
        found, left_out = candidates(self._asked, self._visible, available_cores())

        async def place(candidate: Candidate) -> None:
            before, self.config = self.config, candidate.config
            ending = [LEARNER, *(place.name for place in generator_places(before))]
            catalogue.place(candidate.config, candidate.threads, candidate.devices)
            write_launch(candidate.config)
            memory.rules = replace(memory.rules, in_turns=candidate.config.placement.shares_devices)
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

        began = time.monotonic()
        await supervisor.until_healthy([LEARNER, *(place.name for place in generator_places(self.config))])
        started_s = time.monotonic() - began
        control = MeshControl(
            place, lambda: supervisor.trial_error, supervisor.keep, strangers, refusal, self._report, started_s
        )
        self._trials = Trials(self._asked, found, left_out, digest_here(self._asked), control)
        await self._trials.run()
