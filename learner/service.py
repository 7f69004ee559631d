"""The learner process: the command line calls `run`, in every rank.

Invariants: expected failures end with one log line and the error's exit code. A learner that was superseded ends with
`FencedError.exit_code`, so that it is not restarted. SIGTERM, or a notice that the machine is taken away, ends the run
after the present step, with a checkpoint and its commit. Rank 0 alone listens to signals, notices and the mesh; the
other ranks follow it.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.builders import (
    build_algorithm,
    build_engines,
    build_worker,
    open_watch,
    roles_elsewhere,
    set_learner_threads,
)
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.coordinator import Coordinator
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.rank_group import RankGroup, run_follower
from rollmesh.learner.distributed.routed_experts import ExpertSource, FetchedExperts
from rollmesh.learner.distributed.trajectories import FetchedTrajectories, InlineTrajectories, TrajectorySource
from rollmesh.learner.distributed.weight_export import WeightExport
from rollmesh.learner.engines.interface import ACTOR, WeightPart
from rollmesh.learner.examination.models import examine_models
from rollmesh.learner.liveness.rank_exit import run_rank
from rollmesh.learner.liveness.rank_health import answer_health
from rollmesh.learner.liveness.start_notice import note_every_minute
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.notices import notices
from rollmesh.learner.placement.opening import free_devices
from rollmesh.learner.recovery.run_identity import RunRecord
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.start_requirements import check_start
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.stop_signals import StopSignals
from rollmesh.learner.written.ends import end_notices
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret_files import check_security
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.derived.memory_release import REST_NAME
from rollmesh.mesh.preemption.sources import NoticeSource
from rollmesh.mesh.preemption.watcher import watch_for_notice
from rollmesh.mesh.rpc.failover_channel import FailoverChannel, open_mesh
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, freeze_heap, keep_freed_memory
from rollmesh.mesh.runtime.ranks import check_ranks, choose_interface
from rollmesh.mesh.trajectory.image_files import image_folder

log = logging.getLogger(__name__)


def run(
    config: Config,
    mesh: str,
    *,
    takeover: bool = False,
    allow_changes: bool = False,
    start_from: Path | None = None,
    port: int = 0,
    preemption: NoticeSource | None = None,
    ready_file: Path | None = None,
) -> int:
    """Runs the learner to its end.

    Args:
        config: of the run.
        mesh: host:port of the buffer.
        takeover: continue although another learner's lease has not ended; that learner is fenced.
        allow_changes: continue a run of another model or of other data (see `learner.recovery.run_identity`).
        start_from: checkpoint of this run to continue from, which undoes the steps since; None: the last one.
        port: to bind on rank 0, from which generators fetch the weights; 0 picks a free one.
        preemption: says when the machine of rank 0 is about to be taken away: the learner ends as after SIGTERM.
        ready_file: written by rank 0 when the learner answers. Each rank r writes `NAME-r` next to it when it answers
            the health check, before it loads models.

    Returns:
        The process exit code.
    """
    keep_freed_memory(TENSOR_BYTES)
    rank = int(os.environ.get("RANK", "0"))
    setup_logging("learner" if rank == 0 else f"learner-{rank}", LogSettings.of(config))
    controls = ControlRequests()

    def work() -> None:
        with StopSignals(controls, listen=rank == 0):
            _run(
                config,
                mesh,
                rank,
                controls,
                takeover=takeover,
                allow_changes=allow_changes,
                start_from=start_from,
                port=port,
                preemption=preemption,
                ready_file=ready_file,
            )

    return run_rank(work)


def _run(
    config: Config,
    mesh: str,
    rank: int,
    controls: ControlRequests,
    *,
    takeover: bool,
    allow_changes: bool,
    start_from: Path | None,
    port: int,
    preemption: NoticeSource | None,
    ready_file: Path | None,
) -> None:
    check_security(config.security, Identity(Role.LEARNER), endpoint=False)
    check_ranks(config.security)
    choose_interface(config.learner.distributed.interface)
    if config.weights.transport == "nccl" and not is_loopback(config.network.host):
        # NCCL uses the same interfaces for all its groups; these are its own choice.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "^lo,docker")
    set_learner_threads(config)
    with ExitStack() as closers:
        if rank == 0:
            closers.callback(_remove_if_empty, config.run.folder / REST_NAME)
        bridge = AsyncBridge()
        closers.callback(bridge.close)
        if rank == 0 and preemption is not None:
            watching = watch_for_notice(preemption, lambda notice: controls.stop(notice.reason))
            bridge.submit(watching).add_done_callback(_log_failure)
        if ready_file is not None:
            answer_health(config, Role.LEARNER, bridge, closers, ready_file.with_stem(f"{ready_file.stem}-{rank}"))
        with note_every_minute("fetches the model"):
            model = resolve_model(config.model)
        given, config = config, config.model_copy(update={"model": model})
        check_start(config)
        algorithm = build_algorithm(config)
        if rank == 0:
            for notice in [*notices(config, algorithm), *end_notices(config), *examine_models(config, algorithm)]:
                log.warning("%s", notice)
        record = RunRecord(given, Path(config.model.path)) if rank == 0 else None
        if record is not None:
            record.check(allow_changes=allow_changes)
        if rank == 0:
            with note_every_minute("waits for the generators to give the devices back"):
                bridge.call(free_devices(config, mesh, takeover=takeover), 2 * config.placement.step_timeout_s)
        watch = closers.enter_context(open_watch(config))
        with watch.phase("load models"), note_every_minute("loads and checks models"):
            engines = build_engines(config, algorithm)
            alone = engines[ACTOR].layout.processes == 1
            channel = None if alone else RankChannel(config.learner.distributed)
        inline = InlineTrajectories()
        payloads: TrajectorySource = inline
        experts: ExpertSource | None = None
        if channel is not None or config.learner.router.replay:
            client = _fetch_client(config, mesh, bridge, closers)
            if channel is not None:
                payloads = FetchedTrajectories(bridge, client, timeout_s=config.network.retry_s)
            if config.learner.router.replay:
                experts = FetchedExperts(bridge, client, timeout_s=config.network.retry_s)
        elsewhere = roles_elsewhere(config, algorithm, engines[ACTOR].world)
        checkpoints = config.run.folder / CHECKPOINTS_NAME
        worker = build_worker(
            config,
            engines,
            algorithm,
            payloads,
            checkpoints,
            images=image_folder(config),
            experts=experts,
            elsewhere=elsewhere,
        )
        with watch.phase("check the folder of checkpoints"):
            worker.check_folder()
        if config.placement.learner_takes_turns:
            with watch.phase("choose the roles that stay"):
                worker.memory.offload_nonresident()
        with watch.phase("lay the weights out"), note_every_minute("lays the weights out"):
            background = None if alone else RankChannel(config.learner.distributed)
            ahead = not config.placement.learner_takes_turns
            part: WeightPart = "policy" if config.learner.pushed_adapter is None else "adapter"
            export = WeightExport(engines[ACTOR], background, config.weights.bucket_bytes, ahead=ahead, part=part)
        freeze_heap()
        if record is not None:
            ranks = RankGroup(worker, channel, watch, export)
            runtime = LearnerRuntime(bridge, ranks, inline, controls, LearnerStatus(), elsewhere)
            # Also for what a thread that writes a checkpoint has met.
            with watch.phase("take the run over"):
                Coordinator(config, mesh, runtime, algorithm, port=port).run(
                    takeover=takeover,
                    start_from=start_from,
                    ready_file=ready_file,
                    taken_over=record.write,
                )
        elif channel is not None:
            run_follower(worker, channel, watch, export)
        with watch.phase("leave"):
            export.close()
            worker.close()


def _log_failure(watching: Future[None]) -> None:
    error = None if watching.cancelled() else watching.exception()
    if error is not None:
        log.error("notices of this machine's end are not seen any more", exc_info=error)


def _remove_if_empty(folder: Path) -> None:
    """Removes what is left of a learner's rest: its files have no names."""
    with suppress(OSError):
        folder.rmdir()


def _fetch_client(config: Config, mesh: str, bridge: AsyncBridge, closers: ExitStack) -> BufferClient:
    network = config.network

    async def connect() -> FailoverChannel:
        return open_mesh(mesh, config.security, Identity(Role.LEARNER), max_message_mb=network.max_message_mb)

    channel = bridge.call(connect(), network.rpc_timeout_s)
    closers.callback(lambda: bridge.call(channel.close(), network.rpc_timeout_s))
    return BufferClient(channel, timeout_s=network.rpc_timeout_s, retry_s=network.retry_s)
