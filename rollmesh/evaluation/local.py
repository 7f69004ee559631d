"""An evaluation on this machine: buffer, generators, rewards, and an evaluator in the learner's place.

Invariants: one launcher per folder; every service that it started has ended when `LocalEvaluation.run` returns.
Responses are durable as they come: the same command continues with what is missing, after whatever end.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from pathlib import Path

from rollmesh.evaluation.model_choice import ModelChoice
from rollmesh.launcher import folder as folders
from rollmesh.launcher.console.output import stderr_into
from rollmesh.launcher.console.view import View
from rollmesh.launcher.events import LOG, EventLog
from rollmesh.launcher.local import handling_signals
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.run_secrets import make_secrets, with_own_secrets
from rollmesh.launcher.service_process import ServiceSpec, log_file
from rollmesh.launcher.services import REDIS_FOLDER, ServiceCatalogue, drain_order, mesh_address
from rollmesh.launcher.supervisor import Observer, Supervisor
from rollmesh.learner.standalone.response_file import RESPONSES
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.rpc.held_ports import HeldPorts
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.threads import ThreadPlan, available_cores, plan_threads
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY, sweep

_LOOK_EVERY_S = 15.0


class LocalEvaluation:
    """The pass of one model over one file of prompts.

    Args:
        config: of the evaluation (`evaluation_config`).
        choice: the model.
        view: shows events.
        prepared: results of the checks.
        asked: prompts of the evaluation.
        with_log_probs: token ids and log-probs are stored too.
        fork_server: forks services if that is possible; None: all are executed.
    """

    def __init__(
        self,
        config: Config,
        choice: ModelChoice,
        view: View,
        prepared: Preparation,
        *,
        asked: int,
        with_log_probs: bool,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._config = config = with_own_secrets(config)
        self._folder = config.run.folder
        self._choice = choice
        self._prepared = prepared
        self._asked = asked
        self._with_log_probs = with_log_probs
        self._events = EventLog(view, self._folder)
        self._supervisor = Supervisor(
            self._folder,
            security=config.security,
            max_restarts=config.resources.max_restarts,
            frozen_after_s=config.resources.frozen_after_s,
            observer=Observer(event=self._events.record, tail=view.tail),
            fork_server=fork_server,
        )

    @property
    def interrupted(self) -> bool:
        return self._supervisor.interrupted

    def interrupt(self) -> None:
        """Asks for an orderly end, a second time for a quick one. On the event loop's thread."""
        self._supervisor.interrupt()

    async def run(self, *, handle_signals: bool) -> None:
        """Starts everything, waits for the last response, ends everything.

        Args:
            handle_signals: see `rollmesh.launcher.local.LocalRun.run`.

        Raises:
            RollmeshError: what ended it early.
        """
        with folders.locked(self._folder), contextlib.ExitStack() as closers:
            make_secrets(self._folder)
            config_path = folders.write_launch(self._config)
            why = f" ({self._choice.reason})" if self._choice.reason else ""
            self._events.record(f"evaluates {self._choice.name}{why} on {self._config.data.held_out} in {self._folder}")
            self._events.record(self._prepared.devices.describe())
            for notice in self._prepared.notices:
                self._events.record(notice)
            ports = closers.enter_context(HeldPorts(self._config.network.host))
            if handle_signals:
                closers.enter_context(handling_signals(self._on_signal))
                closers.enter_context(stderr_into(log_file(self._folder, LOG)))
            catalogue = ServiceCatalogue(
                self._config, config_path, self._plan_threads(), self._prepared, ports, allow_changes=False
            )
            watching = asyncio.create_task(self._watch(), name="watch over the responses")
            try:
                await self._supervisor.run(
                    [catalogue.buffer, lambda: self._others(catalogue)],
                    drain_order,
                )
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                folders.remove_mesh(self._folder)
                # All that counts is in the file of responses.
                shutil.rmtree(self._folder / REDIS_FOLDER, ignore_errors=True)
                # An evaluator that was killed has left the weights in memory.
                sweep(SHARED_MEMORY)

    def _others(self, catalogue: ServiceCatalogue) -> list[ServiceSpec]:
        address = mesh_address(self._supervisor.address, self._config)
        folders.write_mesh(self._folder, address)
        return catalogue.around_evaluator(address, self._choice.weights, with_log_probs=self._with_log_probs)

    def _plan_threads(self) -> ThreadPlan:
        """All cores are the generators': the evaluator computes only before they begin."""
        return plan_threads(
            available_cores(),
            ranks=1,
            replicas=self._config.rollout.replicas,
            in_turns=True,
            learner=self._config.resources.learner_threads,
            generator=self._config.resources.generator_threads,
        )

    def _on_signal(self, _number: signal.Signals) -> None:
        self._supervisor.interrupt()

    async def _watch(self) -> None:
        """Reports how many prompts have their responses, until cancelled."""
        counter, before, began = _LineCounter(self._folder / RESPONSES), -1, time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            count = counter.count()
            if count != before:
                before = count
                self._events.record(
                    f"{count} of {self._asked} prompts have their responses after {time.monotonic() - began:.0f} s"
                )


class _LineCounter:
    """Counts the lines of a growing file, each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._lines = 0

    def count(self) -> int:
        """Lines so far."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            while piece := file.read(1 << 20):
                self._read += len(piece)
                self._lines += piece.count(b"\n")
        return self._lines
