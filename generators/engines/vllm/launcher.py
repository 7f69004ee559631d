"""Starts vLLM in a thread, with progress in the log, and stops it, with all its processes.

Invariant: however the start ends (an error, a cancellation, a stop amid it), `stop` leaves no process, in bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.process_log import last_error
from rollmesh.generators.engines.vllm import fork_server, logs
from rollmesh.generators.engines.vllm.load_metrics import LoadMetricsCollector
from rollmesh.generators.engines.vllm.process_tree import ProcessTree
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.liveness.process_state import is_stopped, read_process_trees

log = logging.getLogger(__name__)
_PROGRESS_S = 10.0
_END_S = 2.0
_WORKERS_S = 0.3
# Names of the processes that vLLM starts here: engine cores, and the coordinator of several of them.
_NAMES = ("EngineCore", "VLLM_DP_Coordinator")


class EngineProcess:
    """A vLLM engine, from its start to its end.

    Args:
        arguments: see `arguments.engine_arguments`.
        metrics: collects its load.
        timeout_s: bound of its start.
        log_file: of its processes.
        killed: whether its processes are killed at once, without vLLM's own end, which devices need.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        metrics: LoadMetricsCollector,
        timeout_s: float,
        log_file: logs.EngineLog,
        *,
        killed: bool = False,
    ) -> None:
        self._arguments = arguments
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._log = log_file
        self._end_s = 0.0 if killed else _END_S
        self._others = {process.pid for process in multiprocessing.active_children()}
        self._building: asyncio.Future[AsyncLLM] | None = None
        self._tree = ProcessTree([])

    async def start(self) -> AsyncLLM:
        """The engine, with dummy weights.

        Raises:
            ConfigError: an argument that vLLM does not know, or not with this value.
            EngineError: it did not come up; with the end of its log.
        """
        begin = time.monotonic()
        self._building = asyncio.ensure_future(asyncio.to_thread(self._build))
        while not (await asyncio.wait({self._building}, timeout=min(_PROGRESS_S, self._timeout_s)))[0]:
            if time.monotonic() - begin >= self._timeout_s:
                raise EngineError(
                    f"vLLM is not up after {self._timeout_s:g} s; the end of its log:\n{self._log.tail()}",
                    hint="rollout.vllm.start_timeout_s sets how long it may take",
                )
            log.info("vLLM is starting: %.0f s so far", time.monotonic() - begin)
        try:
            engine = self._building.result()
        except ConfigError:
            raise
        except Exception as error:  # vLLM may raise anything at its start
            raise EngineError(
                f"vLLM did not come up: {error}; the end of its log:\n{self._log.tail()}",
                hint="rollout.vllm holds what it was started with",
            ) from error
        self._tree = ProcessTree(self._cores())
        log.info("vLLM is up after %.0f s, processes %s", time.monotonic() - begin, self._tree.pids)
        return engine

    def cause(self) -> str:
        """The cause of its death, as far as it is known."""
        codes = [process.exitcode for process in self._processes() if process.exitcode is not None]
        ends = f"exit code {', '.join(map(str, codes))}" if codes else "no exit code"
        tail = self._log.tail()
        return f"vLLM's engine core has ended ({ends})" + (f"; the end of its log:\n{tail}" if tail else "")

    def last_error(self) -> str:
        """The last error that one of its processes has raised; empty where none has."""
        return last_error(self._log.file)

    def process_state(self) -> ProcessState | None:
        """Reads the state of its processes, from their start on; the fork server is one of them until they are up.

        While it is stopped there is no engine core yet whose state would tell.
        """
        building = self._building
        if building is not None and not building.done():
            return read_process_trees([*self._cores(), *fork_server.pids()])
        return self._tree.process_state()

    async def stop(self) -> None:
        """Ends the engine; may be called twice, and during the start."""
        building, self._building = self._building, None
        if building is None:
            return
        tree = self._tree
        if not building.done():
            # The start fails when its engine core is gone, or the fork server that it waits for.
            tree = ProcessTree([*self._cores(), *filter(is_stopped, fork_server.pids())])
            tree.kill()
            await asyncio.wait({building}, timeout=_END_S)
        if building.done() and not building.cancelled() and building.exception() is None:
            logs.silence()
            if not self._end_s:
                await asyncio.to_thread(tree.kill)
            ending = asyncio.ensure_future(asyncio.to_thread(building.result().shutdown, self._end_s))
            await asyncio.to_thread(tree.end_workers, _WORKERS_S)
            await asyncio.wait({ending}, timeout=self._end_s + 1)
        await asyncio.to_thread(tree.kill)
        self._log.close()

    def _build(self) -> AsyncLLM:
        self._log.install()
        arguments = dict(self._arguments)
        try:
            chosen = AsyncEngineArgs(
                **arguments | {"weight_transfer_config": WeightTransferConfig(arguments["weight_transfer_config"])}
            )
            logs.adopt()
            config = chosen.create_engine_config(UsageContext.ENGINE_CONTEXT)
        # No process has been started yet: it depends on nothing but the arguments.
        except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
            raise ConfigError(
                f"vLLM refuses its arguments: {error}",
                hint="rollout.vllm.options are those of its AsyncEngineArgs; the others are what the run sets",
            ) from error
        engine = AsyncLLM.from_vllm_config(
            config, stat_loggers=[self._metrics.create], disable_log_stats=chosen.disable_log_stats
        )
        logs.adopt()
        return engine

    def _processes(self) -> list[Any]:
        building = self._building
        if building is None or not building.done() or building.cancelled() or building.exception() is not None:
            return []
        manager = building.result().engine_core.resources.engine_manager
        return list(getattr(manager, "processes", []))

    def _cores(self) -> list[int]:
        """Ids of vLLM's processes that were started by this process since the start."""
        return [
            process.pid
            for process in multiprocessing.active_children()
            if process.pid is not None and process.pid not in self._others and process.name.startswith(_NAMES)
        ]
