"""Roles served over gRPC by a thread of the test's process, or by several processes; and learners that call them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.worker import Worker
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.engines.world import World
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.learner.role_service.role_ranks import RoleRanks, follow
from rollmesh.learner.role_service.role_worker import RoleWorker
from rollmesh.learner.role_service.servicer import RoleServicer
from rollmesh.learner.roles.client import RoleClient, RoleLimits
from rollmesh.learner.roles.remote_role import RemoteRole
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.config.learner import DistributedSection
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import role_pb2, role_pb2_grpc
from rollmesh.testing.worlds import EngineWorld, Harness
from tests.learner.dataflow import OPTIMIZER, VERSION, Probe, make_groups, make_plan, make_worker, weights
from tests.learner.engines.models import make_spec

_END_S = 240.0
# As long as a test that a busy machine slows down.
_SERVED_S = 600.0
LIMITS = RoleLimits(silence_s=240.0, away_s=240.0, call_s=240.0)


@dataclass
class Served:
    """A role that is served.

    Attributes:
        address: of its server; another one after it has started again.
        worker: of its only rank.
        stop: ends its server.
    """

    address: str
    worker: RoleWorker
    stop: Callable[[], None]


@contextmanager
def serve_role(
    role: ModelRole, algorithm: Algorithm, build: Callable[[], Engine], *, token_budget: int = 1 << 20
) -> Iterator[Served]:
    """Serves a role from a thread."""
    worker = RoleWorker(role, algorithm, build, token_budget=token_budget)
    watch = RankWatch(None, RankId(0, 1), silent_s=60.0)
    ranks = RoleRanks(worker, None, watch)
    thread = threading.Thread(target=ranks.serve)
    thread.start()
    try:
        with ExitStack() as closers:
            address = closers.enter_context(_listening(role, worker, ranks))
            yield Served(address, worker, closers.close)
    finally:
        ranks.stop()
        thread.join(_END_S)
        worker.close()


def serve_on_ranks(
    harness: Harness,
    model: Path,
    role: ModelRole,
    changes: Mapping[str, Any],
    meeting: Path,
    make_algorithm: Callable[[], Algorithm] = Probe,
) -> dict[str, Any]:
    """One of the processes of a role; rank 0 writes its address, and they end when the pipe `end` is closed.

    Returns:
        The weights at the end.
    """
    del harness  # the worker closes its engine
    worker = RoleWorker(role, make_algorithm(), builder(model, role, changes), token_budget=30)
    channel = RankChannel(DistributedSection())
    watch = RankWatch(None, RankId(worker.engine.layout.process, worker.engine.layout.processes), silent_s=60.0)
    if worker.engine.layout.leads:
        ranks = RoleRanks(worker, channel, watch)
        with _listening(role, worker, ranks) as address:
            (meeting / "address.new").write_text(address)
            threading.Thread(target=_stop_at_end, args=(meeting / "end", ranks), daemon=True).start()
            os.replace(meeting / "address.new", meeting / "address")
            ranks.serve()
    else:
        follow(worker, channel, watch)
    found = weights(worker.engine)
    worker.close()
    return found


@contextmanager
def role_on_ranks(
    world: EngineWorld,
    folder: Path,
    model: Path,
    role: ModelRole,
    changes: Mapping[str, Any],
    make_algorithm: Callable[[], Algorithm] = Probe,
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Serves a role from the processes of a world.

    Args:
        world: whose processes serve it meanwhile.
        folder: empty, for its address and the pipe that ends it.
        model, role, changes, make_algorithm: as of `serve_on_ranks`.

    Yields:
        Its address, and a function that ends it and gives the weights.
    """
    os.mkfifo(folder / "end")
    with ThreadPoolExecutor(1) as thread:
        serve = partial(world.run, serve_on_ranks, model, role, changes, folder, make_algorithm, deadline_s=_SERVED_S)
        running = thread.submit(serve)
        address = _wait_for_address(folder / "address", running)
        with (folder / "end").open("wb") as end:

            def finish() -> dict[str, Any]:
                end.close()
                return running.result(_END_S)[0]

            yield address, finish


