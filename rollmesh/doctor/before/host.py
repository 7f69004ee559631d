"""Limits of this host: open files, cores, and the compute threads that a configuration asks for."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.doctor.findings import Finding, ok, problem, warning
from rollmesh.launcher.services import describe_threads, learner_processes, thread_plan
from rollmesh.mesh.config.derived.generator_places import generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.open_files import MOST, limits_of
from rollmesh.mesh.runtime.threads import available_cores

CHECK = "host"
# Connections of a generator to a front: calls, streams of its own, weights of the relay.
_CALLS_PER_MEMBER = 4
# Files of a front or a learner without any connection: libraries, logs, shards.
_FEW_FILES = 1024


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The limits.

    Attributes:
        open_files: that a process may have, after it has raised its limit itself.
        cores: that processes may run on.
        members: generators that the run starts here.
        fronts: of the buffer.
        threads: compute threads in all, of the learner and the generators.
        set_by_user: keys of threads that the configuration sets.
    """

    open_files: int
    cores: int
    members: int
    fronts: int
    threads: int
    set_by_user: tuple[str, ...] = ()


def check_host(config: Config) -> Iterator[Finding]:
    """Files, cores and threads."""
    yield from judge(gather(config))
    yield ok(CHECK, describe_threads(config, thread_plan(config)))


def gather(config: Config) -> HostFacts:
    """Reads the limits of this process, which its children inherit."""
    plan, members = thread_plan(config), len(generator_places(config))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    learner, generators = learner_processes(config) * plan.learner, members * plan.generator
    # Those who take turns do not compute at the same time.
    computing = max(learner, generators) if config.placement.all_take_turns else learner + generators
    given = {
        "resources.learner_threads": config.resources.learner_threads,
        "resources.generator_threads": config.resources.generator_threads,
    }
    return HostFacts(
        open_files=sys.maxsize if limit == resource.RLIM_INFINITY else limit,
        cores=available_cores(),
        members=members,
        fronts=config.buffer.fronts,
        threads=computing,
        set_by_user=tuple(key for key, value in given.items() if value is not None),
    )


def judge(facts: HostFacts) -> Iterator[Finding]:
    """Says which limits are too low."""
    calls, needed = limits_of(facts.open_files).calls, _CALLS_PER_MEMBER * facts.members
    if calls < MOST.calls and (facts.open_files < _FEW_FILES or calls * facts.fronts < needed):
        severity = problem if facts.open_files < _FEW_FILES // 4 else warning
        yield severity(
            CHECK,
            f"a process may have {facts.open_files} files open, which is room for {calls} connections; "
            f"{facts.members} generator(s) need {needed}, and more may join",
            "raise the hard limit: `ulimit -Hn 65536`, LimitNOFILE=65536 in a systemd unit, or "
            "`docker run --ulimit nofile=65536`",
            open_files=facts.open_files,
        )
    elif calls * facts.fronts < needed:
        yield warning(
            CHECK,
            f"{facts.fronts} front(s) take {calls * facts.fronts} connections; {facts.members} generators: {needed}",
            f"buffer.fronts={math.ceil(needed / calls)} (now {facts.fronts})",
            connections=needed,
        )
    if facts.set_by_user and facts.threads > facts.cores:
        yield warning(
            CHECK,
            f"{facts.threads} compute threads share {facts.cores} core(s), as {' and '.join(facts.set_by_user)} say",
            f"leave {' and '.join(facts.set_by_user)} out: the cores are divided between the services",
            threads=facts.threads,
            cores=facts.cores,
        )
