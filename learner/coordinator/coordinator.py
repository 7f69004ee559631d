"""Rank 0 from start to end: opens the data, joins, takes the run over, trains, evaluates last, leaves.

The data, the prompts and the user's code are checked before anything touches the mesh. The parts of rank 0:

- `MeshSession`: membership, the weights service, the table `train` with its prompts, groups and recovery.
- `RunTakeover`: the last checkpoint, and the incarnation that continues from it.
- `TrainingLoop`: gathers and trains batches, with
  `BatchClaimer` (source of batches), `VersionAnnouncer` (destination of weights) and `CheckpointScheduler`.
- `Evaluator` and `BestTracker`: held-out rewards, concurrently with the training.
- `StepRecorder`: metrics, samples and totals.
- `CallbackDispatcher`: users' code that hears of all this.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.callbacks.dispatcher import CallbackDispatcher
from rollmesh.learner.callbacks.interface import RunEnd, RunStart
from rollmesh.learner.callbacks.loading import start_callbacks
from rollmesh.learner.checkpoint.copy_thread import CopyThread
from rollmesh.learner.checkpoint.deadlines import EXPORT_S
from rollmesh.learner.checkpoint.hf_folders import leave_hf_folders
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.checkpoint.remote_copies import RemoteCopies
from rollmesh.learner.checkpoint.retention import sweep
from rollmesh.learner.control_requests import FINISHED, NATURAL_ENDS
from rollmesh.learner.coordinator.batch_claim import BatchClaimer, ClaimRules
from rollmesh.learner.coordinator.checkpoint_scheduler import CheckpointScheduler
from rollmesh.learner.coordinator.evaluation_setup import build_evaluation
from rollmesh.learner.coordinator.mesh_session import MeshSession
from rollmesh.learner.coordinator.priorities import PrioritySetter, priority_function
from rollmesh.learner.coordinator.prompt_sources import check_training_prompts, open_prompts
from rollmesh.learner.coordinator.run_end import planned_end
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.step_recorder import StepRecorder
from rollmesh.learner.coordinator.takeover import RunTakeover, TakeoverResult
from rollmesh.learner.coordinator.training_loop import LoopRules, TrainingLoop
from rollmesh.learner.coordinator.version_announcer import AnnouncementRules, VersionAnnouncer
from rollmesh.learner.distributed.rank_group import wait_keeping_alive
from rollmesh.learner.evaluation.evaluator import Evaluator
from rollmesh.learner.metrics import MetricsWriter, open_trackers
from rollmesh.learner.metrics.batch_traces import BatchTraces
from rollmesh.learner.metrics.files import SAMPLES
from rollmesh.learner.metrics.run_totals import write_learner_json
from rollmesh.learner.metrics.sample_log import SampleLog
from rollmesh.learner.model_files.checks import check_context
from rollmesh.learner.model_files.location import context_length
from rollmesh.learner.placement.opening import open_turns
from rollmesh.learner.recovery.consumption_log import LOG_NAME, ConsumptionLog
from rollmesh.learner.recovery.run_identity import LEARNER_JSON
from rollmesh.learner.roles.attachment import connect_roles
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.start_requirements import check_schedules
from rollmesh.learner.weights import PublishRules, WeightPublisher, read_model_bundle
from rollmesh.learner.weights.transports import configured_transports
from rollmesh.learner.written.ends import ends_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import CallbackError, StalledError, StarvedError, StoreError, SwapError, UnreachableError
from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)
_LEAVE_S = 60.0
_PROBE_TOKENS = 64
_AT_ONCE_S = 0.3


class Coordinator:
    """Wires rank 0 and runs it.

    Args:
        config: of the run; the model's path is a local folder.
        mesh: address of the buffer.
        runtime: of this process.
        algorithm: filters groups, and says whether they need a greedy baseline.
        port: to bind; 0 picks a free one.
    """

    def __init__(
        self, config: Config, mesh: str, runtime: LearnerRuntime, algorithm: Algorithm, *, port: int = 0
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._bridge = runtime.bridge
        self._controls = runtime.controls
        self._status = runtime.status
        self._algorithm = algorithm
        self._patience_s = config.network.retry_s + _LEAVE_S
        folder = Path(config.model.path)
        self._tokenizer = load_tokenizer(folder)
        check_context(context_length(folder), config.rollout.context_tokens)
        self._priority = priority_function(config)
        greedy = int(algorithm.needs.greedy_baseline)
        self._prompts, self._eval_tasks = open_prompts(config, self._tokenizer, greedy=greedy)
        check_schedules(config.learner, planned_end(config, self._prompts.last_ordinal))
        self._checked = check_training_prompts(config)
        # Small data are refused before the mesh is joined.
        self._checked.within(_AT_ONCE_S)
        self._copies = _open_copies(config)
        self._publisher = WeightPublisher(
            config.run.name,
            read_model_bundle(folder, ends_of(config, folder, self._tokenizer)),
            PublishRules.of(config),
            offers=configured_transports(config),
        )
        self._publisher.reckon_memory(runtime.ranks.version_bytes, base=runtime.ranks.base_bytes)
        self._session = MeshSession(config, mesh, self._publisher, runtime.status, runtime.controls, port=port)

    def run(
        self,
        *,
        takeover: bool,
        start_from: Path | None,
        ready_file: Path | None,
        taken_over: Callable[[], None],
    ) -> None:
        """Runs to the end of the run, or to the first reason to stop.

        Args:
            takeover: see `learner.service.run`, as the others.
            taken_over: called once the run is this learner's.

        Raises:
            FencedError: another learner has taken over.
            RollmeshError: the run cannot start or continue.
        """
        finished = False
        try:
            if self._join(ready_file):
                resumption = RunTakeover(self._config, self._session, self._runtime, patience_s=self._patience_s)
                run = resumption.take_over(start_from, takeover=takeover)
                taken_over()
                finished = self._train(run)
        finally:
            self._status.phase = "ending"
            self._leave(finished)
        self._runtime.ranks.shutdown()

    def _join(self, ready_file: Path | None) -> bool:
        """Joins the mesh; False where the end was asked for first."""
        opening = self._bridge.submit(self._session.open(ready_file))
        self._controls.wake = opening.cancel
        if self._controls.stop_reason is not None:
            opening.cancel()
        try:
            self._bridge.result(opening, self._patience_s)
        except concurrent.futures.CancelledError:
            return False
        finally:
            self._controls.wake = lambda: None
        return self._controls.stop_reason is None

    def _leave(self, finished: bool) -> None:
        """Leaves in order where the mesh answers: one that does not must not hide the cause of the run's end."""
        try:
            self._bridge.call(self._session.close(run_finished=finished), _LEAVE_S)
        except UnreachableError as error:
            log.warning("could not leave the mesh properly: %s", error)
        finally:
            self._publisher.close()

    def _train(self, run: TakeoverResult) -> bool:
        """Train once all rows have been looked at, and return whether the run is complete."""
        self._checked.wait()
        config, session, progress = self._config, self._session, run.progress
        folder = config.run.folder
        sweep(folder / CHECKPOINTS_NAME, progress.incarnation)
        callbacks = start_callbacks(config, self._controls)
        self._attach_roles(progress.incarnation)
        writer = MetricsWriter(open_trackers(config))
        consumption = ConsumptionLog(folder / LOG_NAME)
        try:
            callbacks.emit(RunStart(progress.incarnation, progress.resumed_at))
            loop, reason = self._run_loop(run, writer, callbacks, consumption)
        except BaseException as error:
            writer.close()
            callbacks.emit(RunEnd("error", str(error)))
            callbacks.close(_LEAVE_S)
            raise
        finally:
            consumption.close()
        writer.close()
        write_learner_json(
            folder / LEARNER_JSON,
            progress.totals,
            incarnation=progress.incarnation,
            version=loop.version,
            stop_reason=reason,
            pushes=self._publisher.pushes.summary(),
            receivers=self._publisher.pushes.receivers(),
            waiting=session.monitor.clocks(),
            refused_prompts=self._prompts.refused,
        )
        if reason in NATURAL_ENDS and config.checkpoint.hf:
            self._leave_hf_folders()
        self._end_callbacks(callbacks, reason)
        return reason in FINISHED

    def _attach_roles(self, incarnation: int) -> None:
        """Has the roles elsewhere serve this learner, which has the run."""
        runtime = self._runtime
        if not runtime.elsewhere:
            return
        connect_roles(self._config, runtime.elsewhere.values(), self._session.agent, self._bridge, self._status)
        runtime.ranks.attach_roles(incarnation)
        for name, role in runtime.elsewhere.items():
            log.info("role %s: %s, in processes of its own", name, role.engine)

    def _leave_hf_folders(self) -> None:
        """Writes the folders of `checkpoint.hf`."""
        self._status.phase = "exporting"
        if not self._wait_for(partial(leave_hf_folders, self._config), EXPORT_S):
            log.warning("checkpoint.hf is not written after %.0f s: `rollmesh export` writes them later", EXPORT_S)

    def _end_callbacks(self, callbacks: CallbackDispatcher, reason: str) -> None:
        """Tells callbacks of the end, and waits until they have heard of everything.

        Raises:
            CallbackError: one has failed, and is to end the run.
        """
        most_s = self._config.logging.callback_timeout_s
        self._status.phase, self._status.waiting_reason = "ending", "waits for callbacks"
        callbacks.emit(RunEnd(reason))
        self._wait_for(partial(callbacks.close, most_s), most_s + _LEAVE_S)
        self._status.waiting_reason = ""
        self._controls.raise_failure()

    def _wait_for(self, work: Callable[[], None], most_s: float) -> bool:
        """Does work in a thread while the other ranks wait; False where it has not ended in time."""
        thread = ThreadPoolExecutor(1, "last work")
        done = thread.submit(work)
        # A disk that does not answer must not keep the run from its end.
        thread.shutdown(wait=False)
        if not wait_keeping_alive(self._runtime.ranks, done, most_s):
            return False
        done.result()
        return True

    def _run_loop(
        self, run: TakeoverResult, writer: MetricsWriter, callbacks: CallbackDispatcher, consumption: ConsumptionLog
    ) -> tuple[TrainingLoop, str]:
        """Builds the parts of the training and runs them; gives the loop, and why it ended."""
        config, session, runtime, progress = self._config, self._session, self._runtime, run.progress
        traces = BatchTraces(session.tracer, progress.incarnation)
        end = planned_end(config, self._prompts.last_ordinal, version=progress.resumed_at, used=progress.totals.groups)
        if end < config.learner.steps:
            log.info("the data end with step %d at the latest, and so do schedules of the learning rate", end)
        recorder = StepRecorder(
            writer,
            SampleLog(config.run.folder / SAMPLES, self._tokenizer, config.logging),
            progress,
            runtime.status,
            callbacks,
            table_every=config.logging.tables_every_steps,
            pushes=self._publisher.pushes,
            clocks=session.monitor.clocks,
            traces=traces,
        )
        starting = session.start(
            self._prompts,
            incarnation=progress.incarnation,
            takeovers=run.takeovers,
            cursor=run.cursor,
            with_payloads=runtime.ranks.alone,
            planned_end=end,
        )
        table = self._bridge.call(starting, self._patience_s)
        client = table.client
        evaluation = build_evaluation(
            config, client, self._eval_tasks, self._tokenizer, progress, recorder, runtime.status
        )
        announcement = AnnouncementRules.of(config, progress, self._patience_s)
        announcer = VersionAnnouncer(
            runtime, client, self._publisher, evaluation.evaluator, announcement, callbacks, traces
        )
        turns = open_turns(
            config,
            runtime,
            session.agent,
            client,
            announcer,
            session.turn_requests,
            incarnation=progress.incarnation,
            probe_ids=self._probe_ids(),
        )
        checkpoints = CheckpointScheduler(
            runtime, config.checkpoint, progress, announcer, evaluation.best, turns, self._copies, callbacks
        )
        claims = ClaimRules.of(config, progress)
        priorities = self._priorities(progress)
        claimer = BatchClaimer(
            runtime.bridge, table, self._algorithm, consumption, checkpoints, claims, priorities, traces
        )
        rules = LoopRules.of(config, progress, end)
        loop = TrainingLoop(runtime, claimer, announcer, checkpoints, turns, recorder, self._algorithm, rules)
        self._controls.wake = partial(self._bridge.loop.call_soon_threadsafe, table.groups.interrupt)
        try:
            runtime.ranks.export_base(self._publisher)
            reason = loop.run()
            log.info("the run ends after version %d: %s", loop.version, reason)
            announcer.wait_in_force()
            # Before the last evaluation, which may take long; a second time, so that it may become the best one.
            checkpoints.write(loop.version)
            if evaluation.evaluator is not None and loop.version != announcement.evaluated:
                if reason in NATURAL_ENDS and self._controls.stop_reason is None:
                    turns.give()
                self._evaluate_last(evaluation.evaluator, PolicyVersion(progress.incarnation, loop.version), reason)
                checkpoints.write(loop.version)
            checkpoints.serve_requests(loop.version)
            checkpoints.wait_for_copies()
            self._bridge.call(session.monitor.refresh(), self._patience_s)
        except (CallbackError, StalledError, StarvedError, StoreError, SwapError, UnreachableError) as end:
            self._status.phase = "ending"
            left = checkpoints.write_uncommitted(loop.version, at_step_boundary=loop.at_step_boundary)
            raise type(end)(end.message, hint=f"{end.hint}; {left}" if end.hint else left) from end
        finally:
            checkpoints.close()
            turns.close()
            announcer.close()
        return loop, reason

    def _probe_ids(self) -> Sequence[int]:
        """The beginning of the first prompt, by which engines prove their weights; none where it is an image's."""
        tasks = self._prompts.after(0, 1).tasks
        if not tasks or tasks[0].images:
            return ()
        return np.frombuffer(tasks[0].prompt_ids, dtype="<i4")[:_PROBE_TOKENS].tolist()

    def _evaluate_last(self, evaluator: Evaluator, policy: PolicyVersion, reason: str) -> None:
        """Waits for the result at the last version; a request to stop ends the wait."""
        if reason not in NATURAL_ENDS:
            self._bridge.call(evaluator.close(), _LEAVE_S)
            return
        self._status.phase = "evaluating"
        waiting = self._bridge.submit(evaluator.final_result(policy))

        def end_wait() -> None:
            # Other requests do not end the evaluation.
            if self._controls.stop_reason is not None or self._controls.error is not None:
                waiting.cancel()

        self._controls.wake = end_wait
        # A request may have come before.
        end_wait()
        try:
            ranks = self._runtime.ranks
            while not concurrent.futures.wait([waiting], ranks.keep_alive_s).done:
                ranks.keep_alive()
            if waiting.result() is None:
                log.warning(
                    "no evaluation at the last version %s: `rollmesh status` says what the generators are doing", policy
                )
        except (CancelledError, concurrent.futures.CancelledError):
            self._bridge.call(evaluator.close(), _LEAVE_S)
            self._controls.raise_failure()

    def _priorities(self, progress: RunProgress) -> PrioritySetter | None:
        if self._priority is None:
            return None
        reuse = self._config.buffer.max_reuse
        return PrioritySetter(self._session.client, self._priority, incarnation=progress.incarnation, max_reuse=reuse)


def _open_copies(config: Config) -> CopyThread | None:
    """The copies of the run's checkpoints elsewhere; None: none are configured.

    Raises:
        ConfigError: there they cannot be written.
    """
    if config.checkpoint.copy_to is None:
        return None
    copies = RemoteCopies(f"{config.checkpoint.copy_to}/{config.run.name}")
    checkpoints = config.run.folder / CHECKPOINTS_NAME
    copies.check(checkpoints)
    return CopyThread(copies, checkpoints, config.run.folder / LOG_NAME)
