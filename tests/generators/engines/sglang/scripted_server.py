"""A server of SGLang's kind without a model: what it samples is the place of the token, when a test says so.

It keeps the promises that `runs` relies on, and no others. Events come in order, and an abort is answered by a last
event. The last event says which version has sampled which token. The news of an update may overtake tokens on their
way.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang.server_features import ServerFeatures

CAN = ServerFeatures(
    version="scripted", context=1024, ranks=1, incremental=True, one_front=True, drains=True, session=True, load="",
    mask_tokens=0, sleeps=False, keeps_asleep=False,
)  # fmt: skip


@dataclass(eq=False)
class Request:
    """One that has not ended.

    Attributes:
        body: as it was asked.
        events: on their way to the client.
        labels: of the version that sampled each token.
        underway: tokens that are sampled and not sent yet.
    """

    body: dict[str, Any]
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    labels: list[str] = field(default_factory=list)
    underway: int = 0

    @property
    def left(self) -> int:
        """Tokens that it may sample still."""
        return int(self.body["sampling_params"]["max_new_tokens"]) - len(self.labels)


class ScriptedServer:
    """In the place of a `HttpClient`.

    Attributes:
        address: for messages.
        label: of the weights in service.
        asked: all requests, in order.
        open: requests that have not ended, by name.
        aborts: names of requests whose end was asked for.
        forget: it gives no answer.
    """

    def __init__(self, label: str) -> None:
        self.address = "http://scripted"
        self.label = label
        self.asked: list[Request] = []
        self.open: dict[str, Request] = {}
        self.aborts: list[str] = []
        self.forget = False

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of all requests, in order."""
        return [request.body for request in self.asked]

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """/generate."""
        assert path == "/generate"
        request = self.open[body["rid"]] = Request(body)
        self.asked.append(request)
        try:
            while True:
                data = await request.events.get()
                if "cut off" in data:
                    return
                if "breaks off" in data:
                    raise data["breaks off"]
                yield data
        finally:
            self.open.pop(body["rid"], None)

    async def get(self, path: str) -> Any:
        """/model_info."""
        assert path == "/model_info"
        if self.forget:
            raise EngineError("nobody answers")
        return {}

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """/abort_request."""
        assert path == "/abort_request"
        self.aborts.append(body["rid"])
        request = self.open.pop(body["rid"], None)
        if request is not None:
            self._send(request, {"type": "abort", "message": "asked for"})
        return {}

    def sample(self, count: int, *, late: bool = False) -> None:
        """Samples so many tokens of every request.

        Args:
            late: they are not sent before the next ones are, and bear the version that is in service then.
        """
        for name, request in list(self.open.items()):
            new = min(count, request.left)
            request.labels += [self.label] * new
            request.underway += new
            if not late or not request.left:
                ended = {"type": "length"} if not request.left else None
                if ended:
                    del self.open[name]
                self._send(request, ended)

    def finish(self, data: dict[str, Any] | None = None, reason: dict[str, Any] | None = None) -> None:
        """Ends every request: with an event of its own, or for a reason."""
        for request in self.open.values():
            if data is not None:
                request.events.put_nowait(data)
            else:
                self._send(request, reason)
        self.open.clear()

    def break_off(self, error: Exception) -> None:
        """The connection of every request fails."""
        self.finish({"breaks off": error})

    def _send(self, request: Request, reason: dict[str, Any] | None) -> None:
        first = len(request.body["input_ids"]) + len(request.labels) - request.underway
        ids = list(range(first, first + request.underway))
        request.underway = 0
        meta: dict[str, Any] = {
            "completion_tokens": len(request.labels),
            "output_token_logprobs": [[-float(token), token, None] for token in ids],
            "weight_version": self.label,
        }
        if reason is not None:
            meta |= {"finish_reason": reason, "weight_versions": _spans(request.labels)}
        request.events.put_nowait({"output_ids": ids, "meta_info": meta})


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    spans, begin = [], 0
    for label, tokens in itertools.groupby(labels):
        end = begin + len(list(tokens))
        spans.append({"version": label, "start": begin, "end": end})
        begin = end
    return spans
