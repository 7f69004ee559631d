"""State that the handlers of one front share, and helpers of every standing stream."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from rollmesh.buffer.monitoring.generator_fleet import GeneratorFleet
from rollmesh.buffer.monitoring.queue_latency import QueueLatency
from rollmesh.buffer.monitoring.redis_outage import RedisOutage
from rollmesh.buffer.monitoring.wait_clocks import WaitClocks
from rollmesh.buffer.policy.rules import TableRules
from rollmesh.buffer.policy.turns import GeneratorTurns
from rollmesh.buffer.server.admission_dealer import AdmissionDealer
from rollmesh.buffer.server.change_notifier import ChangeNotifier, OpenStreams
from rollmesh.buffer.server.custom_score import Score
from rollmesh.buffer.store.store import Store
from rollmesh.mesh.errors import PayloadError, RollmeshError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.mesh.tables import TABLES, TRAIN
from rollmesh.mesh.telemetry.tracing import Tracer, no_traces

Request = TypeVar("Request")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MembershipRules:
    """Answers of Join, and the term of a membership.

    Attributes:
        run_name, config_json: as Join hands them out.
        member_ttl_ms: silence after which a member counts as lost.
    """

    run_name: str
    config_json: str
    member_ttl_ms: int


@dataclass(frozen=True, slots=True)
class DrawRules:
    """Settings of the orders that weigh ready groups.

    Attributes:
        score: the user's, where it ranks the ready groups.
        priority_exponent: weight of a draw = priority to this power.
    """

    score: Score | None = None
    priority_exponent: float = 1.0


@dataclass(slots=True)
class FrontContext:
    """The parts of one front process.

    Attributes:
        store: the commands.
        rules: by table.
        membership: of the mesh.
        draws: weighted draws from the ready groups.
        max_message_bytes: of a message that clients take.
        fleet: the generators as of the last sweep.
        queue_latency: how long groups took and waited that this front has leased.
        fronts: addresses of the fronts that are alive, as of the last sweep.
        admit_streams: by table, those that are open here.
        dealers: by table, of what may be admitted through these.
        turns: of work for generators.
        outage: reports Redis' failures.
        tracer: of trajectories.
    """

    store: Store
    rules: dict[str, TableRules]
    membership: MembershipRules
    draws: DrawRules
    max_message_bytes: int
    changes: ChangeNotifier = field(default_factory=ChangeNotifier)
    wait_clocks: dict[str, WaitClocks] = field(default_factory=lambda: {table: WaitClocks() for table in TABLES})
    fleet: GeneratorFleet = field(default_factory=GeneratorFleet)
    queue_latency: QueueLatency = field(default_factory=QueueLatency)
    fronts: list[str] = field(default_factory=list)
    admit_streams: dict[str, OpenStreams] = field(default_factory=lambda: {table: OpenStreams() for table in TABLES})
    dealers: dict[str, AdmissionDealer] = field(init=False)
    turns: GeneratorTurns = field(default_factory=GeneratorTurns)
    outage: RedisOutage = field(default_factory=RedisOutage)
    tracer: Tracer = field(default_factory=no_traces)
    _tasks: BackgroundTasks = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = BackgroundTasks(self._on_task_error)
        self.dealers = {table: AdmissionDealer(rules) for table, rules in self.rules.items()}

    def checked_table(self, table: str) -> str:
        """The table's name.

        Raises:
            PayloadError: there is no such table.
        """
        if table not in self.rules:
            raise PayloadError("table", f"expected one of {sorted(self.rules)}, got {table!r}")
        return table

    def set_wait(self, table: str, kind: str, who: str, reason: str) -> None:
        """Runs a clock while there is a reason to wait. Evaluation has none: its waits are no bottleneck."""
        if reason and table == TRAIN:
            self.wait_clocks[table].begin(kind, who, reason)
        else:
            self.wait_clocks[table].end(kind, who)

    async def drain(self, timeout_s: float) -> None:
        """Waits for spawned tasks, before the store is closed."""
        await self._tasks.drain(timeout_s)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], what: str) -> None:
        """Runs something alongside the handlers; its failures are logged."""
        self._tasks.spawn(coroutine, what)

    def _on_task_error(self, what: str, error: BaseException) -> None:
        if isinstance(error, RollmeshError):
            self.outage.report(what, error)
        else:
            log.error("%s failed", what, exc_info=error)


class StreamOwnership:
    """Marks a holder's stream as open; when it ends, however it ends, the holder's leases are shortened.

    The token makes this safe with several fronts: an old stream's end does not touch what a newer stream holds.
    """

    def __init__(self, front: FrontContext, table: str, holder: str, on_end: Callable[[], None]) -> None:
        self.token = uuid.uuid4().hex
        self._front, self._table, self._holder, self._on_end = front, table, holder, on_end

    async def __aenter__(self) -> StreamOwnership:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_end()
        # The handler is usually being cancelled, so this runs in a task of its own.
        self._front.spawn(self._front.store.detach(self._table, self._holder, self.token), "detaching a stream")


@asynccontextmanager
async def read_requests(
    requests: AsyncIterator[Request], handle: Callable[[Request], None], event: asyncio.Event
) -> AsyncIterator[asyncio.Task[None]]:
    """Reads a stream's requests concurrently with its handler; each sets the event. The task ends with the client."""

    async def read() -> None:
        try:
            async for request in requests:
                handle(request)
                event.set()
        finally:
            event.set()

    reader = asyncio.create_task(read())
    try:
        yield reader
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
