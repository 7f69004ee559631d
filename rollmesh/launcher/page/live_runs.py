"""Runs for the page: their folders, and the meshes of those in progress.

Invariant: a mesh is asked while a page is open, and only then. One that does not answer is shown as such.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.dashboard.live import LiveMesh
from rollmesh.dashboard.readers import open_reader
from rollmesh.dashboard.run_view import RunView
from rollmesh.launcher.folder import read_mesh
from rollmesh.launcher.mesh_client import MeshClient, Snapshot
from rollmesh.launcher.placement.turns import turns_text
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import DataError, RollmeshError
from rollmesh.mesh.tables import FAILED_EXAMINED, TABLES
from rollmesh.protos import buffer_pb2, membership_pb2, weights_pb2
from rollmesh.run_files import RUN, is_in_use, read_launch, trained_by

# A ledger counts every group, and reports of pushes come from the learner's process.
_LEDGER_S, _PUSHES_S = 15.0, 5.0


class MeshFollower:
    """Reads one mesh again and again: its snapshot each time, costly answers less often.

    Args:
        client: of the mesh; closed by `close`.
    """

    def __init__(self, client: MeshClient) -> None:
        self._client = client
        self._pushes: weights_pb2.PushesResponse | None = None
        self._ledgers: dict[str, buffer_pb2.LedgerResponse] = {}
        self._asked: dict[str, float] = {}

    async def read(self) -> LiveMesh:
        """The mesh now; its trouble where it does not answer."""
        try:
            snapshot = await self._client.read_snapshot()
        except RollmeshError as error:
            return LiveMesh(trouble=error.message)
        if self._due("pushes", _PUSHES_S):
            try:
                self._pushes = await self._client.pushes(snapshot.members)
            except RollmeshError:
                self._pushes = None
        if self._due("ledgers", _LEDGER_S):
            try:
                self._ledgers = {name: await self._client.ledger(name, FAILED_EXAMINED) for name in TABLES}
            except RollmeshError:
                self._ledgers = {}
        return live_mesh(snapshot, self._pushes, self._ledgers)

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()

    def _due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._asked.get(what, -every_s) < every_s:
            return False
        self._asked[what] = now
        return True


def live_mesh(
    snapshot: Snapshot,
    pushes: weights_pb2.PushesResponse | None = None,
    ledgers: Mapping[str, buffer_pb2.LedgerResponse] | None = None,
) -> LiveMesh:
    """A snapshot as the page shows it, with its waits in words."""
    return LiveMesh(
        table=snapshot.table,
        members=snapshot.members,
        waits=snapshot.who_waits(),
        stall=snapshot.stall(),
        unscored=snapshot.without_reward(),
        phase=snapshot.learner_phase,
        turns="" if snapshot.turns is None else turns_text(snapshot.turns, starting=snapshot.generators_start),
        trouble=snapshot.trouble,
        run_finished=snapshot.run_finished,
        pushes=pushes,
        ledgers=ledgers or {},
    )


class FolderRuns:
    """Runs by their folders, in progress or ended.

    Args:
        folders: of runs.
        security: credentials for their meshes; None: those of each run.

    Raises:
        DataError: a folder is not that of a run.
    """

    def __init__(self, folders: Sequence[Path], security: SecuritySection | None = None) -> None:
        self._readers = [open_reader(folder) for folder in folders]
        self._folders = list(folders)
        self._security = security
        self._followers: dict[Path, tuple[str, MeshFollower]] = {}
        self._answers: dict[Path, LiveMesh] = {}

    async def ask(self) -> None:
        """Asks the meshes of runs in progress, concurrently: one that does not answer takes its whole deadline."""
        await asyncio.gather(*map(self._ask, self._folders))

    async def _ask(self, folder: Path) -> None:
        # A launcher that serves the page would stand still with a disk that hangs.
        address = await asyncio.to_thread(_address, folder)
        before = self._followers.get(folder)
        if before is not None and before[0] != address:
            await before[1].close()
            del self._followers[folder]
        if not address:
            self._answers.pop(folder, None)
            return
        if folder not in self._followers:
            security = self._security or (await asyncio.to_thread(read_launch, folder)).security
            self._followers[folder] = (address, MeshFollower(MeshClient(address, security)))
        self._answers[folder] = await self._followers[folder][1].read()

    def read(self) -> Sequence[RunView]:
        """Reads what is new in the folders."""
        for reader, folder in zip(self._readers, self._folders, strict=True):
            reader.refresh()
            reader.view.mesh = self._answers.get(folder)
        return [reader.view for reader in self._readers]

    async def close(self) -> None:
        """Closes the channels to meshes."""
        for _, follower in self._followers.values():
            await follower.close()


def _address(folder: Path) -> str:
    """The mesh of a run in progress; empty where there is none."""
    if trained_by(folder) is not None or not is_in_use(folder):
        return ""
    try:
        return read_mesh(folder)
    except DataError:
        return ""


class RemoteRun:
    """A mesh without its run folder: what its answers say, and curves of the time in which it was looked at.

    Args:
        client: of the mesh.
        name: of the run.
    """

    def __init__(self, client: MeshClient, name: str) -> None:
        self._follower = MeshFollower(client)
        self._view = RunView(name, command=RUN, in_progress=True)
        self._answer = LiveMesh(trouble="not asked yet")

    async def ask(self) -> None:
        """Asks the mesh."""
        self._answer = await self._follower.read()

    def read(self) -> Sequence[RunView]:
        """The mesh now, with the values that its learner has reported since the page was opened."""
        self._view.mesh = self._answer
        _append_report(self._view.steps, self._answer)
        return [self._view]

    async def close(self) -> None:
        """Closes the channel."""
        await self._follower.close()


def _append_report(steps: RecordColumns, mesh: LiveMesh) -> None:
    """Adds the learner's newest step, as its heartbeat has it, unless it is there."""
    for member in mesh.of_role(membership_pb2.ROLE_LEARNER):
        step = member.gauges.get("steps")
        if step and "critic/score/mean" in member.gauges and step != steps.last("step"):
            values = {name: value for name, value in member.gauges.items() if not name.startswith("phase/")}
            steps.append({**values, "step": step, "time": time.time()})
