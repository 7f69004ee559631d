"""The scorers that other services use: `RewardClient` (remote) and `LocalScorer` (in this process), one interface.

Invariant: `score` returns one result per item, in order. A failure of an item or of a server is an error result, never
an exception and never a score. A scorer that is merely slow makes callers wait, and fails nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.protos import membership_pb2, reward_pb2
from rollmesh.reward_service.call_times import GRACE_S
from rollmesh.reward_service.client.dispatcher import CallLimits, Dispatcher
from rollmesh.reward_service.client.endpoint import connector, mesh_connector
from rollmesh.reward_service.client.outgoing import ItemDetails, Wants, outgoing
from rollmesh.reward_service.client.transports.interface import Connect
from rollmesh.reward_service.judge.member import SharedJudge
from rollmesh.reward_service.outcomes import is_not_begun, is_pending
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.scoring.configured import configured_engine
from rollmesh.reward_service.scoring.engine import ScoringEngine

__all__ = [
    "CallLimits",
    "LocalScorer",
    "RewardClient",
    "RewardScorer",
    "build_scorer",
    "is_pending",
    "needs_discovery",
]


class RewardScorer(Protocol):
    """Scores items, here or elsewhere."""

    async def start(self) -> None:
        """Loads the functions that score here, so that the first items need not wait for them.

        Raises:
            RewardError: a function that cannot be loaded.
        """
        ...

    async def score(
        self,
        items: Sequence[reward_pb2.ScoreItem],
        *,
        timeout_s: float | None = None,
        details: Sequence[ItemDetails] | None = None,
    ) -> list[reward_pb2.ScoreResult]:
        """Scores items: one result per item, in order.

        An item whose reward comes later has the result `pending`: the caller asks again (`outcomes.is_pending`).

        Args:
            items: unique item_ids; a group's items are kept together where they are given together.
            timeout_s: seconds for an item, with retries and failover, without the wait for its turn; none:
                the scorer's default.
            details: of each item, for scorers that want more of it than it holds.

        Raises:
            PayloadError: two items with the same item_id.
        """
        ...

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Changes the default endpoints, `grpc://host:port` or `host:port`."""
        ...

    @property
    def scorers(self) -> Mapping[str, str]:
        """Versions by name of the scorers, as far as they are known."""
        ...

    @property
    def needs_group(self) -> bool:
        """True if a group's items have to be scored together, as far as that is known."""
        ...

    def present_wait(self) -> Wait:
        """The reason why items wait at present; empty while none does, or scoring works."""
        ...

    async def share_judge(self, agent: MembershipAgent, role: membership_pb2.Role, run: Path) -> None:
        """Shares limits and budget of a judge that this process asks itself with others, until it is cancelled.

        It returns at once where this process asks none. Arguments: as of `judge.member.shared_judge`.
        """
        ...

    async def close(self) -> None:
        """Ends all calls in flight."""
        ...


