"""The diagnosis of a mesh in progress."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.doctor.after.bottleneck import judge_time
from rollmesh.doctor.after.incidents import judge_ledger, judge_restarts
from rollmesh.doctor.after.learning import judge_learning
from rollmesh.doctor.after.losses import judge_losses
from rollmesh.doctor.after.run_records import RunRecords
from rollmesh.doctor.after.time_use import WAIT, TimeUse, mesh_use, time_use
from rollmesh.doctor.findings import Diagnosis, Finding, not_checked
from rollmesh.doctor.live.members import judge_members
from rollmesh.doctor.live.reach import Examined, examine_all, judge_clocks, judge_reach
from rollmesh.launcher.mesh_client import MeshClient, Snapshot
from rollmesh.launcher.mesh_log import entry_of
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.tables import TABLES

_LEDGER = "ledger"
_RECORDS = "records"


def diagnose_mesh(address: str, security: SecuritySection, folder: Path | None, *, watch_s: float) -> Diagnosis:
    """Examines a mesh in progress; the records of its run too, where their folder is known.

    Args:
        address: of the mesh.
        security: of this caller, an operator.
        folder: of the run; None: it is elsewhere.
        watch_s: seconds between two looks, over which shares of time are measured.

    Raises:
        RollmeshError: the mesh does not answer.
    """
    return Diagnosis(f"mesh {address}", asyncio.run(_examine(address, security, folder, watch_s)))


async def _examine(address: str, security: SecuritySection, folder: Path | None, watch_s: float) -> list[Finding]:
    async with MeshClient(address, security) as mesh:
        began, first = time.time(), await mesh.read_snapshot()
        examined, ledger = await asyncio.gather(examine_all(first.members, security), _recount(mesh))
        await asyncio.sleep(max(0.0, began + watch_s - time.time()))
        ended, last = time.time(), await mesh.read_snapshot()
    findings = [*judge_members(last, first), *judge_clocks(examined), *judge_reach(examined)]
    findings += [ledger] if isinstance(ledger, Finding) else judge_ledger(ledger)
    # Services that start wait for one another.
    trains = first.table is not None and first.table.policy.version > 0
    use = watched((began, first), (ended, last)) if trains else None
    return [*findings, *_of_run(folder, use, examined)]


async def _recount(mesh: MeshClient) -> Mapping[str, list[str]] | Finding:
    try:
        return {table: list((await mesh.ledger(table)).discrepancies) for table in TABLES}
    except RollmeshError as error:
        return not_checked(_LEDGER, error.message, error.hint)


def watched(first: tuple[float, Snapshot], last: tuple[float, Snapshot]) -> TimeUse:
    """The shares of time between two looks at a mesh.

    Args:
        first, last: Unix seconds, and what was seen then.
    """
    entries: list[Mapping[str, Any]] = [entry_of(snapshot, now) for now, snapshot in (first, last)]
    seconds = max(1e-6, last[0] - first[0])
    waited = max(0.0, entries[1]["learner_wait_s"] - entries[0]["learner_wait_s"]) / seconds
    return mesh_use(entries, TimeUse(0, seconds, {WAIT: min(1.0, waited)}))


def _of_run(folder: Path | None, use: TimeUse | None, examined: Sequence[Examined]) -> Iterator[Finding]:
    """Rules over the records so far; without them, over the watched time alone."""
    if folder is not None:
        run = RunRecords.read(folder)
        yield from judge_restarts(run.restarts)
        yield from judge_time(time_use(run.steps, run.snapshots) or use, run.config, run.swaps.get("swap_share"))
        yield from judge_losses(run)
        yield from judge_learning(run)
        return
    yield not_checked(
        _RECORDS, "they are in the run's folder, which is elsewhere", "there `rollmesh doctor RUN` reads them too"
    )
    config_json = next((one.config_json for one in examined if one.config_json), "")
    if config_json:
        yield from judge_time(use, load_config(json.loads(config_json)))
    else:
        yield not_checked("time", "no front has told the run's configuration")
