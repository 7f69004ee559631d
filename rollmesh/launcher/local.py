"""`rollmesh run`: a whole mesh on this machine, from an empty or used run folder to its summary.

Invariants: one launcher per run folder; every service it started has ended when `LocalRun.run` returns. Summary and
report are written from the last values of the buffer and the metrics. They name the end of the run, also of one that
was interrupted or failed. This does not depend on a terminal or its reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rollmesh.checkpoint_choice import checkpoint_path
from rollmesh.dashboard.report import write_report
from rollmesh.launcher import folder as folders
from rollmesh.launcher.console.output import stderr_into
from rollmesh.launcher.console.quiet_notice import NoStepNotice, no_step_text
from rollmesh.launcher.console.slow_rewards_notice import SlowRewardsNotice, reward_wait_s, slow_rewards_text
from rollmesh.launcher.console.view import View, open_view
from rollmesh.launcher.events import LOG, EventLog
from rollmesh.launcher.memory import MemoryWatch, WatchRules
from rollmesh.launcher.mesh_client import MeshClient, Snapshot
from rollmesh.launcher.mesh_log import MeshLog
from rollmesh.launcher.page.run_page import serve_run_page
from rollmesh.launcher.placement.description import describe_turns
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.preflight.checks import check_code, check_files
from rollmesh.launcher.preflight.continuing import Continuation
from rollmesh.launcher.run_secrets import make_secrets, with_own_secrets
from rollmesh.launcher.service_process import log_file
from rollmesh.launcher.services import ServiceCatalogue, describe_threads, drain_order, mesh_address, thread_plan
from rollmesh.launcher.supervisor import Observer, Supervisor
from rollmesh.launcher.trials.opening import opening
from rollmesh.launcher.trials.session import RunPlacement
from rollmesh.learner.checkpoint.names import version_of
from rollmesh.learner.metrics.files import METRICS, SAMPLES
from rollmesh.learner.recovery.run_identity import RunRecord
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, RollmeshError
from rollmesh.mesh.rpc.held_ports import HeldPorts
from rollmesh.mesh.runtime.end_signals import end_signals
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.tables import FAILED_EXAMINED, TABLES, TRAIN
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY, sweep
from rollmesh.protos import buffer_pb2
from rollmesh.report.metrics import MetricsTail, Record, is_training
from rollmesh.report.summary import FinalState, Summary, build_summary, read_summary, write_summary
from rollmesh.run_files import SUMMARY

_LOOK_EVERY_S = 1.0


def run_locally(
    config: Config,
    *,
    fresh: bool = False,
    allow_changes: bool = False,
    from_checkpoint: str | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs the mesh with a view for the terminal; returns the command's exit status.

    Args:
        fresh, allow_changes, from_checkpoint, fork_server: see `LocalRun`.

    Raises:
        RollmeshError: what ended the run early.
    """
    check_files(config)
    first = opening(config, fresh=fresh)
    view = open_view(config)
    try:
        view.event("checks data, algorithm and reward functions")
        run = LocalRun(
            first,
            view,
            check_code(first, fresh=fresh, fork_server=fork_server),
            asked=config,
            fresh=fresh,
            allow_changes=allow_changes,
            from_checkpoint=from_checkpoint,
            fork_server=fork_server,
        )
        asyncio.run(run.run(handle_signals=True))
    finally:
        view.close()
    if not run.interrupted:
        return 0
    return 128 + (signal.SIGHUP if run.hung_up else signal.SIGINT)


