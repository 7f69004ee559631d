"""The common part of plug-ins: at most so many jobs at once, before their deadlines, one run after the other."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from rollmesh.reward_service.sandbox.ends import Ends
from rollmesh.reward_service.sandbox.interface import Job, Ran
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError


class PluginExecutor(ABC):
    """An executor of rung 4.

    Args:
        languages: values of `Job.language` that it takes.
        size: jobs at once; 0 for as many as this process has CPUs.
    """

    rung = 4
    missing = ""

    def __init__(self, languages: frozenset[str], size: int) -> None:
        self.languages = languages
        self._slots = asyncio.Semaphore(size or len(os.sched_getaffinity(0)))

    @abstractmethod
    def describe(self) -> str:
        """See `Executor.describe`."""

    @abstractmethod
    def _runs(self, job: Job, inputs: Sequence[bytes]) -> AsyncIterator[Ran]:
        """The ends of a job's runs. Nothing is raised for failures of infrastructure: they are ends too."""

    @abstractmethod
    async def close(self) -> None:
        """See `Executor.close`."""

    async def run(self, job: Job) -> Ran:
        """See `Executor.run`."""
        (ran,) = await self.run_all(job, [job.stdin])
        return ran

    async def run_all(
        self, job: Job, inputs: Sequence[bytes], *, stop: Callable[[Ran], bool] | None = None
    ) -> list[Ran]:
        """See `Executor.run_all`.

        Raises:
            UnavailableError: it does not take the job's language.
        """
        if job.language not in self.languages:
            raise UnavailableError(f"{self.describe()}: no programs in {job.language!r}")
        ends = Ends(len(inputs), stop)
        if not inputs:
            return []
        timeout_s = None if job.deadline == float("inf") else max(0.0, job.deadline - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s), self._slots, aclosing(self._runs(job, inputs)) as runs:  # type: ignore[type-var]
                async for ran in runs:
                    if ends.record(ran):
                        return ends.known
        except TimeoutError:
            return ends.filled("the deadline has passed")
        return ends.filled("the sandbox has given no answer")