class LocalScorer:
    """Scores without a service: in this process and workers of its own.

    Args:
        engine: of its functions; closed with the scorer.
        wait_s: default deadline of `score` in seconds.
    """

    def __init__(self, engine: ScoringEngine, *, wait_s: float = 30.0) -> None:
        self._engine = engine
        self._wait_s = wait_s

    async def start(self) -> None:
        """See `RewardScorer.start`."""
        await self._engine.start()

    async def score(
        self,
        items: Sequence[reward_pb2.ScoreItem],
        *,
        timeout_s: float | None = None,
        details: Sequence[ItemDetails] | None = None,
    ) -> list[reward_pb2.ScoreResult]:
        """See `RewardScorer.score`."""
        _refuse_repeated(items)
        if details is not None:
            items = await self._with_details(items, details)
        # An item that has begun gets its whole time.
        limit = max(self._wait_s if timeout_s is None else timeout_s, 2 * (self._engine.call_timeout_s + GRACE_S))
        results = await self._engine.score(items, limit)
        while waiting := [place for place, result in enumerate(results) if is_not_begun(result)]:
            again = await self._engine.score([items[place] for place in waiting], limit)
            for place, result in zip(waiting, again, strict=True):
                results[place] = result
        return results

    async def _with_details(
        self, items: Sequence[reward_pb2.ScoreItem], details: Sequence[ItemDetails]
    ) -> list[reward_pb2.ScoreItem]:
        # Items say so themselves where a function cannot be loaded.
        with contextlib.suppress(RewardError):
            await self._engine.start()
        wanted = Wants.of_functions(self._engine.needs.wants)

        def make() -> list[reward_pb2.ScoreItem]:
            return [outgoing(item, own, wanted) for item, own in zip(items, details, strict=True)]

        return await asyncio.to_thread(make) if wanted.takes_a_while else make()

    @property
    def scorers(self) -> Mapping[str, str]:
        """See `RewardScorer.scorers`."""
        return self._engine.scorers

    @property
    def needs_group(self) -> bool:
        """See `RewardScorer.needs_group`."""
        return self._engine.needs.needs_group

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Has no endpoints to change."""

    def present_wait(self) -> Wait:
        """See `RewardScorer.present_wait`."""
        return self._engine.present_wait()

    async def share_judge(self, agent: MembershipAgent, role: membership_pb2.Role, run: Path) -> None:
        """See `RewardScorer.share_judge`."""
        if self._engine.judge is not None:
            await SharedJudge(self._engine.judge, agent, role, run).run()

    async def close(self) -> None:
        """See `RewardScorer.close`."""
        await self._engine.close()


class RewardClient:
    """Scores at endpoints.

    Args:
        endpoints: `grpc://host:port`, several share the load and stand in for one another.
        by_data_source: data_source -> its own endpoints.
        default: scores the sources without endpoints of their own instead of `endpoints` (in-process runs).
        limits: of the calls.
        connect: makes the transport to a default endpoint.
        connect_source: the same for an endpoint of `by_data_source`; by default as `connect`.
    """

    def __init__(
        self,
        endpoints: Iterable[str] = (),
        by_data_source: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        default: RewardScorer | None = None,
        limits: CallLimits | None = None,
        connect: Connect | None = None,
        connect_source: Connect | None = None,
    ) -> None:
        connect = connect or connector(SecuritySection())
        self._limits = limits = limits or CallLimits()
        self._local = default
        self._remote = Dispatcher(map(_with_scheme, endpoints), connect, limits)
        sets: dict[tuple[str, ...], Dispatcher] = {}
        self._by_source: dict[str, Dispatcher] = {}
        for source, addresses in by_data_source.items():
            key = tuple(addresses)
            if key not in sets:
                sets[key] = Dispatcher(key, connect_source or connect, limits)
            self._by_source[source] = sets[key]
        self._dispatchers = (self._remote, *sets.values())

    async def start(self) -> None:
        """See `RewardScorer.start`."""
        if self._local is not None:
            await self._local.start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The default endpoints in use."""
        return self._remote.endpoints

    async def score(
        self,
        items: Sequence[reward_pb2.ScoreItem],
        *,
        timeout_s: float | None = None,
        details: Sequence[ItemDetails] | None = None,
    ) -> list[reward_pb2.ScoreResult]:
        """See `RewardScorer.score`."""
        _refuse_repeated(items)
        limit = self._limits.wait_s if timeout_s is None else timeout_s
        routed: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            source = item.data_source if item.data_source in self._by_source else ""
            routed.setdefault(source, []).append(index)
        if len(routed) == 1:
            return await self._route(next(iter(routed)), items, limit, details)
        results: list[reward_pb2.ScoreResult] = [reward_pb2.ScoreResult()] * len(items)

        async def part(source: str, indices: list[int]) -> None:
            own = None if details is None else [details[index] for index in indices]
            answers = await self._route(source, [items[index] for index in indices], limit, own)
            for index, answer in zip(indices, answers, strict=True):
                results[index] = answer

        await asyncio.gather(*(part(source, indices) for source, indices in routed.items()))
        return results

    @property
    def scorers(self) -> Mapping[str, str]:
        """See `RewardScorer.scorers`."""
        known = {} if self._local is None else dict(self._local.scorers)
        for dispatcher in self._dispatchers:
            known |= dispatcher.scorers
        return known

    @property
    def needs_group(self) -> bool:
        """See `RewardScorer.needs_group`."""
        local = self._local is not None and self._local.needs_group
        return local or any(dispatcher.needs_group for dispatcher in self._dispatchers)

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Changes the default endpoints, as the mesh lists them."""
        self._remote.set_endpoints(map(_with_scheme, endpoints))

    def present_wait(self) -> Wait:
        """See `RewardScorer.present_wait`."""
        waits = [dispatcher.present_wait() for dispatcher in self._by_source.values()]
        waits.append(self._remote.present_wait() if self._local is None else self._local.present_wait())
        return next(filter(None, waits), NO_WAIT)

    async def share_judge(self, agent: MembershipAgent, role: membership_pb2.Role, run: Path) -> None:
        """See `RewardScorer.share_judge`."""
        if self._local is not None:
            await self._local.share_judge(agent, role, run)

    async def close(self) -> None:
        """Ends calls in flight and closes the channels."""
        await asyncio.gather(*(dispatcher.close() for dispatcher in self._dispatchers))
        if self._local is not None:
            await self._local.close()

    async def _route(
        self,
        source: str,
        items: Sequence[reward_pb2.ScoreItem],
        limit: float,
        details: Sequence[ItemDetails] | None,
    ) -> list[reward_pb2.ScoreResult]:
        dispatcher = self._by_source.get(source)
        if dispatcher is None and self._local is not None:
            return await self._local.score(items, timeout_s=limit, details=details)
        return await (dispatcher or self._remote).score(items, timeout_s=limit, details=details)


def build_scorer(config: Config, *, discovered: Iterable[str] = ()) -> RewardScorer:
    """The scorer that a configuration asks for; call it on the event loop that will use it.

    It scores in process, at the configured endpoints, or at the mesh's own reward services. The caller passes those of
    the mesh as `discovered`, and keeps them up to date with `set_endpoints` (needed only where
    `needs_discovery(config)`).

    Raises:
        ConfigError: a malformed endpoint or route.
        RewardError: a scorer that does not exist, or a judge that cannot be asked (in process).
    """
    reward, security = config.reward, config.security
    endpoints = split_routes(reward.by_data_source)[1]
    size = config.network.max_message_mb
    foreign = connector(security, reward.key_files, reward.tls, max_message_mb=size)
    asking = Identity(Role.GENERATOR)
    local = None
    if reward.in_process:
        local = LocalScorer(configured_engine(reward), wait_s=config.rollout.reward_wait_s)
        if not endpoints:
            return local
    return RewardClient(
        () if reward.in_process else reward.endpoints or discovered,
        endpoints,
        default=local,
        limits=CallLimits(reward.timeout_s, reward.attempts, config.rollout.reward_wait_s),
        connect=foreign if reward.endpoints else mesh_connector(security, asking, max_message_mb=size),
        connect_source=foreign,
    )


def needs_discovery(config: Config) -> bool:
    """True if reward services are to be found through the mesh's membership."""
    return not config.reward.in_process and not config.reward.endpoints


def _with_scheme(address: str) -> str:
    return address if "://" in address else f"grpc://{address}"


def _refuse_repeated(items: Sequence[reward_pb2.ScoreItem]) -> None:
    if len({item.item_id for item in items}) != len(items):
        raise PayloadError("item_id", "two items have the same", hint="item ids are unique in one score call")
