"""Rank 0 from start to end: opens the data, joins, takes the run over, trains, evaluates last, leaves.

Order of a start: data, prompts and the user's code are checked before anything touches the mesh; the checkpoint is
loaded before the old learner is fenced, so that a learner that cannot go on takes nothing over.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.learner.algorithms.base import Algorithm
from rollmesh.learner.checkpoint.best import protected_names
from rollmesh.learner.checkpoint.fallbacks import fallback_hint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, version_of
from rollmesh.learner.checkpoint.retention import sweep
from rollmesh.learner.checkpoint.store import DamagedCheckpointError
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.batch_claim import BatchClaimer
from rollmesh.learner.coordinator.checkpoint_scheduler import CheckpointScheduler
from rollmesh.learner.coordinator.evaluation_setup import EvaluationParts, build_evaluation
from rollmesh.learner.coordinator.mesh_session import MeshSession
from rollmesh.learner.coordinator.priorities import PrioritySetter, priority_function
from rollmesh.learner.coordinator.step_recorder import StepRecorder
from rollmesh.learner.coordinator.training_loop import TURN_S, TrainingLoop
from rollmesh.learner.coordinator.version_announcer import VersionAnnouncer
from rollmesh.learner.data import AgentPrompts, DataOrder, PromptEncoder, PromptStream, open_dataset
from rollmesh.learner.data.prompts import TaskShape
from rollmesh.learner.distributed.rank_group import RankGroup
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.evaluation.evaluator import Evaluator, evaluation_tasks
from rollmesh.learner.metrics import MetricsWriter, open_trackers
from rollmesh.learner.metrics.run_totals import RunTotals, write_learner_json
from rollmesh.learner.metrics.sample_log import SampleLog
from rollmesh.learner.model_files.checks import check_context
from rollmesh.learner.model_files.location import context_length, load_tokenizer
from rollmesh.learner.recovery.consumption_log import LOG_NAME, ConsumptionLog
from rollmesh.learner.recovery.redis_recovery import RunHistory, read_history
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.weights import WeightPublisher, read_model_bundle
from rollmesh.learner.weights.transports import configured_transports
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError, LostStateError, StalledError, StarvedError, StoreError, UnreachableError
from rollmesh.mesh.runtime.service import AsyncBridge
from rollmesh.mesh.trajectory.images import ImageProcessor
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
# Reasons after which the run is complete; after a signal it can be gone on with.
_NATURAL_ENDS = ("steps", "stop_at", "end_of_data")
_LEAVE_S = 60.0
# Redis may be restarted while a learner starts.
_TRIES = 5


class Coordinator:
    """Wires rank 0 and runs it.

    Args:
        config: of the run; the model's path is a local folder.
        mesh: address of the buffer.
        bridge: the event loop.
        ranks: all ranks.
        held: where one rank keeps its payloads.
        algorithm: screens groups, and says whether they need a greedy baseline.
        controls: from signals and the control service.
        port: to bind; 0 picks a free one.
    """

    def __init__(
        self,
        config: Config,
        mesh: str,
        bridge: AsyncBridge,
        ranks: RankGroup,
        held: InlineTrajectories,
        algorithm: Algorithm,
        controls: ControlRequests,
        *,
        port: int = 0,
    ) -> None:
        self._config = config
        self._bridge = bridge
        self._ranks = ranks
        self._held = held
        self._algorithm = algorithm
        self._controls = controls
        self._status = LearnerStatus()
        folder = Path(config.model.path)
        self._tokenizer = load_tokenizer(folder)
        check_context(context_length(folder), config.rollout.context_tokens)
        self._priority = priority_function(config)
        self._prompts, self._eval_tasks = _open_data(
            config, self._tokenizer, greedy=int(algorithm.needs.greedy_baseline)
        )
        weights = config.weights
        self._publisher = WeightPublisher(
            config.run.name,
            read_model_bundle(folder),
            keep_versions=weights.keep_versions,
            bucket_bytes=weights.bucket_bytes,
            transport=weights.transport,
            encoding=weights.encoding,
            chain=weights.chain,
            offers=configured_transports(config),
        )
        self._session = MeshSession(config, mesh, self._publisher, self._status, controls, port=port)

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
            RollmeshError: the run cannot start or go on.
        """
        finished = False
        try:
            if self._opened(ready_file):
                finished = self._resume(start_from, taken_over, takeover=takeover)
        finally:
            self._status.phase = "ending"
            self._leave(finished)
        self._ranks.shutdown()

    def _opened(self, ready_file: Path | None) -> bool:
        """Joins the mesh; False where the end was asked for first."""
        opening = self._bridge.submit(self._session.open(ready_file))
        self._controls.wake = opening.cancel
        if self._controls.stop_reason is not None:
            opening.cancel()
        try:
            self._bridge.result(opening, self._config.network.retry_s + _LEAVE_S)
        except concurrent.futures.CancelledError:
            return False
        finally:
            self._controls.wake = lambda: None
        return self._controls.stop_reason is None

    def _resume(self, start_from: Path | None, taken_over: Callable[[], None], *, takeover: bool) -> bool:
        """Continues the run from its last checkpoint; True where it is complete."""
        # Who names a checkpoint undoes what was committed since. Commits per step run ahead of the checkpoints by
        # design. Either way what lies between is at most once.
        force = start_from is not None or self._config.buffer.commit == "step"
        left = read_history(self._config.run.folder)
        # Else the first checkpoint would end the run, by what it must not remove.
        protected_names(self._config.run.folder / CHECKPOINTS_NAME)
        extra, incarnation, seeded = self._take_over(left, start_from, takeover=takeover, force=force)
        taken_over()
        version = int(extra.get("version", 0))
        lineage = Lineage.from_wire(extra.get("lineage", [])).then(incarnation, version)
        run_totals = RunTotals.from_wire(extra["figures"]) if "figures" in extra else RunTotals()
        takeovers = {**(left.takeovers if left is not None else {}), **dict(lineage.resumed)}
        return self._train(version, lineage, takeovers, run_totals, seeded)

    def _leave(self, finished: bool) -> None:
        """Leaves in order, or else without: what ended the run is not hidden by a mesh that does not answer."""
        try:
            self._bridge.call(self._session.close(run_finished=finished), _LEAVE_S)
        except UnreachableError as error:
            _log.warning("left the mesh without a word: %s", error)
        finally:
            self._publisher.close()

    def _take_over(
        self, left: RunHistory | None, start_from: Path | None, *, takeover: bool, force: bool
    ) -> tuple[dict[str, Any], int, int]:
        """Loads the last checkpoint and takes over: (what the checkpoint holds, incarnation, last ordinal seeded).

        Where another checkpoint was asked for, that becomes the last one, for whoever goes on later.
        Where the last learner could not tell the buffer of its checkpoint any more, it is told now: what was claimed
        before it is in it. Where Redis has lost what it had acknowledged, it is told first what that learner has used.
        """
        session, patience = self._session, self._config.network.retry_s + _LEAVE_S
        survives = left.survives if left is not None else _all_survive
        if start_from is not None and (chosen := version_of(start_from.name)) is not None and not survives(chosen):
            raise DataError(
                f"checkpoint {start_from.name} is of steps that were undone, and their groups may be trained since",
                hint="choose another one: `rollmesh evals RUN` and RUN/checkpoints say which there are",
            )
        for _ in range(_TRIES):
            described = self._bridge.call(session.monitor.refresh(), patience)
            known = described.policy.incarnation
            if left is not None and left.incarnation > known:
                self._bridge.call(session.recover_for(left), 2 * patience)
                continue
            folder = described.latest_checkpoint if start_from is None else str(start_from.resolve())
            if start_from is None and left is not None and left.untold(described):
                folder = left.checkpoint
                commit = session.client.commit("train", known, left.committed, checkpoint=folder)
                # A Redis that may have lost state is told of it with all the rest.
                with contextlib.suppress(LostStateError):
                    self._bridge.call(commit, patience)
            extra = self._load(folder, survives)
            version = int(extra.get("version", 0))
            self._status.durable = (version, folder)
            try:
                incarnation, seeded = self._bridge.call(
                    session.take_over(version, takeover=takeover, force=force), patience
                )
                if start_from is not None:
                    commit = session.client.commit("train", incarnation, version, checkpoint=folder)
                    self._bridge.call(commit, patience)
                return extra, incarnation, seeded
            except LostStateError:
                nothing = RunHistory(known, {}, [], 0, 0, "")
                last = dataclasses.replace(left or nothing, incarnation=known)
                self._bridge.call(session.recover_for(last), 2 * patience)
        raise LostStateError(f"Redis has lost state {_TRIES} times", hint="see the log of Redis, and its disk")

    def _load(self, name: str, survives: Callable[[PolicyVersion], bool]) -> dict[str, Any]:
        """Loads a checkpoint; nothing where there is no name, since the run is new."""
        if not name:
            return {}
        folder = Path(name)
        if not folder.is_dir():
            raise DataError(
                f"the run's checkpoint {folder} is not here",
                hint=f"start the learner where the run folder is; {fallback_hint(folder, survives)}",
            )
        _log.info("going on from %s", folder)
        try:
            return self._ranks.load(folder)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(error.message, hint=fallback_hint(folder, survives)) from error

    def _train(
        self, version: int, lineage: Lineage, takeovers: Mapping[int, int], run_totals: RunTotals, seeded: int
    ) -> bool:
        """Trains; True where the run is complete."""
        config, session, incarnation = self._config, self._session, lineage.resumed[-1][0]
        run_folder = config.run.folder
        sweep(run_folder / CHECKPOINTS_NAME, incarnation)
        writer = MetricsWriter(open_trackers(config))
        consumption = ConsumptionLog(run_folder / LOG_NAME)
        recorder = StepRecorder(
            writer,
            SampleLog(run_folder / "samples.jsonl", self._tokenizer, config.logging.samples_per_step),
            run_totals,
            self._status,
            lineage,
            pushes=self._publisher.pushes,
            clocks=session.monitor.clocks,
        )
        try:
            self._bridge.call(
                session.start(
                    self._prompts,
                    incarnation=incarnation,
                    takeovers=takeovers,
                    cursor=seeded,
                    with_payloads=self._ranks.size == 1,
                ),
                config.network.retry_s + _LEAVE_S,
            )
            evaluating = build_evaluation(
                config,
                session.client,
                self._eval_tasks,
                self._tokenizer,
                lineage=lineage,
                recorder=recorder,
                run_totals=run_totals,
                status=self._status,
            )
            evaluator = evaluating.evaluator
            announcer = self._announcer(incarnation, evaluator, version, run_totals)
            checkpoints = self._checkpoints(incarnation, version, lineage, run_totals, announcer, evaluating)
            loop = self._loop(version, lineage, run_totals, recorder, evaluator, announcer, checkpoints, consumption)
            self._controls.wake = lambda: self._bridge.loop.call_soon_threadsafe(session.source.interrupt)
            try:
                reason = loop.run()
                _log.info("the run ends after version %d: %s", loop.version, reason)
                announcer.wait_in_force()
                # Before the last evaluation, which may take long; a second time, so that it may become the best one.
                checkpoints.write(loop.version)
                if evaluator is not None:
                    self._evaluate_last(evaluator, PolicyVersion(incarnation, loop.version), reason)
                    checkpoints.write(loop.version)
                checkpoints.serve_requests(loop.version)
                self._bridge.call(session.monitor.refresh(), config.network.retry_s + _LEAVE_S)
            except (StalledError, StarvedError, StoreError, UnreachableError) as end:
                self._status.phase = "ending"
                left = checkpoints.write_unannounced(loop.version, at_step_boundary=loop.at_step_boundary)
                raise type(end)(end.message, hint=f"{end.hint}; {left}" if end.hint else left) from end
        finally:
            writer.close()
            consumption.close()
        write_learner_json(
            run_folder / "learner.json",
            run_totals,
            incarnation=incarnation,
            version=loop.version,
            stop_reason=reason,
            pushes=self._publisher.pushes.summary(),
            receivers=self._publisher.pushes.receivers(),
            waiting=session.monitor.clocks(),
            refused_prompts=self._prompts.refused,
        )
        return reason in (*_NATURAL_ENDS, "request")

    def _evaluate_last(self, evaluator: Evaluator, policy: PolicyVersion, reason: str) -> None:
        """Waits for the result at the last version; a wish to stop ends the wait."""
        if reason not in _NATURAL_ENDS:
            self._bridge.call(evaluator.close(), _LEAVE_S)
            return
        self._status.phase = "evaluating"
        waiting = self._bridge.submit(evaluator.final_result(policy))
        self._controls.wake = waiting.cancel
        try:
            while not concurrent.futures.wait([waiting], TURN_S).done:
                self._ranks.keep_alive()
            if waiting.result() is None:
                _log.warning("no evaluation at the last version %s: `rollmesh status` says what generators do", policy)
        except (CancelledError, concurrent.futures.CancelledError):
            self._bridge.call(evaluator.close(), _LEAVE_S)
            self._controls.raise_failure()

    def _announcer(
        self, incarnation: int, evaluator: Evaluator | None, version: int, run_totals: RunTotals
    ) -> VersionAnnouncer:
        every = self._config.eval.every_steps
        first = version if not run_totals.evals else -1
        return VersionAnnouncer(
            self._bridge,
            self._session.client,
            self._publisher,
            evaluator,
            self._status,
            incarnation=incarnation,
            wire_dtype=self._config.model.dtype,
            evaluate_at=lambda v: v == first or (every is not None and v > 0 and v % every == 0),
            commit_each=self._config.buffer.commit == "step",
            timeout_s=self._config.network.retry_s + _LEAVE_S,
        )

    def _checkpoints(
        self,
        incarnation: int,
        version: int,
        lineage: Lineage,
        run_totals: RunTotals,
        announcer: VersionAnnouncer,
        evaluating: EvaluationParts,
    ) -> CheckpointScheduler:
        return CheckpointScheduler(
            self._ranks,
            self._bridge,
            self._session.client,
            self._controls,
            self._status,
            self._config.checkpoint,
            incarnation=incarnation,
            extra=lambda: {"lineage": lineage.to_wire(), "figures": run_totals.to_wire()},
            wait_in_force=announcer.wait_in_force,
            best=evaluating.best,
            is_evaluated=announcer.is_evaluated,
            started_at=version,
        )

    def _loop(
        self,
        version: int,
        lineage: Lineage,
        run_totals: RunTotals,
        recorder: StepRecorder,
        evaluator: Evaluator | None,
        announcer: VersionAnnouncer,
        checkpoints: CheckpointScheduler,
        consumption: ConsumptionLog,
    ) -> TrainingLoop:
        session, batch, steps = self._session, self._config.learner.batch, self._config.learner.steps
        goal = self._config.eval.stop_at

        def on_claimed(claimed: int) -> None:
            session.seeder.batch_used()
            if claimed + 1 < steps:
                session.source.request(claimed + 1, batch.groups)

        def good_enough() -> bool:
            latest = evaluator.latest if evaluator is not None else None
            return goal is not None and latest is not None and latest.reward >= goal

        claimer = BatchClaimer(
            self._bridge,
            session.client,
            session.source,
            self._algorithm,
            consumption,
            incarnation=lineage.resumed[-1][0],
            resumed_at=version,
            batch=batch.groups,
            on_claimed=on_claimed,
            on_checkpoint_wanted=checkpoints.request,
            recovery=session.recovery,
            priorities=self._priorities(lineage.resumed[-1][0]),
            recorder=session.recorder,
        )
        return TrainingLoop(
            bridge=self._bridge,
            ranks=self._ranks,
            claimer=claimer,
            held=self._held,
            announcer=announcer,
            checkpoints=checkpoints,
            recorder=recorder,
            run_totals=run_totals,
            controls=self._controls,
            status=self._status,
            lineage=lineage,
            batch=batch,
            version=version,
            last_version=steps,
            good_enough=good_enough,
            expected_cost=self._algorithm.expected_cost,
            max_skipped=self._config.learner.max_skipped,
        )

    def _priorities(self, incarnation: int) -> PrioritySetter | None:
        if self._priority is None:
            return None
        reuse = self._config.buffer.max_reuse
        return PrioritySetter(self._session.client, self._priority, incarnation=incarnation, max_reuse=reuse)


