"""A server of SGLang as a backend: starts or finds it, and translates.

Seeds: SGLang draws with a request's own seed only in its deterministic mode, which it has on CUDA with some attention
kernels, and not on a CPU; a request's seed is not passed on, and draws are seeded for the server as a whole.

Filters: SGLang takes the nucleus of the whole distribution also where top-k cuts it, and says truly what it drew from;
other engines take it of what top-k has left.

Stop strings are found here: the server runs without a tokenizer, takes token ids and gives token ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray

from generators.engines.base import EngineError, EngineSettings, SleepReport
from generators.engines.checkpoint import Checkpoint, read_config
from generators.engines.checks import Limits
from generators.engines.driven.backend import Backend, Chunk, Figures, Job
from generators.engines.driven.folder import ModelFacts
from generators.engines.sglang import launch, requests
from generators.engines.sglang.capabilities import ask
from generators.engines.sglang.client import Client
from generators.engines.sglang.monitor import Monitor
from generators.engines.sglang.process import Progress, ServerProcess, free_port
from generators.engines.sglang.runs import Runs
from generators.engines.sglang.transfers import Staged, Transfer
from generators.engines.sglang.transfers.disk import DiskTransfer
from generators.engines.sglang.transfers.distributed import DistributedTransfer
from generators.engines.sglang.transfers.tensor import TensorTransfer
from mesh.config.rollout import SglangSection
from mesh.errors import WeightsError

if TYPE_CHECKING:
    from mesh.errors import RollmeshError

log = logging.getLogger(__name__)

_ASK_EVERY_S = 0.25
_IDLE_S = 30.0
# How long a broken connection waits to be told that it broke because the server has died.
_CAUSE_S = 5.0
# The server's name for the memory of the weights.
_WEIGHTS = "weights"
_LOCAL = ("127.0.0.1", "localhost", "::1")


class SglangBackend(Backend):
    """One server.

    Args:
        folder: of the model.
        facts: what it says.
        settings: see there.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: it is no language model.
    """

    def __init__(self, folder: Path, facts: ModelFacts, settings: EngineSettings) -> None:
        self._folder = folder
        self._facts = facts
        self._settings = settings
        self._section = settings.sglang or SglangSection()
        launch.check(self._section)
        config = read_config(folder)
        self._experts = int(getattr(config.get_text_config(), "num_experts_per_tok", None) or 0)
        self._checkpoint = Checkpoint(config, getattr(torch, settings.dtype))
        self._process: ServerProcess | None = None
        self._on_death: Callable[[str], None] | None = None
        self._death = ""
        self._watch: asyncio.Task[None] | None = None
        self._released: list[str] = []
        self._stopped = False

    async def start(self, on_death: Callable[[str], None]) -> Limits:
        """See Backend."""
        self._on_death = on_death
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Limits:
        address = self._section.address
        if address is None:
            address = await self._launch()
        self._client = Client(address, self._cause)
        await self._until_ready()
        transfer = self._way(address)
        self._can = await ask(self._client, transfer)
        if self._settings.kv == "keep" and not self._can.drains:
            raise EngineError(
                f"the SGLang server at {address} replaces weights while a step of the running sequences is under way",
                hint="start it with --disable-overlap-schedule, or choose weights.kv: recompute",
            )
        self._transfer = self._make_transfer(transfer)
        limits = self._facts.limits
        if self._process is None:
            limits = replace(limits, context=min(limits.context, self._can.context))
        self._runs = Runs(self._client, self._can, limits, self._facts.tokenizer, self._experts)
        self._monitor = Monitor(self._client, self._can.load, self._died)
        self._monitor.start()
        log.info("SGLang %s at %s serves %s; weights go over %s", self._can.version, address, self._folder, transfer)
        return limits

    # --- jobs ---

    async def generate(self, job: Job, take: Callable[[Chunk], None]) -> None:
        """See Backend."""
        await self._runs.generate(job, take)

    async def abort(self, job_ids: Iterable[str]) -> None:
        """See Backend."""
        self._runs.abort(list(job_ids))

    async def pause(self) -> None:
        """See Backend; what was sampled last may come a moment later, with its true version."""
        await self._client.post("/pause_generation", {"mode": "in_place"})
        self._runs.paused = True

    async def resume(self) -> None:
        """See Backend."""
        await self._client.post("/continue_generation")
        self._runs.paused = False

    # --- weights ---

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """See Backend."""
        return self._transfer.stage(list(self._checkpoint.arrange(tensors).items()))

    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        """See Backend."""
        self._runs.begin_update(recompute=recompute)
        try:
            if recompute:
                # All lose their keys and values, and nothing is left in the prefix cache.
                await self._client.post("/pause_generation", {"mode": "retract"})
                await self._client.post("/flush_cache")
            if _WEIGHTS in self._released:
                await self._take_back([_WEIGHTS])
            await self._transfer.load(self._client, staged, label)
            self._runs.end_update(label)
        except WeightsError:
            self._runs.break_off()
            raise
        finally:
            await asyncio.to_thread(staged.discard)

    def discard(self, staged: Any) -> None:
        """See Backend."""
        staged.discard()

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See Backend."""
        if self._runs.paused:
            raise EngineError("a paused SGLang server runs no tokens", hint="resume it first")
        answer = await self._client.post("/generate", requests.log_probs(token_ids, uuid.uuid4().hex))
        entries = answer["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(token_ids):
            raise EngineError("the SGLang server gives log-probs of other tokens than it was asked for")
        return np.array([entry[0] for entry in entries[1:]], np.float32)

    # --- memory ---

    async def sleep(self, *, keep_weights: bool) -> SleepReport:
        """See Backend."""
        begin = time.monotonic()
        if not self._can.sleeps:
            return SleepReport(0, time.monotonic() - begin)
        # Requests that were aborted while it was paused end with its next step, and it has to be idle for this.
        await self.resume()
        await self._client.post(f"/flush_cache?timeout={_IDLE_S:g}")
        await self.pause()
        tags = ["kv_cache", "cuda_graph"]
        if not keep_weights or self._can.keeps_asleep:
            tags.append(_WEIGHTS)
        await self._client.post("/release_memory_occupation", {"tags": tags})
        self._released = list(tags)
        return SleepReport(await self._bytes_of(tags), time.monotonic() - begin)

    async def wake(self) -> None:
        """See Backend."""
        if self._released:
            await self._take_back(list(self._released))

    async def _take_back(self, tags: list[str]) -> None:
        """What is not released must not be asked for: the server would end."""
        await self._client.post("/resume_memory_occupation", {"tags": tags})
        self._released = [tag for tag in self._released if tag not in tags]

    # --- its state ---

    def figures(self) -> Figures:
        """See Backend."""
        return replace(self._monitor.latest, preemptions=self._runs.preemptions)

    async def stop(self) -> None:
        """See Backend."""
        self._stopped = True
        if self._watch is not None:
            self._watch.cancel()
        monitor, runs = getattr(self, "_monitor", None), getattr(self, "_runs", None)
        if monitor is not None:
            await monitor.stop()
        if runs is not None and not self._death:
            await runs.close()
            if runs.paused and self._process is None:
                # A server that stands still for long takes itself for hung.
                with suppress(EngineError):
                    await self.resume()
        for part in (getattr(self, "_transfer", None), getattr(self, "_client", None)):
            if part is not None:
                await part.close()
        if self._process is not None:
            await self._process.stop()

    # --- starting ---

    async def _launch(self) -> str:
        self._process = ServerProcess()
        port = free_port()
        command = launch.command(
            launch.model_folder(self._folder, self._process.scratch),
            self._settings,
            self._section,
            port=port,
            context=self._facts.limits.context,
            vocabulary=self._facts.limits.vocabulary,
        )
        log.info("starting an SGLang server: %s", " ".join(command))
        await self._process.start(command, launch.environment(self._settings))
        self._watch = asyncio.create_task(self._watch_process(self._process))
        return f"http://127.0.0.1:{port}"

    async def _until_ready(self) -> None:
        """Until the server answers.

        Raises:
            EngineError: it has died, or the time is up.
        """
        progress = Progress(self._process) if self._process is not None else None
        end = time.monotonic() + self._section.start_timeout_s
        while not self._death:
            said = "it does not answer"
            try:
                await self._client.get("/model_info", timeout_s=30.0)
            except EngineError as error:
                said = str(error)
            else:
                return
            if time.monotonic() > end:
                tail = f"; the end of its log:\n{self._process.tail()}" if self._process is not None else ""
                waited = f"{self._section.start_timeout_s:g} s"
                raise EngineError(
                    f"no SGLang server at {self._client.address} after {waited}: {said}{tail}",
                    hint="rollout.sglang.start_timeout_s sets how long it may take",
                )
            if progress is not None:
                progress.tell()
            await asyncio.sleep(_ASK_EVERY_S)
        raise self._never_came_up()

    def _never_came_up(self) -> RollmeshError:
        hint = "see the log above; rollout.sglang.options are passed to the server as they are"
        if "No module named" in self._death and "sglang" in self._death:
            hint = "rollout.sglang.python names the interpreter of an environment with sglang in it (make sglang)"
        return EngineError(self._death, hint=hint)

    def _way(self, address: str) -> str:
        chosen = self._section.transfer
        if chosen != "auto":
            return chosen
        replicas = self._section.data_parallel > 1
        return "tensor" if urlsplit(address).hostname in _LOCAL and not replicas else "disk"

    def _make_transfer(self, name: str) -> Transfer:
        can = self._can
        if name == "tensor":
            return TensorTransfer(self._checkpoint.dtype_of, can.ranks, session=can.session)
        if name == "disk":
            folder = self._process.scratch if self._process is not None else self._folder
            return DiskTransfer(self._checkpoint.dtype_of, folder)
        device = torch.device(self._settings.device)
        return DistributedTransfer(self._checkpoint.dtype_of, can.ranks, session=can.session, device=device)

    # --- its death ---

    async def _watch_process(self, process: ServerProcess) -> None:
        self._died(await process.until_dead())

    def _died(self, cause: str) -> None:
        if not self._stopped and not self._death:
            self._death = cause
            # Before it was up, its start fails.
            if self._on_death is not None and hasattr(self, "_monitor"):
                self._on_death(cause)

    async def _cause(self) -> str:
        """Why a connection broke; empty where nobody knows."""
        if self._process is not None and not self._death and not self._stopped and hasattr(self, "_monitor"):
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._process.until_dead(), _CAUSE_S)
        return self._death

    async def _bytes_of(self, tags: list[str]) -> int:
        """What the server says these parts occupy, in bytes."""
        info = await self._client.get("/server_info")
        usage = (info.get("internal_states") or [{}])[0].get("memory_usage") or {}
        names = {"kv_cache": "kvcache", "weights": "weight", "cuda_graph": "graph"}
        gigabytes = [usage.get(names[tag]) for tag in tags]
        return int(sum(value for value in gigabytes if isinstance(value, int | float)) * 2**30)
