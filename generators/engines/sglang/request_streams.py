"""The jobs that run on the server: each is one request to it, or several in sequence.

Invariants:

- A request that has no token yet when an update of the weights begins is sent again after it: otherwise its prompt
  would stand in the prefix cache under its old key with keys and values of the old weights, and its tokens be new.
- A request with `REVEAL_TOKENS` whose version is not certain (see `stamps`), as there are after an update, is cut:
  aborted, and continued after its tokens, for with its end the server says which version they have. What is sampled
  does not change by it; its keys and values are found in the prefix cache, under its own key.
- The cache key changes with every update: no request that starts after it finds what was computed before.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.generators.engines.external.backend import DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.version_labels import first_runs
from rollmesh.generators.engines.interface import RequestError
from rollmesh.generators.engines.sglang import request_bodies
from rollmesh.generators.engines.sglang.http_client import LostError, RefusedError
from rollmesh.generators.engines.sglang.version_attribution import Event, EventReader, VersionAttributor
from rollmesh.generators.engines.stop_strings import StopMatcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollmesh.generators.engines.request_validation import Limits
    from rollmesh.generators.engines.sglang.http_client import Client
    from rollmesh.generators.engines.sglang.server_features import ServerFeatures

REVEAL_TOKENS = 32
# An abort that comes before its request has been taken in is passed over by the server.
_ABORT_AGAIN_S = 1.0
_CLOSE_S = 10.0


class StreamedJob:
    """One job.

    Args:
        job: as asked for.
        take: gets its chunks.
        matcher: of its stop strings; None where it has none.
    """

    def __init__(self, job: DecodeJob, take: Callable[[DecodeChunk], None], matcher: StopMatcher | None) -> None:
        self.job = job
        self.take = take
        self.matcher = matcher
        self.key: str | None = None
        self.rid = ""
        self.stamper: VersionAttributor | None = None
        self.reader: asyncio.Task[str | None] | None = None
        self.received: list[int] = []
        self.told = 0
        self.cut: int | None = None
        self.aborted = False
        self.revealing = False
        self.dropped = False
        self.retracted = 0
        self.finished = False


class RequestStreams:
    """All jobs of one server.

    Args:
        client: to the server.
        can: what it can do.
        limits: of the model.
        tokenizer: for stop strings.
        experts: per token, of a mixture; 0: it is none.
    """

    def __init__(
        self,
        client: Client,
        can: ServerFeatures,
        limits: Limits,
        tokenizer: PreTrainedTokenizerBase | None,
        experts: int,
    ) -> None:
        self._client = client
        self._can = can
        self._limits = limits
        self._tokenizer = tokenizer
        self._experts = experts
        self._runs: dict[str, StreamedJob] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._label = ""
        self._updates = 0
        # Another generator may have used the same labels on this server.
        self._own = uuid.uuid4().hex
        self.paused = False
        self.preemptions = 0

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._runs)

    # --- jobs ---

    async def generate(self, job: DecodeJob, take: Callable[[DecodeChunk], None]) -> None:
        """See Backend."""
        stop = job.sampling.stop
        matcher = StopMatcher(self._tokenizer, stop) if stop and self._tokenizer is not None else None
        run = self._runs[job.job_id] = StreamedJob(job, take, matcher)
        try:
            while not run.finished:
                await self._open.wait()
                if run.aborted and not run.finished:
                    self._finish(run, [], [], [], "aborted")
                if not run.finished:
                    await self._request(run)
        except RequestError:
            self._spawn(self._send_abort(run.rid))
            raise
        finally:
            del self._runs[job.job_id]

    def abort(self, job_ids: list[str]) -> None:
        """See Backend."""
        for name in job_ids:
            run = self._runs.get(name)
            if run is None or run.aborted or run.finished:
                continue
            run.aborted = True
            if self.paused or run.stamper is None or not run.stamper.total:
                # Nothing comes while it is paused; what has not begun has nothing to say.
                self._finish(run, [], [], [], "aborted")
            else:
                self._abort_request(run)

    # --- updates of the weights ---

    def begin_update(self, *, recompute: bool) -> None:
        """From here on it is not certain which version tokens have."""
        self._open.clear()
        for run in self._runs.values():
            if run.stamper is None:
                continue
            run.stamper.crossed = True
            if recompute:
                run.retracted += 1
            if not run.received and not run.finished:
                run.key = None
                self._drop(run)

    def end_update(self, label: str) -> None:
        """The weights are in place."""
        self._label = label
        self._updates += 1
        self._open.set()

    def break_off(self) -> None:
        """The update did not take place, and nothing has changed."""
        self._open.set()

    async def close(self) -> None:
        """Waits until the server has been told of all that was given up."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=_CLOSE_S)
            for task in late:
                task.cancel()

    # --- one request ---

    async def _request(self, run: StreamedJob) -> None:
        """Makes one request; afterwards the job is finished, or goes on with another."""
        run.rid = uuid.uuid4().hex
        run.stamper = VersionAttributor(self._label, one_front=self._can.one_front)
        run.revealing = run.dropped = False
        run.retracted = 0
        if run.key is None:
            run.key = f"{self._own}:{self._updates}:{self._label}"
        run.reader = asyncio.create_task(self._read(run, run.stamper, self._body(run)))
        try:
            await asyncio.wait({run.reader})
        except asyncio.CancelledError:
            run.finished = True
            self._drop(run)
            raise
        if run.reader.cancelled():
            return
        reason = run.reader.result()
        if run.finished:
            return
        if run.aborted:
            self._finish(run, [], [], [], "aborted")
        elif not run.revealing:
            raise RequestError(f"the SGLang server ended {run.job.job_id} with {reason!r}")

    def _body(self, run: StreamedJob) -> dict[str, Any]:
        assert run.key is not None
        job = run.job
        return request_bodies.generate(
            run.rid,
            [*job.token_ids, *run.received] if run.received else job.token_ids,
            job.sampling,
            max_tokens=job.sampling.max_tokens - len(run.received),
            eos=sorted(self._limits.eos),
            cache_key=run.key,
            mask_tokens=self._can.mask_tokens,
            routed_experts=self._can.routed_experts and self._experts > 0,
        )

    async def _read(self, run: StreamedJob, stamper: VersionAttributor, body: dict[str, Any]) -> str | None:
        """Reads one stream to its end; gives the server's reason for it.

        Raises:
            RequestError: the server did not answer this request, and answers others.
            EngineError: it answers none, or contradicts itself.
        """
        reader = EventReader(incremental=self._can.incremental, filtered=request_bodies.is_filtered(run.job.sampling))
        try:
            async with aclosing(self._client.stream("/generate", body)) as stream:
                async for data in stream:
                    event = reader.read(data)
                    if event.error:
                        raise RequestError(f"the SGLang server does not answer this request: {event.error}")
                    self._take(run, stamper, event)
                    if run.finished or event.reason is not None:
                        return event.reason
        except RefusedError as error:
            raise RequestError(str(error)) from error
        except LostError as error:
            # What it still answers says whether it failed at this request or altogether.
            await self._client.get("/model_info")
            raise RequestError(str(error)) from error
        raise RequestError(f"the SGLang server ended the stream of {run.job.job_id} without saying why")

    def _take(self, run: StreamedJob, stamper: VersionAttributor, event: Event) -> None:
        run.received.extend(event.token_ids)
        if run.matcher is not None and run.cut is None:
            before = len(run.received) - len(event.token_ids)
            matches = (index for index, token in enumerate(event.token_ids) if run.matcher.push((token,)))
            found = next(matches, None)
            run.cut = None if found is None else before + found + 1
        ids, log_probs, versions = stamper.add(event)
        if event.reason is not None:
            self.preemptions += max(0, int(event.meta.get("num_retractions") or 0) - run.retracted)
        finish = self._reason(run, event)
        if run.cut is not None and run.cut <= run.told + len(ids):
            keep = run.cut - run.told
            self._finish(run, ids[:keep], log_probs[:keep], first_runs(versions, keep), "stop", event)
        elif finish is not None:
            self._finish(run, ids, log_probs, versions, finish, event)
        else:
            if ids:
                run.told += len(ids)
                run.take(DecodeChunk(ids, log_probs, versions))
            if not run.revealing and (run.cut is not None or len(stamper.held[0]) >= REVEAL_TOKENS):
                run.revealing = True
                self._abort_request(run)

    def _reason(self, run: StreamedJob, event: Event) -> Any:
        """Why the job has ended; None where it goes on."""
        if event.reason in (None, "stop", "length"):
            return event.reason
        if run.received and run.received[-1] in self._limits.eos:
            return "stop"
        if len(run.received) >= run.job.sampling.max_tokens:
            return "length"
        return "aborted" if run.aborted else None

    def _finish(
        self,
        run: StreamedJob,
        ids: list[int],
        log_probs: list[float],
        versions: list[tuple[int, str]],
        finish: Any,
        event: Event | None = None,
    ) -> None:
        run.finished = True
        run.told += len(ids)
        routed = None
        if event is not None and event.meta.get("routed_experts"):
            routed = self._routed(run, event.meta["routed_experts"])
        run.take(DecodeChunk(ids, log_probs, versions, finish, routed))
        if event is None or event.reason is None:
            self._drop(run)

    def _routed(self, run: StreamedJob, encoded: str) -> Any:
        tokens = len(run.job.token_ids) + len(run.received) - 1
        flat = np.frombuffer(base64.b64decode(encoded), np.int32)
        return flat.reshape(tokens, -1, self._experts).astype(np.int16)

    # --- ending requests ---

    def _drop(self, run: StreamedJob) -> None:
        """Listens to its request no more, and ends it on the server."""
        run.dropped = True
        if run.reader is not None and run.reader is not asyncio.current_task():
            run.reader.cancel()
        self._spawn(self._send_abort(run.rid))

    def _abort_request(self, run: StreamedJob) -> None:
        """Asks the server to end it; its last event is waited for."""
        self._spawn(self._abort_until_ended(run, run.rid))

    async def _abort_until_ended(self, run: StreamedJob, rid: str) -> None:
        while run.rid == rid and not run.finished and run.reader is not None and not run.reader.done():
            await self._send_abort(rid)
            await asyncio.wait({run.reader}, timeout=_ABORT_AGAIN_S)

    async def _send_abort(self, rid: str) -> None:
        await self._client.post("/abort_request", {"rid": rid, "abort_all": False})

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        # Where the server is gone, whoever waits for a job is told.
        if not task.cancelled():
            task.exception()
