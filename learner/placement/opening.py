"""The start of turns: devices are freed before models are loaded, and shared once the run is taken over."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import grpc

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.placement.generator_group import GeneratorGroup
from rollmesh.learner.placement.shared_devices import SharedDevices
from rollmesh.learner.placement.swap import SwapMachine, SwapRules
from rollmesh.learner.placement.swap_steps import SwapSteps, Versions
from rollmesh.learner.placement.turn_log import TurnLog
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.placement.turn_rules import TableView, TurnRules
from rollmesh.learner.placement.turns import OwnDevices
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.token_file import identity_of
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import SwapError, TakeoverRefusedError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import generator_pb2, membership_pb2

log = logging.getLogger(__name__)
# A predecessor's generators get so many times a step's time to sleep, but no more than these seconds because of it. One
# that is frozen is replaced meanwhile. After that the run ends.
_ATTEMPTS, _LONGEST_S = 3, 300.0


class EvaluatedVersions(Versions, Protocol):
    """Versions that held-out prompts are answered by: `learner.coordinator.version_announcer.VersionAnnouncer`."""

    @property
    def evaluation_is_open(self) -> bool:
        """Held-out prompts are to be answered by the version in force, or are being answered."""
        ...


def open_turns(
    config: Config,
    runtime: LearnerRuntime,
    agent: MembershipAgent,
    client: BufferClient,
    versions: EvaluatedVersions,
    requests: TurnRequests | None,
    *,
    incarnation: int,
    probe_ids: Sequence[int],
) -> SharedDevices | OwnDevices:
    """The turns of a learner that has taken the run over, and has its models on the devices.

    Args:
        requests: of operators; None where no devices are shared.
        probe_ids: tokens by which engines that keep weights in another form prove them.
    """
    placement = config.placement
    if requests is None:
        return OwnDevices()
    # Whatever ends a wait of the training thread at the time of the request.
    requests.wake = lambda: runtime.controls.wake()
    machine = SwapMachine(SwapRules(placement.step_timeout_s), time.monotonic)
    # Bytes are compared where engines keep them as they are sent.
    probed = () if config.rollout.engine == "hf" else probe_ids
    return SharedDevices(
        runtime,
        SwapSteps(runtime, _group(config, agent, incarnation), versions, machine, probed),
        machine,
        TurnRules.of(config),
        requests,
        TurnLog(config.run.folder),
        placement.mode,
        partial(_look, client, versions),
    )


async def free_devices(config: Config, mesh: str, *, takeover: bool) -> None:
    """Has the generators of an earlier learner sleep, so that this one can load its models.

    Args:
        takeover: also where another learner is in the mesh.

    Raises:
        TakeoverRefusedError: another learner has the devices.
        SwapError: some did not in time.
        UnreachableError: the mesh does not answer.
    """
    if not config.placement.learner_takes_turns:
        return
    network = config.network
    channel = open_mesh(mesh, config.security, Identity(Role.LEARNER), max_message_mb=network.max_message_mb)
    # It lists members, and never joins.
    agent = MembershipAgent(
        channel,
        membership_pb2.ROLE_LEARNER,
        member_id=identity_of(config.security, Role.LEARNER).member_id,
        address="",
        host_id=host_id(),
        timeout_s=network.rpc_timeout_s,
        retry_s=network.retry_s,
    )
    group = _group(config, agent, incarnation=0)
    try:
        if not takeover and (others := await agent.members(membership_pb2.ROLE_LEARNER)):
            other, silent_s = others[0].member_id, others[0].heartbeat_age_ms / 1e3
            raise TakeoverRefusedError(
                f"learner {other} has the devices, last heard {silent_s:.0f} s ago",
                hint="end it, or start with --takeover to replace it",
            )
        step_s = config.placement.step_timeout_s
        within_s = max(step_s, min(_ATTEMPTS * step_s, _LONGEST_S))
        answer = await group.sleep(generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS, within_s)
    finally:
        await group.close()
        await channel.close()
    if answer.failed:
        raise SwapError(
            f"generators have not given the devices back: {answer.failures()}", hint="see the generators' logs"
        )
    if answer.done:
        log.info("%d generator(s) sleep while models are loaded", len(answer.done))


def _group(config: Config, agent: MembershipAgent, incarnation: int) -> GeneratorGroup:
    identity = Identity(Role.LEARNER)

    def connect(address: str) -> grpc.aio.Channel:
        return open_channel(address, config.security, identity)

    return GeneratorGroup(agent, connect, host=host_id(), incarnation=incarnation)


async def _look(client: BufferClient, versions: EvaluatedVersions) -> TableView:
    counts = (await client.describe(TRAIN)).counts
    return TableView(counts.generating, counts.ready, counts.leased, versions.evaluation_is_open)
