"""Divides the cores between services; all compute threads are decided here.

Invariant: the threads that spin together never exceed the cores where that is possible. Otherwise every service has one
thread and waits passively: two spinning OpenMP teams on the same cores slow each other many times over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# A waiting worker costs memory alone.
_WAITING_WORKERS = 32


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Compute threads per process.

    Attributes:
        cores: available.
        learner: of each rank.
        generator: of each generator of `rollout.replicas`.
        shared: of each generator in addition to them, which takes turns with the learner.
    """

    cores: int
    learner: int
    generator: int
    shared: int = 1

    def describe(self, ranks: int, replicas: int, shared: int = 0) -> str:
        """The description of the threads, one line for the start of a run."""
        parts = [f"learner {ranks} x {self.learner} thread(s)"]
        if replicas:
            parts.append(f"generators {replicas} x {self.generator} thread(s)")
        if shared:
            parts.append(f"those on the learner's cores {shared} x {self.shared} thread(s)")
        return f"{self.cores} cores: {', '.join(parts)}"


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def plan_threads(
    cores: int,
    *,
    ranks: int,
    replicas: int,
    shared: int = 0,
    in_turns: bool = False,
    learner: int | None = None,
    generator: int | None = None,
) -> ThreadPlan:
    """Divides the cores: half for the learner ranks, the rest for the generators, at least one thread each.

    Where they take turns, each side has all cores in its own.

    Args:
        cores: cores available.
        ranks: learner processes on this machine.
        replicas: generator processes on this machine.
        shared: generator processes in addition, which take turns with the learner: they have its cores.
        in_turns: all generators take turns with the learner.
        learner, generator: threads set by the user, used unchanged.
    """
    for_learner = max(1, cores // 2) if replicas and not in_turns else cores
    for_generators = cores if in_turns else max(1, cores - for_learner)
    return ThreadPlan(
        cores=cores,
        learner=learner or max(1, for_learner // max(1, ranks)),
        generator=generator or max(1, for_generators // max(1, replicas)),
        shared=generator or max(1, for_learner // max(1, shared)),
    )


def plan_rank_threads(cores: int, environment: Mapping[str, str]) -> ThreadPlan:
    """The threads of a rank where no generators compute.

    Args:
        cores: cores available.
        environment: of the rank: says how many there are on this machine, and threads set by the user.
    """
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return plan_threads(cores, ranks=ranks, replicas=0, learner=given_threads(environment))


def given_threads(environment: Mapping[str, str]) -> int | None:
    """The threads that an environment names for the numerical libraries, or None."""
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdecimal() else None


def reward_workers(setting: int | None) -> tuple[int, int]:
    """Most processes that score on this machine: (those that compute, those that wait for something).

    Scorers that compute need no more than the cores. Those that wait, for a model's judgement or a sandbox, need as
    many as are to wait together. They are started as they are needed: the numbers cost nothing where scoring is quick.

    Args:
        setting: `reward.workers`, which is both.
    """
    return (setting, setting) if setting is not None else (max(4, min(16, available_cores())), _WAITING_WORKERS)


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a process that computes with `threads` threads and waits without spinning."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
