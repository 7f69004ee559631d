"""Runs of the matrix and the four processes that they share: two of fronts, one of learners, one of generators."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.buffer.client.client import BufferClient
from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from tests.buffer.mesh_fixture import make_config
from tests.faults.away.cases import GROUPS, STOPS, Case, Rules
from tests.faults.away.run import BOUND_S, LEASE_S, MANY, Host, Run
from tests.faults.proxy import ProxyLoop
from tests.faults.world import free_port

PROCESSES = ("front-0", "front-1", "learner", "generator")
_GRACE_S = 0.3
# Processes with links of their own to fronts.
_LINKED = ("learner", "generator")
_STOPPED = {"learner stops": "learner", "front stops": "front-0", "generator stops": "generator"}
_START_S = 240.0
# The most groups that a generator holds: more than any gate lets it have, so that it always has room for what was lost.
_MOST = 8 * GROUPS


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        seconds: from the end of the fault to the next batch; 0 where it came before.
        stall: what the buffer said where no batch came; else empty.
    """

    case: Case
    seconds: float
    stall: str = ""


class World:
    """Owns the processes, and a Redis."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.redis_folder = folder / "redis"
        self._numbers = itertools.count()
        self._ports: set[int] = set()
        self.runs: list[Run] = []

    async def start(self) -> None:
        """Starts the processes, without runs."""
        self.runs = []
        self._proxies = ProxyLoop()
        self.redis = EmbeddedRedis(self.redis_folder, durability="always")
        await self.redis.start()
        self.hosts = {name: Host(name, self._folder / f"{name}.log") for name in PROCESSES}
        await asyncio.gather(*(host.start() for host in self.hosts.values()))

    async def close(self) -> None:
        """Ends everything."""
        await asyncio.gather(*(host.close() for host in self.hosts.values()))
        for run in self.runs:
            await run.close()
        self._proxies.close()
        await self.redis.stop()

    async def add(self, rules: Sequence[Rules]) -> list[Run]:
        """Starts runs."""
        started = await asyncio.gather(*(self._start(one, next(self._numbers)) for one in rules))
        self.runs += started
        return list(started)

    async def have(self, rules: Sequence[Rules]) -> None:
        """Starts those runs that there are none of."""
        known = {run.rules for run in self.runs}
        await self.add([one for one in rules if one not in known])

    def _port(self) -> int:
        """A free port, each only once: fronts bind theirs a while later."""
        while (port := free_port()) in self._ports:
            continue
        self._ports.add(port)
        return port

    async def _start(self, rules: Rules, number: int) -> Run:
        folder = self._folder / f"run-{number}"
        folder.mkdir()
        name = f"run-{number}"
        score = folder / "score.py"
        score.write_text("def longest_first(group):\n    return sum(group.response_tokens)\n")
        buffer = {
            "redis": self.redis.url,
            "order": f"{score}:longest_first" if rules.order == "score" else rules.order,
            "max_staleness": rules.staleness,
            "max_reuse": rules.reuse,
            "lease_s": LEASE_S,
            "reconnect_grace_s": _GRACE_S,
        }
        ports = [self._port() for _ in range(rules.fronts)]
        for index, port in enumerate(ports):
            config = make_config(
                folder,
                run={"name": name},
                learner={"batch": {"groups": GROUPS}},
                rollout={"n": 2, "max_attempts": 1000},
                network={"metrics": False},
                buffer=buffer,
            )
            path = folder / f"front-{index}.json"
            path.write_text(config.model_dump_json())
            fronts = self.hosts[f"front-{index}"]
            fronts.order("front", name, config=str(path), port=port)
            # One after the other: the first one's rules hold.
            await fronts.until(name, "ready", _START_S)
        links = {who: [await asyncio.to_thread(self._proxies.link, port) for port in ports] for who in _LINKED}
        meshes = {who: ",".join(link.address for link in found) for who, found in links.items()}
        learner, generator = self.hosts["learner"], self.hosts["generator"]
        learner.order("learn", name, mesh=meshes["learner"], folder=str(folder), groups=GROUPS, commit_every=3)
        await learner.until(name, "ready", _START_S)
        generator.order("generate", name, name="generator", mesh=meshes["generator"], most=_MOST)
        await generator.until(name, "ready", _START_S)
        channel = open_channel(f"127.0.0.1:{ports[-1]}", SecuritySection())
        client = BufferClient(channel, timeout_s=5.0, retry_s=BOUND_S)
        return Run(rules, name, self.hosts, links, client, channel)

    async def put(self, cases: Sequence[Case], bound_s: float = BOUND_S) -> list[Outcome]:
        """One round: all hold what the cases say, faults come and go, all train on within `bound_s`."""
        runs = {run.rules: run for run in self.runs}
        early = await asyncio.gather(*(self._prepare(runs[case.rules], case, bound_s) for case in cases))
        cases = [case for case, stall in zip(cases, early, strict=True) if stall is None]
        if cases and cases[0].fault in STOPS:
            async with self.stopped(_STOPPED[cases[0].fault]):
                await asyncio.sleep(cases[0].terms * LEASE_S)
            work = [self._train_on(runs[case.rules], case, bound_s) for case in cases]
        else:
            work = [self._break(runs[case.rules], case, bound_s) for case in cases]
        return [*filter(None, early), *await asyncio.gather(*work)]

    async def renew(self) -> None:
        """Begins again with the same rules: runs that stand still would be in the way of the others."""
        rules = [run.rules for run in self.runs]
        await self.close()
        await self.start()
        await self.add(rules)

    @contextlib.asynccontextmanager
    async def stopped(self, name: str) -> AsyncIterator[None]:
        """A process that stands still."""
        self.hosts[name].send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.hosts[name].send(signal.SIGCONT)

    async def _prepare(self, run: Run, case: Case, bound_s: float) -> Outcome | None:
        """Nothing where the run is ready for its case."""
        try:
            await run.hold(case.held, bound_s)
        except AssertionError as error:
            return Outcome(case, bound_s, str(error))
        return None

    async def _break(self, run: Run, case: Case, bound_s: float) -> Outcome:
        await run.suffer(case)
        return await self._train_on(run, case, bound_s)

    async def _train_on(self, run: Run, case: Case, bound_s: float) -> Outcome:
        over = time.monotonic()
        run.trained_so_far()
        run.allow(MANY)
        try:
            return Outcome(case, max(0.0, await run.until_trained(bound_s) - over))
        except AssertionError as error:
            return Outcome(case, bound_s, str(error))
        finally:
            # It waits for the others at rest.
            run.allow(0)

    async def audit(self) -> None:
        """Every run, when all that is known of it has arrived."""
        for run in self.runs:
            run.trained_so_far()
        await asyncio.gather(*(run.audit() for run in self.runs))