def _all_survive(_version: PolicyVersion) -> bool:
    """Of a run without a history."""
    return True


def _open_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, greedy: int
) -> tuple[PromptStream, list[trajectory_pb2.PromptTask] | None]:
    """The training prompts, and the tasks of an evaluation round where there is held-out data.

    Args:
        config: of the run.
        tokenizer: of the model.
        greedy: further responses per training prompt, decoded greedily.

    Raises:
        DataError: see `learner.data`.
    """
    data, rollout, evaluation = config.data, config.rollout, config.eval
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_tokens=rollout.max_prompt_tokens,
        template_kwargs=data.chat_template_kwargs,
        agent=AgentPrompts.of(rollout.agent),
    )
    shape = TaskShape(
        n=rollout.n,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        greedy=greedy,
    )
    source = open_dataset(data.train, data.prompt_key)
    order = DataOrder(len(source), seed=config.run.seed, shuffle=data.shuffle, epochs=data.epochs)
    prompts = PromptStream(source, order, encoder, shape, on_refused=data.on_long_prompt)
    prompts.check()
    if data.eval is None:
        return prompts, None
    held_out = open_dataset(data.eval, data.prompt_key)
    # Images are seen in an evaluation alone, and not by SGLang.
    images = None if rollout.engine == "sglang" else ImageProcessor.load(Path(config.model.path))
    encoder = PromptEncoder(
        tokenizer,
        max_prompt_tokens=rollout.max_prompt_tokens,
        template_kwargs=data.chat_template_kwargs,
        agent=AgentPrompts.of(rollout.agent),
        images=images,
    )
    eval_shape = dataclasses.replace(shape, n=evaluation.n, temperature=evaluation.temperature, greedy=0)
    return prompts, evaluation_tasks(held_out, encoder, eval_shape, rows=evaluation.rows)
