"""The jobs that run on the server: each is one request to it, or several in sequence.

Invariants:

- A request that has no token yet when an update of the weights begins is sent again after it. Otherwise its prompt
  would be in the prefix cache under its old key, with keys and values of the old weights.
- After an update there are tokens of uncertain version (see `version_attribution`). A request with enough of these is
  aborted and continued after its tokens: with its end the server reports their version. Sampling does not change by it;
  its keys and values are found in the prefix cache, under its own key.
- A job keeps the adapter under which it began through all its requests: its tokens are of that version. The server's
  own version is that of the base.
- The cache key changes with every update: no request that starts after it finds what was computed before.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from rollmesh.generators.engines.errors import RequestError
from rollmesh.generators.engines.external.backend import DecodeChunk, DecodeJob
from rollmesh.generators.engines.sglang import request_bodies
from rollmesh.generators.engines.sglang.http_client import LostError, RefusedError
from rollmesh.generators.engines.sglang.streamed_job import JobState, StreamedJob
from rollmesh.generators.engines.sglang.version_attribution import EventReader
from rollmesh.generators.engines.stop_strings import StopMatcher
from rollmesh.generators.engines.token_grammar import check_known
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollmesh.generators.engines.external.served_adapters import ServedAdapters
    from rollmesh.generators.engines.request_validation import RequestLimits
    from rollmesh.generators.engines.sglang.http_client import HttpClient
    from rollmesh.generators.engines.sglang.server_features import ServerFeatures

# An abort that comes before its request has been taken in is passed over by the server.
_ABORT_AGAIN_S = 1.0
_CLOSE_S = 10.0


class RequestStreams:
    """All jobs of one server.

    Args:
        client: to the server.
        features: of the server.
        limits: of the model.
        tokenizer: for stop strings; grammars have to know it.
        adapters: that the server has.
    """

    def __init__(
        self,
        client: HttpClient,
        features: ServerFeatures,
        limits: RequestLimits,
        tokenizer: PreTrainedTokenizerBase | None,
        adapters: ServedAdapters,
    ) -> None:
        self._client = client
        self._features = features
        self._limits = limits
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._jobs: dict[str, StreamedJob] = {}
        self._aborts = BackgroundTasks(self._on_abort_error)
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._label = ""
        self._updates = 0
        # Another generator may have used the same labels on this server.
        self._cache_salt = uuid.uuid4().hex
        self.paused = False
        self.preemptions = 0

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    # --- jobs ---

    async def generate(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        """See Backend."""
        stop = job.sampling.stop
        matcher = StopMatcher(self._tokenizer, stop) if stop and self._tokenizer is not None else None
        adapter = self._adapters.begin_job()
        streamed = StreamedJob(job, on_chunk, matcher, eos=self._limits.eos, adapter=adapter)
        self._jobs[job.job_id] = streamed
        try:
            if job.sampling.grammar:
                await self._check_grammars()
            while not streamed.finished:
                await self._may_send.wait()
                if streamed.state is JobState.ABORTED:
                    self._end_aborted(streamed)
                if not streamed.finished:
                    await self._request(streamed)
        except RequestError:
            self._aborts.spawn(self._send_abort(streamed.rid))
            raise
        finally:
            self._adapters.end_job(adapter)
            del self._jobs[job.job_id]

    def abort(self, job_ids: list[str]) -> None:
        """See Backend."""
        for name in job_ids:
            streamed = self._jobs.get(name)
            if streamed is None or streamed.state in (JobState.ABORTED, JobState.FINISHED):
                continue
            streamed.abort()
            if self.paused or not streamed.has_begun:
                # Nothing comes while it is paused; what has not begun has nothing to say.
                self._end_aborted(streamed)
            else:
                self._abort_request(streamed)

    async def _check_grammars(self) -> None:
        """Refuses grammars that the server would not follow.

        Raises:
            PayloadError: saying why.
        """
        if not self._features.grammars:
            raise PayloadError(
                "sampling.grammar",
                f"the SGLang server at {self._client.address} follows no grammars of llguidance",
                hint="start it with --grammar-backend llguidance and without --skip-tokenizer-init, or leave "
                "rollout.sglang.address out",
            )
        assert self._tokenizer is not None, "checked when it was submitted"
        await asyncio.to_thread(check_known, self._tokenizer)

    # --- updates of the weights ---

    def begin_update(self, *, recompute: bool) -> None:
        """Records that the version of tokens is uncertain from here on."""
        self._may_send.clear()
        for streamed in self._jobs.values():
            if streamed.begin_update(recompute=recompute):
                self._drop_request(streamed)

    def end_update(self, label: str) -> None:
        """Records that the weights are in place."""
        self._label = label
        self._updates += 1
        self._may_send.set()

    def cancel_update(self) -> None:
        """Records that the update did not take place, and that nothing has changed."""
        self._may_send.set()

    async def close(self) -> None:
        """Waits until all aborts have been sent to the server."""
        if await self._aborts.drain(_CLOSE_S):
            self._aborts.cancel()

    # --- one request ---

    async def _request(self, streamed: StreamedJob) -> None:
        """Makes one request; afterwards the job is finished, or continues with another."""
        cache_key = f"{self._cache_salt}:{self._updates}:{self._label}"
        streamed.begin_request(self._label, cache_key, one_front=self._features.one_front)
        streamed.reader = asyncio.create_task(self._read(streamed, self._body(streamed)))
        try:
            await asyncio.wait({streamed.reader})
        except asyncio.CancelledError:
            streamed.abandon()
            self._drop_request(streamed)
            raise
        if streamed.reader.cancelled():
            return
        reason = streamed.reader.result()
        if streamed.finished:
            return
        if streamed.state is JobState.ABORTED:
            self._end_aborted(streamed)
        elif streamed.state is not JobState.REVEALING:
            raise RequestError(f"the SGLang server ended {streamed.job.job_id} with {reason!r}")

    def _body(self, streamed: StreamedJob) -> dict[str, Any]:
        assert streamed.key is not None
        return request_bodies.generate(
            streamed.rid,
            streamed.token_ids,
            streamed.job.sampling,
            max_tokens=streamed.tokens_left,
            eos=sorted(self._limits.eos),
            cache_key=streamed.key,
            mask_tokens=self._features.mask_tokens,
            adapter=None if streamed.adapter is None else streamed.adapter.name,
        )

    async def _read(self, streamed: StreamedJob, body: dict[str, Any]) -> str | None:
        """Reads one stream to its end; gives the server's reason for it.

        Raises:
            RequestError: the server did not answer this request, and answers others.
            EngineError: it answers none, or contradicts itself.
        """
        reader = EventReader(
            incremental=self._features.incremental, filtered=request_bodies.is_filtered(streamed.job.sampling)
        )
        try:
            async with aclosing(self._client.stream("/generate", body)) as stream:
                async for data in stream:
                    event = reader.read(data)
                    if event.error:
                        raise RequestError(f"the SGLang server does not answer this request: {event.error}")
                    self.preemptions += streamed.preemptions(event)
                    streamed.add(event)
                    if streamed.finished and event.reason is None:
                        self._drop_request(streamed)
                    elif streamed.reveal_if_due():
                        self._abort_request(streamed)
                    if streamed.finished or event.reason is not None:
                        return event.reason
        except RefusedError as error:
            raise RequestError(str(error)) from error
        except LostError as error:
            # Its next answer says whether it failed at this request or altogether.
            await self._client.get("/model_info")
            raise RequestError(str(error)) from error
        raise RequestError(f"the SGLang server ended the stream of {streamed.job.job_id} without giving a reason")

    # --- ending requests ---

    def _end_aborted(self, streamed: StreamedJob) -> None:
        streamed.end_aborted()
        self._drop_request(streamed)

    def _drop_request(self, streamed: StreamedJob) -> None:
        """Stops reading its request, and ends it on the server."""
        if streamed.reader is not None and streamed.reader is not asyncio.current_task():
            streamed.reader.cancel()
        self._aborts.spawn(self._send_abort(streamed.rid))

    def _abort_request(self, streamed: StreamedJob) -> None:
        """Asks the server to end it, and waits for its last event."""
        self._aborts.spawn(self._abort_until_ended(streamed, streamed.rid))

    async def _abort_until_ended(self, streamed: StreamedJob, rid: str) -> None:
        while (
            streamed.rid == rid and not streamed.finished and streamed.reader is not None and not streamed.reader.done()
        ):
            await self._send_abort(rid)
            await asyncio.wait({streamed.reader}, timeout=_ABORT_AGAIN_S)

    async def _send_abort(self, rid: str) -> None:
        # Servers abort every request with a name that begins with this one, so nothing is sent for a job without a
        # request.
        if not rid:
            return
        await self._client.post("/abort_request", {"rid": rid, "abort_all": False})

    def _on_abort_error(self, _name: str, _error: BaseException) -> None:
        """Does nothing: where the server is gone, the waiters of its jobs get the error."""
