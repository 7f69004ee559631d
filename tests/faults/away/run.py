"""The driver's side of one run of the matrix: what it asks of the processes, and what became of the groups."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmesh.buffer.client.client import BufferClient
from rollmesh.protos import buffer_pb2 as pb
from tests import fork_server
from tests.faults.away.cases import GROUPS, Case, Rules
from tests.faults.proxy import Conditions, Link

LEASE_S = 1.2
# Longest wait until a run has trained on once a fault is over; the mesh promises 30 s.
BOUND_S = 30.0
MANY = 1 << 30
_CONDITIONS = {"cut": Conditions("cut"), "dark": Conditions("blackhole")}
_LOOK_S = 0.06
# A state that has not changed for so long is at rest.
_REST_S = 0.15


class Host:
    """A process of `tests.faults.away.host`."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self._log = name, log
        self._heard: dict[tuple[str, str], asyncio.Queue[dict[str, Any]]] = defaultdict(asyncio.Queue)

    async def start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log.open("wb") as sink:
            self._process = await asyncio.to_thread(
                fork_server.popen, [], module="tests.faults.away.host", **pipes, stderr=sink, text=True
            )
        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def order(self, do: str, run: str, **facts: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, "run": run, **facts}), file=self._process.stdin, flush=True)

    async def until(self, run: str, event: str, within_s: float = BOUND_S) -> dict[str, Any]:
        """The next event of this kind of a run.

        Raises:
            AssertionError: there was none in time, with what the process has logged; or it tells of an error.
        """
        try:
            async with asyncio.timeout(within_s):
                heard = await self._heard[run, event].get()
        except TimeoutError:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise AssertionError(f"{self.name}: run {run} has not {event} within {within_s} s\n{tail}") from None
        assert "error" not in heard, f"{self.name}: run {run}: {heard['error']}"
        return heard

    async def close(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            # The last ones come when the loop has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._heard[event["run"], event["event"]].put_nowait, event)


@dataclass
class Run:
    """One run, and what became of its groups."""

    rules: Rules
    name: str
    hosts: dict[str, Host]
    links: dict[str, list[Link]]
    client: BufferClient
    channel: Any
    trained: list[tuple[int, list[tuple[str, int]]]] = field(default_factory=list)

    def allow(self, groups: int, name: str = "generator") -> None:
        self.hosts[name].order("allow", self.name, name=name, groups=groups)

    async def close(self) -> None:
        for link in itertools.chain(*self.links.values()):
            await asyncio.to_thread(link.close)
        await self.channel.close()

    async def counts(self) -> pb.LedgerCounts:
        return (await self.client.describe("train")).counts

    async def until_trained(self, within_s: float = BOUND_S) -> float:
        """The next batch; when it was trained, by the monotonic clock.

        Raises:
            AssertionError: there was none in time; with what the buffer says of the run.
        """
        try:
            event = await self.hosts["learner"].until(self.name, "trained", within_s)
        except AssertionError as error:
            raise AssertionError(f"{self.rules}: {error}\n{await self.client.describe('train')}") from None
        self.trained.append((event["version"], [(gid, ordinal) for gid, ordinal in event["groups"]]))
        return float(event["at"])

    def trained_so_far(self) -> int:
        """Batches, without a wait."""
        heard = self.hosts["learner"]._heard[self.name, "trained"]
        while not heard.empty():
            event = heard.get_nowait()
            self.trained.append((event["version"], [(gid, ordinal) for gid, ordinal in event["groups"]]))
        return len(self.trained)

    async def hold(self, wanted: int, within_s: float) -> None:
        """Stops the generator when the learner holds part of a batch: `wanted` groups, or more.

        Raises:
            AssertionError: the run does not get so far.
        """
        self.allow(0)
        until, since, seen = time.monotonic() + within_s, time.monotonic(), None
        while True:
            counts = await self.counts()
            now = (counts.generating, counts.ready, counts.leased, counts.consumed + counts.trained)
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _REST_S:
                if wanted <= counts.leased < GROUPS:
                    return
                if counts.leased < GROUPS:
                    self.allow(1)
                    await self.hosts["generator"].until(self.name, "finished", within_s)
                    seen = None
            if time.monotonic() > until:
                raise AssertionError(f"{self.rules}: no one continues\n{await self.client.describe('train')}")
            await asyncio.sleep(_LOOK_S)

    async def until(self, reached: Callable[[pb.DescribeResponse], bool]) -> None:
        """Waits until the buffer describes the run so.

        Raises:
            AssertionError: it does not in time.
        """
        until = time.monotonic() + BOUND_S
        while not reached(known := await self.client.describe("train")):
            assert time.monotonic() < until, f"{self.rules}: {known}"
            await asyncio.sleep(_LOOK_S)

    async def link(self, who: str, conditions: Conditions) -> None:
        """Changes what lies between the learner, or the generator, and all fronts."""
        for link in self.links[who]:
            await asyncio.to_thread(link.apply, "*", conditions)

    async def suffer(self, case: Case) -> None:
        """A link that breaks, and is mended."""
        who, kind = case.fault.split("'")[0], case.fault.rsplit(" ", 1)[1]
        await self.link(who, _CONDITIONS[kind])
        await asyncio.sleep(case.terms * LEASE_S)
        await self.link(who, Conditions())

    async def audit(self) -> None:
        """The ledger balances, and nothing was trained more often than it may be."""
        ledger = await self.client.ledger("train", 10)
        assert list(ledger.discrepancies) == [], f"{self.rules}: {ledger}"
        versions = [version for version, _ in self.trained]
        assert versions == list(range(len(versions))), (self.rules, versions)
        for version, groups in self.trained:
            assert len(set(groups)) == GROUPS, (self.rules, version, groups)
        uses = Counter(group for _, groups in self.trained for group in groups)
        assert max(uses.values(), default=0) <= self.rules.reuse, (self.rules, uses.most_common(3))
        owners: dict[int, str] = {}
        for gid, ordinal in uses:
            assert owners.setdefault(ordinal, gid) == gid, f"{self.rules}: prompt {ordinal} was trained in two groups"