def _wait_for_address(path: Path, running: Future[Any]) -> str:
    deadline = time.monotonic() + _SERVED_S
    while not path.exists():
        assert not running.done(), running.result()
        assert time.monotonic() < deadline
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    return path.read_text()


def _stop_at_end(pipe: Path, ranks: RoleRanks) -> None:
    with pipe.open("rb") as reader:
        reader.read()
    ranks.stop()


@contextmanager
def _listening(role: ModelRole, worker: RoleWorker, ranks: RoleRanks) -> Iterator[str]:
    bridge, security = AsyncBridge(), SecuritySection()

    async def listen() -> tuple[grpc.aio.Server, int]:
        server = new_server(security)
        description = role_pb2.DescribeRoleResponse(
            role=role.name, kind=role.kind, trained=role.trained, vocab_size=worker.engine.vocab_size
        )
        role_pb2_grpc.add_RoleModelServicer_to_server(RoleServicer(description, ranks, most_bytes=1 << 24), server)
        port = bind(server, "127.0.0.1", 0, security)
        await server.start()
        return server, port

    server, port = bridge.call(listen(), _END_S)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        bridge.call(server.stop(None), _END_S)
        bridge.close()


def builder(model: Path, role: ModelRole, changes: Mapping[str, Any] | None = None) -> Callable[[], Engine]:
    """Makes the engine of a role."""
    changed = dict(changes or {})
    backend = changed.pop("backend", "fsdp2")

    def build() -> Engine:
        spec = make_spec(model, optimizer=OPTIMIZER if role.trained else None, **changed)
        return create_engine(spec, model_type=role.kind, backend=backend)  # type: ignore[arg-type]  # of the two kinds

    return build


def remote_roles(
    roles: Sequence[ModelRole],
    algorithm: Algorithm,
    world: World,
    addresses: Callable[[], Sequence[str]],
    bridge: AsyncBridge,
    limits: RoleLimits = LIMITS,
) -> dict[str, RemoteRole]:
    """The roles as a learner's leading process sees them, not attached yet."""

    async def find() -> Sequence[str]:
        return addresses()

    found = {}
    for role in roles:
        client = RoleClient(role, {}, find, lambda address: open_channel(address, SecuritySection()), limits)
        found[role.name] = RemoteRole(role, algorithm, world)
        found[role.name].connect(bridge, client)
    return found


@contextmanager
def connected_worker(
    algorithm: Algorithm,
    actor: Engine,
    groups: Sequence[SampledGroup],
    folder: Path,
    addresses: Sequence[str],
    *,
    epochs: int,
) -> Iterator[Worker]:
    """The worker of one of the learner's ranks, with all roles but the actor elsewhere, attached."""
    bridge = AsyncBridge()
    if actor.layout.leads:
        roles = remote_roles(algorithm.needs.roles, algorithm, actor.world, lambda: addresses, bridge)
    else:
        roles = {role.name: RemoteRole(role, algorithm, actor.world) for role in algorithm.needs.roles}
    worker = make_worker(algorithm, {ACTOR: actor}, groups, folder, epochs=epochs, token_budget=40, elsewhere=roles)
    worker.attach_roles(1)
    yield worker
    worker.close()
    bridge.close()


def train_on_ranks(harness: Harness, model: Path, folder: Path, addresses: Sequence[str]) -> dict[str, Any]:
    """One of the learner's ranks: trains the probe with all roles but the actor elsewhere, and saves a checkpoint."""
    del harness  # the worker closes its engine
    groups, actor = make_groups(), create_engine(make_spec(model, optimizer=OPTIMIZER))
    with connected_worker(Probe(), actor, groups, folder, addresses, epochs=2) as worker:
        worker.prepare(make_plan(groups, token_budget=40, minibatches=2, dp_sizes=worker.dp_sizes))
        result = worker.train(lambda: None)
        path = worker.begin_checkpoint(PolicyVersion(1, VERSION + 1), {}).result(240)
        saved = sorted(p.name for p in path.iterdir())
        return {"actor": weights(actor), "metrics": result.metrics, "saved": saved}
