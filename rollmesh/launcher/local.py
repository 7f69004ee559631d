"""`rollmesh run`: a whole mesh on this machine, from an empty or used run folder to its summary.

Invariants: one launcher per run folder; every service it started has ended when `LocalRun.run` returns; summary and
report are written from what the buffer and the metrics said last, also when the run was interrupted or failed: they
say which.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Any

from mesh.config.models import Config
from mesh.errors import RollmeshError
from rollmesh.launcher import folder as folders
from rollmesh.launcher.memory import MemoryWatch
from rollmesh.launcher.meshlog import MeshLog
from rollmesh.launcher.monitor import EVAL, TRAIN, MeshView, Snapshot
from rollmesh.launcher.preflight import check_run, lowered_durability
from rollmesh.launcher.services import ServiceCatalogue, drain_order, mesh_address, thread_plan
from rollmesh.launcher.supervisor import Observer, Supervisor
from rollmesh.launcher.view import View, open_view
from rollmesh.report.html import write_report
from rollmesh.report.metrics import MetricsTail
from rollmesh.report.summary import FinalState, Summary, build_summary, write_summary

_LOOK_EVERY_S = 1.0


def run_locally(config: Config) -> int:
    """Runs the mesh with a view for the terminal; returns the command's exit status.

    Raises:
        RollmeshError: what ended the run early.
    """
    check_run(config)
    view = open_view(config.logging.console_every_steps)
    try:
        run = LocalRun(config, view)
        asyncio.run(run.run(handle_signals=True))
    finally:
        view.close()
    return 128 + signal.SIGINT if run.interrupted else 0


class LocalRun:
    """One run of a mesh on this machine.

    Args:
        config: the run.
        view: shown events and figures.
    """

    def __init__(self, config: Config, view: View) -> None:
        self._config = config
        self._view = view
        self._folder = config.run.folder
        self._final = FinalState()
        self._announced = asyncio.Event()
        self._supervisor = Supervisor(
            self._folder,
            security=config.security,
            max_restarts=config.resources.max_restarts,
            frozen_after_s=config.resources.frozen_after_s,
            observer=Observer(event=view.event, tail=view.tail),
            before_last=self._collect,
        )
        self._memory = MemoryWatch(self._supervisor.pids)

    @property
    def interrupted(self) -> bool:
        return self._supervisor.interrupted

    def interrupt(self) -> None:
        """Asks for an orderly end, a second time for a quick one. On the event loop's thread."""
        self._supervisor.interrupt()

    async def run(self, *, handle_signals: bool) -> Summary:
        """Starts everything, waits for the learner to finish, ends everything.

        Args:
            handle_signals: take SIGINT and SIGTERM as the wish to end (main thread only).

        Raises:
            RollmeshError: what ended the run early.
        """
        with folders.locked(self._folder):
            resumed = folders.was_used(self._folder)
            if lowered := lowered_durability(self._config):
                self._view.event(lowered)
            config_path = folders.write_config(self._config)
            plan = thread_plan(self._config)
            config = self._config
            self._view.event(f"run {config.run.name}: {'going on' if resumed else 'starting'} in {self._folder}")
            self._view.event(plan.describe(config.learner.ranks, config.rollout.replicas))
            # With a Redis of its own, what held this run before was this machine's and is gone: the lock says so.
            takeover = resumed and config.buffer.redis is None
            catalogue = ServiceCatalogue(config, config_path, plan, resumed=takeover)
            started = time.time()
            with _signals(self._supervisor.interrupt) if handle_signals else contextlib.nullcontext():
                watching = [asyncio.create_task(self._memory.run()), asyncio.create_task(self._watch())]
                try:
                    await self._supervisor.run(
                        [
                            catalogue.buffer,
                            *([catalogue.further_fronts] if config.buffer.fronts > 1 else []),
                            lambda: catalogue.others(self._announce()),
                        ],
                        drain_order,
                    )
                    self._final.ended = "interrupted" if self.interrupted else "finished"
                except RollmeshError as error:
                    self._final.ended = f"error {error.code}: {error}"
                    raise
                finally:
                    for task in watching:
                        task.cancel()
                    await asyncio.gather(*watching, return_exceptions=True)
                    folders.remove_mesh(self._folder)
                    self._final.peak_memory_bytes = self._memory.peaks
                    self._final.wall_s = time.time() - started
                    summary = self._conclude()
            return summary

    def _conclude(self) -> Summary:
        """Writes the summary and the report, and shows the former; a disk that takes neither hides no error."""
        try:
            summary = write_summary(self._folder, self._config, self._final)
            report = f"report: {write_report(self._folder)}"
        except OSError as error:
            summary = build_summary(self._folder, self._config, self._final)
            report = f"summary and report are not written: {error.strerror or error}"
        for line in (*summary.lines(), report):
            self._view.event(line)
        return summary

    def _mesh_address(self) -> str:
        return mesh_address(self._supervisor.address, self._config)

    def _announce(self) -> str:
        address = self._mesh_address()
        folders.write_mesh(self._folder, address)
        self._announced.set()
        return address

    async def _collect(self) -> None:
        """Reads the final figures: everybody has left, and the buffer still answers."""
        self._memory.look()
        address = self._mesh_address()
        if not address:
            return
        async with MeshView(address, self._config.security) as mesh:
            for table in (TRAIN, EVAL):
                try:
                    self._final.tables[table] = await mesh.describe(table)
                    self._final.ledgers[table] = await mesh.ledger(table, failed_limit=20)
                except RollmeshError as error:
                    self._view.event(f"no final figures of table {table}: {error.message}")

    async def _watch(self) -> None:
        """Feeds the view and `mesh.jsonl` until cancelled."""
        metrics = MetricsTail(self._folder / folders.METRICS, from_end=True)
        log = MeshLog(self._folder)
        latest = Snapshot(trouble="starting")
        await self._announced.wait()
        async with MeshView(self._mesh_address(), self._config.security) as mesh:
            while True:
                records = metrics.read()
                seen = await _look(mesh)
                seen.follow(latest, records)
                latest = seen
                latest.generated_tokens = log.add(latest, time.time())
                self._view.update(latest, records)
                await asyncio.sleep(_LOOK_EVERY_S)


async def _look(mesh: MeshView) -> Snapshot:
    try:
        return await mesh.look()
    except RollmeshError as error:
        return Snapshot(trouble=error.message)


@contextlib.contextmanager
def _signals(interrupt: Any) -> Any:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
