"""The generators that share this learner's devices: asked to sleep and to wake, all at once.

Every call may be repeated: replies are lost, and generators die and come back. A call ends for a generator by its
answer, by its refusal, or because it is gone. One that has left the mesh but still runs on this host is not gone: it
has its memory. All coroutines belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import psutil

from rollmesh.mesh.errors import FencedError, RollmeshError, StoreError, UnreachableError
from rollmesh.mesh.membership import ASLEEP, SHARES_DEVICES, MembershipAgent
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2, generator_pb2_grpc, membership_pb2

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
# Longest wait for one answer before the call is repeated. The generator continues its work meanwhile.
_TRY_S = 20.0
_PAUSE_S = 0.2
_LOOK_S = 0.5
# Between two looks for generators that have come: each lists all members.
_NEWCOMERS_S = 1.0
# Longest wait for the list of members: without it the generators that are known are asked.
_LISTING_S = 5.0
# Once others are awake, those that are late get this long, or as long as it took the others if that is more.
_LATE_S = 15.0
# Clocks of a host and its mesh differ by less.
_CLOCKS_S = 60.0
# Before a generator that could not be woken is asked again.
_RETRY_S = 5.0
# A gauge is not older: one that says that a generator sleeps is believed so long after it was woken.
_GAUGE_S = 5.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens, and the learner's own log-probs of them under the version that generators load; empty: no probe.

    Attributes:
        token_ids: at least two.
        log_probs: nats, one fewer than the tokens, at temperature 1.
    """

    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()


@dataclass(slots=True)
class GroupAnswer:
    """The outcome of one step, by generator.

    Attributes:
        done: answers.
        failed: refusals, in words, and those without an answer.
        silent: those of them without an answer.
        gone: those that do not run any more.
    """

    done: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    gone: list[str] = field(default_factory=list)

    def failures(self, *, without_silent: bool = False) -> str:
        """The failures in one line.

        Args:
            without_silent: those without an answer are left out.
        """
        told = {name: why for name, why in self.failed.items() if not (without_silent and name in self.silent)}
        return "; ".join(f"{name}: {why}" for name, why in sorted(told.items()))