class LocalRun:
    """A run of a mesh on this machine.

    Args:
        config: the run, in the placement in which it begins.
        view: shows events and metrics.
        prepared: results of the checks.
        asked: the run as the user gave it, where that leaves the placement open (`launcher.trials.opening`).
        fresh: start the run over; the folder that it has is kept under another name.
        allow_changes: continue it with another model or other data (`learner.recovery.run_identity`).
        from_checkpoint: checkpoint to continue from (`rollmesh.checkpoint_choice.checkpoint_path`); None: the last one.
        fork_server: forks services if that is possible; None: all are executed.

    Attributes:
        hung_up: the first request to end was the loss of the terminal.
    """

    def __init__(
        self,
        config: Config,
        view: View,
        prepared: Preparation,
        *,
        asked: Config | None = None,
        fresh: bool = False,
        allow_changes: bool = False,
        from_checkpoint: str | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._config = config = with_own_secrets(config)
        self._prepared = prepared
        self._fresh = fresh
        self._allow_changes = allow_changes
        self._start = checkpoint_path(config.run.folder, from_checkpoint) if from_checkpoint is not None else None
        self._view = view
        self._events = EventLog(view, config.run.folder)
        self._folder = config.run.folder
        self._placement = RunPlacement(with_own_secrets(asked or config), config, prepared.devices, self._events.record)
        self._final = FinalState()
        self._latest = Snapshot(trouble="starting", learner_starts=True)
        self._announced = asyncio.Event()
        self._asked = False
        self.hung_up = False
        self._supervisor = Supervisor(
            self._folder,
            security=config.security,
            max_restarts=config.resources.max_restarts,
            frozen_after_s=config.resources.frozen_after_s,
            observer=Observer(event=self._events.record, tail=view.tail),
            before_last=self._collect,
            fork_server=fork_server,
        )
        rules = WatchRules(self._folder, config.placement.learner_takes_turns, bool(prepared.devices.visible.names))
        self._memory = MemoryWatch(self._supervisor.pids, rules)

    @property
    def interrupted(self) -> bool:
        return self._supervisor.interrupted

    def interrupt(self) -> None:
        """Asks for an orderly end, a second time for a quick one. On the event loop's thread."""
        self._supervisor.interrupt()

    def _on_signal(self, number: signal.Signals) -> None:
        """A lost terminal signals twice, and with SIGTERM: neither it nor the first signal after it hurries."""
        again = self._asked and number != signal.SIGHUP
        self._asked = self._asked or number != signal.SIGHUP
        self.hung_up = self.hung_up or (not self.interrupted and number == signal.SIGHUP)
        if again or not self.interrupted:
            self._supervisor.interrupt()

    @contextlib.contextmanager
    def _owning_process(self) -> Iterator[None]:
        with handling_signals(self._on_signal), stderr_into(log_file(self._folder, LOG)):
            yield

    async def run(self, *, handle_signals: bool) -> Summary:
        """Starts everything, waits for the learner to finish, ends everything.

        Args:
            handle_signals: the process is the launcher's. SIGINT, SIGTERM and SIGHUP are the wish to end (main thread
                only), and stderr of libraries goes into the launcher's log.

        Raises:
            RollmeshError: what ended the run early.
        """
        config, record = self._config, _record(self._config)
        kept = self._set_aside(record)
        with folders.locked(self._folder):
            before = self._begin(record, kept)
            if before is not None and before.finished:
                return self._report_finished(before.finished)
            begun = folders.takeover_stamp(self._folder)
            make_secrets(self._folder)
            config_path = folders.write_launch(config)
            plan = thread_plan(config)
            self._events.record(describe_threads(config, plan))
            self._events.record(f"the learner trains with {config.learner.describe_engine('actor')}")
            self._events.record(self._prepared.devices.describe())
            self._events.record(describe_turns(config, self._prepared.devices))
            self._placement.begin()
            for notice in (*self._prepared.notices, *folders.permission_warnings(self._folder)):
                self._events.record(notice)
            started = time.time()
            with (
                HeldPorts(config.network.host) as ports,
                self._owning_process() if handle_signals else contextlib.nullcontext(),
            ):
                watching = [
                    asyncio.create_task(self._memory.run(), name="watch over memory"),
                    asyncio.create_task(self._watch(), name="watch over the mesh"),
                ]
                try:
                    catalogue = ServiceCatalogue(
                        config,
                        config_path,
                        plan,
                        self._prepared,
                        ports,
                        allow_changes=self._allow_changes,
                        start_from=self._start,
                    )
                    watching.append(asyncio.create_task(self._try_placements(catalogue), name="trials of placements"))
                    if (port := config.logging.dashboard_port) is not None:
                        page = serve_run_page(self._folder, port, self._view.event)
                        watching.append(asyncio.create_task(page, name="page of the run"))
                    for task in watching:
                        task.add_done_callback(self._report_failed_watch)
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
                    # A learner that was killed has left its last versions in memory.
                    sweep(SHARED_MEMORY)
                    self._final.peak_memory_bytes = self._memory.peaks
                    self._final.memory_by_phase_mb = self._memory.by_phase.to_mib()
                    self._final.wall_s = time.time() - started
                    self._final.placement = self._placement.record.to_summary()
                    summary = self._conclude(begun=begun != folders.takeover_stamp(self._folder))
            return summary

    def _set_aside(self, record: RunRecord) -> Path | None:
        """Renames the former folder of a run that starts over; returns its new place.

        Raises:
            ConfigError: its groups are in a Redis of the user's, and would be there still; or it is to continue.
        """
        if self._fresh and self._start is not None:
            raise ConfigError("--fresh: the run would have no checkpoint to continue from", hint="give either")
        groups_stay = self._config.buffer.redis is not None
        if not self._fresh and (groups_stay or self._start is not None or not self._starts_over(record)):
            return None
        if groups_stay:
            raise ConfigError(
                "--fresh: the groups of the run are in buffer.redis, where they stay", hint="choose another --run.name"
            )
        return folders.set_aside(self._folder, time.strftime("%Y%m%d-%H%M%S"))

    def _starts_over(self, record: RunRecord) -> bool:
        """True where the run's identity has changed and nothing was trained before."""
        before = Continuation.of(self._config, record.edited_files(), inputs_differ=record.inputs_differ())
        return before is not None and before.starts_over

    def _begin(self, record: RunRecord, kept: Path | None) -> Continuation | None:
        """Reports the begin or continuation of the run; returns the continuation.

        Raises:
            ConfigError: the run cannot be continued with this configuration.
        """
        record.check(allow_changes=self._allow_changes)
        before = Continuation.of(self._config, record.edited_files(), start_from=self._start)
        self._events.record(f"run {self._config.run.name}: {'continues' if before else 'starts'} in {self._folder}")
        if kept is not None:
            why = (
                "" if self._fresh else ", of which nothing was trained: model, data, algorithm or rewards have changed"
            )
            self._events.record(f"the former run is kept as {kept}{why}")
        for line in before.lines(named="name" in self._config.run.model_fields_set) if before else ():
            self._events.record(line)
        return before

    def _report_finished(self, why: str) -> Summary:
        """Reports that nothing is left to do; the run stays as it is."""
        self._events.record(
            f"nothing is started, the run has finished: {why}; more steps or another goal continue it, "
            "--run.name=NAME begins another run, --fresh starts this one over"
        )
        return read_summary(self._folder)

    def _conclude(self, *, begun: bool) -> Summary:
        """Writes the summary and the report, and shows the former; a disk that takes neither hides no error.

        Args:
            begun: a learner has taken the run over; otherwise the former summary stays.
        """
        if not begun and (self._folder / SUMMARY).exists():
            summary = build_summary(self._folder, self._config, self._final)
            self._events.record(f"ended: {summary.ended}; the run is as it was before")
            return summary
        try:
            summary = write_summary(self._folder, self._config, self._final)
            report = f"report: {write_report(self._folder, ended=True)}"
        except OSError as error:
            summary = build_summary(self._folder, self._config, self._final)
            report = f"summary and report are not written: {error.strerror or error}"
        again = (
            (f"{self._same_command()} continues the run {_place_of(summary)}",) if self.interrupted and begun else ()
        )
        for line in (*summary.lines(), report, *again):
            self._events.record(line)
        return summary

    def _same_command(self) -> str:
        """The command that continues the run: options that would undo what was trained since are left out."""
        undoing = "--fresh" if self._fresh else "--from-checkpoint" if self._start is not None else ""
        return f"the same command without {undoing}" if undoing else "the same command"

    def _mesh_address(self) -> str:
        return mesh_address(self._supervisor.address, self._config)

    def _announce(self) -> str:
        address = self._mesh_address()
        folders.write_mesh(self._folder, address)
        self._announced.set()
        return address

    async def _try_placements(self, catalogue: ServiceCatalogue) -> None:
        await self._announced.wait()
        await self._placement.run(self._supervisor, catalogue, self._mesh_address, self._memory, lambda: self._latest)

    async def _collect(self) -> None:
        """Reads the final counts: all members have left, and the buffer still answers."""
        await self._memory.sample()
        address = self._mesh_address()
        if not address:
            return
        async with MeshClient(address, self._config.security) as mesh:
            for table in TABLES:
                try:
                    self._final.tables[table] = await mesh.describe(table)
                    self._final.ledgers[table] = await mesh.ledger(table, failed_limit=FAILED_EXAMINED)
                except RollmeshError as error:
                    self._events.record(f"no final values of table {table}: {error.message}")

    async def _watch(self) -> None:
        """Feeds the view and `mesh.jsonl` until cancelled."""
        metrics = MetricsTail(self._folder / METRICS, from_end=True)
        samples = MetricsTail(self._folder / SAMPLES, from_end=True)
        log = MeshLog(self._folder, self._events.record)
        await self._announced.wait()
        # Ends of groups by reason before this launch; not known until the mesh answers.
        before: dict[str, int] | None = None
        quiet, slow = NoStepNotice(time.monotonic()), SlowRewardsNotice(time.monotonic())
        async with MeshClient(self._mesh_address(), self._config.security) as mesh:
            try:
                while True:
                    latest = await _read_snapshot(mesh)
                    latest.placement = self._placement.record.text
                    if before is None and latest.table is not None:
                        before = dict(latest.table.counts.reasons)
                    latest.generated_tokens = log.add(latest, time.time())
                    records = metrics.read()
                    self._show(latest, records, samples)
                    await self._report_no_step(quiet, mesh, latest, records, before or {})
                    if slow.due(reward_wait_s(latest), time.monotonic()):
                        self._events.record(slow_rewards_text(latest, self._config))
                    await asyncio.sleep(_LOOK_EVERY_S)
            finally:
                # Steps since the last look: the run may end at any time after them.
                self._show(self._latest, metrics.read(), samples)

    def _show(self, seen: Snapshot, records: Sequence[Record], samples: MetricsTail) -> None:
        """Shows the mesh as it was seen, with new records."""
        seen.follow(self._latest, records)
        seen.sample = next(reversed(samples.read()), seen.sample)
        self._latest = seen
        self._view.update(seen, records)
        self._events.check_view()
        for record in records:
            if warning := record.get("mismatch_warning"):
                self._events.record(str(warning))

    async def _report_no_step(
        self,
        quiet: NoStepNotice,
        mesh: MeshClient,
        seen: Snapshot,
        records: Sequence[Record],
        before: Mapping[str, int],
    ) -> None:
        """Reports a time without steps, and why; the view reports stalls, with the holders of groups."""
        now = time.monotonic()
        if any(map(is_training, records)):
            quiet.step(now)
        if seen.stalled_s or seen.run_finished or not (seconds := quiet.due(now)):
            return
        failed: Sequence[buffer_pb2.FailedGroup] = ()
        if seen.table is not None and seen.table.counts.failed:
            with contextlib.suppress(RollmeshError):
                failed = (await mesh.ledger(TRAIN, FAILED_EXAMINED)).failed
        self._events.record(no_step_text(seconds, seen, failed, before))

    def _report_failed_watch(self, task: asyncio.Task[None]) -> None:
        """Reports a watch that has failed: its silence would go unnoticed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.record(f"the {task.get_name()} has failed, the run continues without it: {error!r}")


def _place_of(summary: Summary) -> str:
    """The step from which a run continues, in words."""
    if summary.checkpoint is None:
        return "from its beginning: it has no checkpoint"
    step = version_of(Path(summary.checkpoint).name)
    return "from its newest checkpoint" if step is None else f"from step {step.version}, its newest checkpoint"


def _record(config: Config) -> RunRecord:
    model = Path(config.model.path)
    return RunRecord(config, model if model.is_dir() else None)


async def _read_snapshot(mesh: MeshClient) -> Snapshot:
    try:
        return await mesh.read_snapshot()
    except RollmeshError as error:
        return Snapshot(trouble=error.message)


@contextlib.contextmanager
def handling_signals(signalled: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hands the signals that end a run to `signalled`; see `end_signals`."""
    loop = asyncio.get_running_loop()
    numbers = end_signals(hangup=True)
    for number in numbers:
        loop.add_signal_handler(number, signalled, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
