"""Redis as a run will use it: reachable, recent, never evicting, durable, with room, and with a clock of the time."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.doctor.findings import Finding, not_checked, note, ok, problem, warning
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import StoreError

CHECK = "redis"
CLOCK = "clocks"
_LEAST = (6, 2)
_DEADLINE_S = 10.0
# Round trips; each verb of the buffer is one.
_SLOW_S = 0.02
_PINGS = 5
# Seconds between the clocks of two hosts that cannot be due to their way.
CLOCK_OFF_S = 2.0
# Memory beyond the payloads, as a share of them, as for the embedded server.
_HEADROOM = 0.25


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """One server, as it describes itself.

    Attributes:
        info: fields of INFO.
        settings: of CONFIG GET that were asked for; empty where this user may not.
        seconds: of the fastest round trip.
        ahead_s: seconds by which its clock is ahead of this machine's.
    """

    info: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    ahead_s: float = 0.0


def check_redis(config: Config) -> Iterator[Finding]:
    """The server of `buffer.redis`, or the program of the embedded one."""
    if config.buffer.redis is None:
        yield from judge_binary(_binary_version())
        return
    try:
        facts = asyncio.run(ask(config))
    except StoreError as error:
        yield problem(
            CHECK,
            error.message,
            f"{error.hint}; start it, or correct buffer.redis (`redis-cli -u URL ping`). Without buffer.redis a "
            "server is started in the run's folder",
        )
        return
    yield from judge(facts, config.buffer.max_bytes)


async def ask(config: Config) -> RedisFacts:
    """Asks the server for its state; of a cluster, the one that is connected to.

    Raises:
        StoreError: it does not answer, or refuses this user.
        ConfigError: a file that belongs to it cannot be read.
    """
    assert config.buffer.redis is not None, "an embedded server has not been started"
    timeout_s = min(_DEADLINE_S, config.network.rpc_timeout_s)
    access = RedisAccess(config.buffer.redis, "doctor", timeout_s=timeout_s, options=config.buffer.redis_options)
    try:
        (info,) = await access.batch([("INFO",)])
        best, ahead = float("inf"), 0.0
        for _ in range(_PINGS):
            began, wall = time.monotonic(), time.time()
            at_ms = await access.time_ms()
            took = time.monotonic() - began
            if took < best:
                best, ahead = took, at_ms / 1000 - (wall + took / 2)
        return RedisFacts(read_info(info), await _settings(access), best, ahead)
    finally:
        await access.close()


async def _settings(access: RedisAccess) -> dict[str, str]:
    """Settings that INFO lacks; a front's own user may not ask."""
    try:
        (answer,) = await access.batch([("CONFIG", "GET", "appendfsync")])
    except StoreError:
        return {}
    texts = [part.decode() for part in answer]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def read_info(text: bytes) -> dict[str, str]:
    """Fields of INFO by name."""
    pairs = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}


def judge(facts: RedisFacts, max_bytes: int) -> Iterator[Finding]:
    """Compares the server with what the buffer needs.

    Args:
        facts: of the server.
        max_bytes: `buffer.max_bytes`.
    """
    info = facts.info
    version = info.get("redis_version", "?")
    if (number := _number(version)) < _LEAST:
        yield problem(
            CHECK,
            f"Redis {version} answers, and 6.2 or later is needed",
            "update it, or leave buffer.redis out: a server comes with rollmesh",
            version=version,
        )
    if info.get("role", "master") != "master":
        yield problem(CHECK, "buffer.redis is a replica, which takes no writes", "give the address of its primary")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield problem(
            CHECK,
            f"maxmemory-policy is {policy}: a full Redis would delete groups, leases and counters in silence",
            "`redis-cli CONFIG SET maxmemory-policy noeviction`, and the same in redis.conf",
            policy=policy,
        )
    yield from _judge_room(info, max_bytes)
    yield from _judge_durability(facts)
    if facts.seconds > _SLOW_S:
        yield warning(
            CHECK,
            f"a round trip to Redis takes {1000 * facts.seconds:.0f} ms",
            "place the fronts next to Redis, on a host or in a zone with it: generators and learner may be far",
            seconds=facts.seconds,
        )
    yield from judge_clock(facts.ahead_s, "Redis", "this machine")
    if number >= _LEAST:
        yield ok(CHECK, f"Redis {version} answers in {1000 * facts.seconds:.1f} ms", seconds=facts.seconds)


def judge_clock(ahead_s: float, whose: str, than: str) -> Iterator[Finding]:
    """Says whether two clocks differ.

    Args:
        ahead_s: seconds by which one is ahead of the other.
        whose, than: the two, in words.
    """
    if abs(ahead_s) > CLOCK_OFF_S:
        yield warning(
            CLOCK,
            f"the clock of {whose} is {abs(ahead_s):.1f} s {'fast' if ahead_s > 0 else 'slow'}, compared with {than}",
            "run an NTP client on both (`timedatectl set-ntp true`, chrony). Leases count Redis' time alone, but "
            "grants and certificates end by each host's clock, and times in logs and of pushes are shifted",
            ahead_s=ahead_s,
        )
    else:
        yield ok(CLOCK, f"{whose} and {than} agree to {abs(ahead_s):.2f} s", ahead_s=ahead_s)


def _judge_room(info: Mapping[str, str], max_bytes: int) -> Iterator[Finding]:
    limit, used = int(info.get("maxmemory", "0") or 0), int(info.get("used_memory", "0") or 0)
    needed, most = used + round((1 + _HEADROOM) * max_bytes), max(1, int((limit - used) / (1 + _HEADROOM)))
    if limit and limit < needed:
        yield problem(
            CHECK,
            f"maxmemory is {limit / 2**20:.0f} MiB, of which {used / 2**20:.0f} are in use; payloads of "
            f"{max_bytes / 2**20:.0f} MiB (buffer.max_bytes) and a quarter for the rest do not fit",
            f"`redis-cli CONFIG SET maxmemory {needed}`, or buffer.max_bytes={most}",
            max_memory=limit,
            needed=needed,
        )


def _judge_durability(facts: RedisFacts) -> Iterator[Finding]:
    if facts.info.get("aof_enabled", "0") != "1":
        yield warning(
            CHECK,
            "appendonly is off: acknowledged writes are lost when Redis ends, and responses are sampled again",
            "`redis-cli CONFIG SET appendonly yes`, and appendfsync always for each acknowledged write",
        )
    elif (fsync := facts.settings.get("appendfsync", "always")) != "always":
        yield note(
            CHECK,
            f"appendfsync is {fsync}: the last seconds of writes are lost at a power cut",
            "`redis-cli CONFIG SET appendfsync always` keeps every acknowledged write",
        )


def judge_binary(version: str) -> Iterator[Finding]:
    """Judges the version of the embedded server."""
    if not version:
        yield not_checked(CHECK, "redis-server does not tell its version")
    elif _number(version) < _LEAST:
        yield problem(CHECK, f"redis-server {version} is installed, and 6.2 or later is needed", "install a newer one")
    else:
        yield ok(CHECK, f"redis-server {version} is started in the run's folder")


def _binary_version() -> str:
    binary = find_redis_server()
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    found = re.search(r"v=([\d.]+)", told.stdout)
    return found[1] if found else ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