class GeneratorGroup:
    """The generators of one run that share devices with its learner.

    Args:
        agent: the learner's, joined: knows the members.
        connect: opens a channel to an address.
        host: this process's host id.
        incarnation: of the learner.

    Attributes:
        waiting_for: member ids that have not answered the present step.
    """

    def __init__(
        self,
        agent: MembershipAgent,
        connect: Callable[[str], grpc.aio.Channel],
        *,
        host: str,
        incarnation: int,
    ) -> None:
        self._agent = agent
        self._connect = connect
        self._host = host
        self._incarnation = incarnation
        self._channels: dict[str, grpc.aio.Channel] = {}
        # Members that have left the mesh, and may still run.
        self._known: dict[str, membership_pb2.Member] = {}
        # When each was woken.
        self._awake: dict[str, float] = {}
        self.waiting_for: set[str] = set()

    async def sleep(self, level: generator_pb2.SleepLevel, timeout_s: float) -> GroupAnswer:
        """Has all generators sleep at least as deep as a level.

        Raises:
            FencedError: another learner has taken over.
        """
        request = generator_pb2.SleepRequest(incarnation=self._incarnation, level=level)
        self._awake.clear()
        return await self._ask_all(lambda stub, try_s: stub.Sleep(request, timeout=try_s), timeout_s)

    async def wake(
        self, request: generator_pb2.WakeRequest, timeout_s: float, *, without: Collection[str] = ()
    ) -> GroupAnswer:
        """Has all generators take a step of waking up; those that are late do not hold up the others.

        Args:
            request: of `wake_request`.
            timeout_s: for all of them.
            without: member ids that are not asked.

        Raises:
            FencedError: another learner has taken over.
        """
        answer = await self._ask_all(
            lambda stub, try_s: stub.Wake(request, timeout=try_s), timeout_s, without=without, waits_for_all=False
        )
        if request.step == generator_pb2.WAKE_STEP_GENERATING:
            self._awake.update(dict.fromkeys(answer.done, _now()))
        return answer

    def wake_request(
        self, step: generator_pb2.WakeStep, policy: PolicyVersion, probe: Probe, *, others_generate: bool = False
    ) -> generator_pb2.WakeRequest:
        """A request of this learner.

        Args:
            step: the last that is asked for.
            policy: the least version to be served.
            probe: proves it.
            others_generate: who still sleeps gives its groups back to them.
        """
        return generator_pb2.WakeRequest(
            incarnation=self._incarnation,
            step=step,
            policy=policy.to_proto(),
            probe_ids=probe.token_ids,
            probe_log_probs=probe.log_probs,
            others_generate=others_generate,
        )

    async def keep_awake(self, request: generator_pb2.WakeRequest, timeout_s: float) -> None:
        """Wakes generators that come later, that could not be woken before, or that another has put to sleep.

        It continues until it is cancelled. A learner that starts puts generators to sleep before it knows whether it
        may take the run over.

        Args:
            request: `WAKE_STEP_GENERATING`.
            timeout_s: of one attempt.
        """
        attempts: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for member in await self._members():
                    name = member.member_id
                    if member.gauges.get(ASLEEP) and _now() - self._awake.get(name, 0.0) > _GAUGE_S:
                        self._awake.pop(name, None)
                    if name not in self._awake and (name not in attempts or attempts[name].done()):
                        attempts[name] = asyncio.create_task(self._wake_one(member, request, timeout_s))
                await asyncio.sleep(_NEWCOMERS_S)
        finally:
            for attempt in attempts.values():
                attempt.cancel()
            await asyncio.gather(*attempts.values(), return_exceptions=True)

    async def close(self) -> None:
        """Closes all channels."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()), return_exceptions=True)

    async def _wake_one(
        self, member: membership_pb2.Member, request: generator_pb2.WakeRequest, timeout_s: float
    ) -> None:
        answer = GroupAnswer()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(member, lambda stub, try_s: stub.Wake(request, timeout=try_s), answer)
        except TimeoutError:
            answer.failed[member.member_id] = f"no answer within {timeout_s:.0f} s"
        except FencedError:
            return
        if answer.done:
            self._awake[member.member_id] = _now()
        if answer.failed:
            log.warning("could not be woken: %s", answer.failures())
            await asyncio.sleep(_RETRY_S)

    async def _ask_all(
        self,
        call: Callable[[Any, float], Awaitable[Any]],
        timeout_s: float,
        *,
        without: Collection[str] = (),
        waits_for_all: bool = True,
    ) -> GroupAnswer:
        answer, began = GroupAnswer(), _now()
        members = await self._present()
        if members is None:
            members = self._known
        # A member that has left, and still runs here, has its memory.
        self._known = {**{name: m for name, m in self._known.items() if self._runs_here(m)}, **members}
        await self._close_unused()
        asked = {name: member for name, member in self._known.items() if name not in without}
        self.waiting_for = set(asked)
        tasks = [asyncio.create_task(self._ask(member, call, answer), name=name) for name, member in asked.items()]
        watch = asyncio.create_task(self._watch(asked, tasks, answer))
        try:
            await _ended(tasks, timeout_s, waits_for_all=waits_for_all)
        finally:
            watch.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        waited_s = _now() - began
        for name in self.waiting_for - set(answer.done) - set(answer.failed) - set(answer.gone):
            answer.failed[name] = f"no answer within {waited_s:.0f} s"
            answer.silent.add(name)
        self.waiting_for = set()
        return answer

    async def _close_unused(self) -> None:
        """Closes the channels to generators that are gone."""
        used = {member.address for member in self._known.values()}
        for address in self._channels.keys() - used:
            await self._channels.pop(address).close()

    async def _ask(
        self, member: membership_pb2.Member, call: Callable[[Any, float], Awaitable[Any]], answer: GroupAnswer
    ) -> None:
        """Repeats a call until there is an answer."""
        name = member.member_id
        while True:
            try:
                answer.done[name] = await call(self._stub(member.address), _TRY_S)
            except grpc.aio.AioRpcError as error:
                if is_transient(error):
                    await asyncio.sleep(_PAUSE_S)
                    continue
                failure = to_rollmesh_error(error, f"generator {name}")
                if isinstance(failure, FencedError) and await self._is_fenced():
                    raise failure from error
                answer.failed[name] = str(failure)
            self.waiting_for.discard(name)
            return

    async def _watch(
        self, asked: Mapping[str, membership_pb2.Member], tasks: Sequence[asyncio.Task[None]], answer: GroupAnswer
    ) -> None:
        """Ends the calls to generators that do not run any more."""
        while True:
            await asyncio.sleep(_LOOK_S)
            present = await self._present()
            if present is None:
                continue
            for name, task in zip(asked, tasks, strict=True):
                if (
                    not task.done()
                    and not _is_same(present.get(name), asked[name])
                    and not self._runs_here(asked[name])
                ):
                    answer.gone.append(name)
                    self.waiting_for.discard(name)
                    self._known.pop(name, None)
                    task.cancel()

    async def _present(self) -> dict[str, membership_pb2.Member] | None:
        """The members by id; None where the mesh does not say."""
        try:
            async with asyncio.timeout(_LISTING_S):
                return {member.member_id: member for member in await self._members()}
        except (TimeoutError, UnreachableError, StoreError) as error:
            log.warning("the members of the mesh are not known for now: %s", error or "no answer")
            return None

    async def _members(self) -> list[membership_pb2.Member]:
        members = await self._agent.members(membership_pb2.ROLE_GENERATOR)
        return [member for member in members if member.gauges.get(SHARES_DEVICES) and member.address]

    async def _is_fenced(self) -> bool:
        """True where the mesh says so too: one generator's word ends no run."""
        if not self._incarnation:
            return False
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, RollmeshError):
            async with asyncio.timeout(_LISTING_S):
                await self._agent.heartbeat()
        return self._agent.fenced.is_set()

    def _runs_here(self, member: membership_pb2.Member) -> bool:
        """True where the process of a member runs on this host."""
        if member.host_id != self._host:
            return False
        try:
            process = psutil.Process(member.pid)
            # Another process may have got its number.
            is_it = process.create_time() < member.joined_unix_ms / 1e3 + _CLOCKS_S
            return bool(is_it and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False

    def _stub(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return generator_pb2_grpc.GeneratorControlStub(self._channels[address])


async def _ended(tasks: Sequence[asyncio.Task[None]], timeout_s: float, *, waits_for_all: bool) -> None:
    """Waits until calls have ended, one has raised, or it is not worth waiting for the rest."""
    began = _now()
    waiting, deadline = set(tasks), began + timeout_s
    while waiting and (left_s := deadline - _now()) > 0:
        ended, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if any(not task.cancelled() and task.exception() is not None for task in ended):
            return
        if ended and not waits_for_all:
            deadline = min(began + timeout_s, _now() + max(_LATE_S, _now() - began))


def _is_same(present: membership_pb2.Member | None, asked: membership_pb2.Member) -> bool:
    """True where a member is the process that was asked: one that starts again may keep its id."""
    return present is not None and (present.address, present.pid) == (asked.address, asked.pid)


def _now() -> float:
    return asyncio.get_running_loop().time()
