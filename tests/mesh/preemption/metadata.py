"""Metadata services of three clouds on this machine: they ask for the same headers, and answer alike."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from aiohttp import web
from aiohttp.typedefs import Handler


class MetadataServices:
    """One application with the paths of all three.

    Attributes:
        preempted: what it says from now on.
        left_s: seconds until the machine's end, as AWS and Azure say it.
        behind_s: seconds by which the clock of the service is behind ours.
        sessions: of AWS's service that are open; without them it refuses.
        opened: sessions ever opened.
        instead: text that something else answers in their place; empty: nothing does.
    """

    def __init__(self) -> None:
        self.preempted = False
        self.left_s = 25.0
        self.behind_s = 0.0
        self.sessions: set[str] = set()
        self.opened = 0
        self.instead = ""

    def application(self) -> web.Application:
        """To serve."""
        application = web.Application(middlewares=[self._intercepted])
        application.add_routes(
            [
                web.put("/latest/api/token", self._open_session),
                web.get("/latest/meta-data/spot/instance-action", self._instance_action),
                web.get("/computeMetadata/v1/instance/preempted", self._preempted),
                web.get("/metadata/instance/compute/name", self._name),
                web.get("/metadata/scheduledevents", self._scheduled_events),
            ]
        )
        return application

    @web.middleware
    async def _intercepted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        return web.Response(text=self.instead) if self.instead else await handler(request)

    @property
    def _now(self) -> datetime:
        return datetime.now(UTC) - timedelta(seconds=self.behind_s)

    @property
    def _end(self) -> datetime:
        return self._now + timedelta(seconds=self.left_s)

    def _answer(self, text: str) -> web.Response:
        return web.Response(text=text, headers={"Date": format_datetime(self._now, usegmt=True)})

    async def _open_session(self, request: web.Request) -> web.Response:
        assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        self.opened += 1
        self.sessions.add(f"session-{self.opened}")
        return self._answer(f"session-{self.opened}")

    async def _instance_action(self, request: web.Request) -> web.Response:
        if request.headers.get("X-aws-ec2-metadata-token") not in self.sessions:
            raise web.HTTPUnauthorized
        if not self.preempted:
            raise web.HTTPNotFound
        return self._answer(json.dumps({"action": "terminate", "time": f"{self._end:%Y-%m-%dT%H:%M:%SZ}"}))

    async def _preempted(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            raise web.HTTPForbidden
        return self._answer("TRUE" if self.preempted else "FALSE")

    async def _name(self, request: web.Request) -> web.Response:
        _check_azure(request)
        return self._answer("gpu_7")

    async def _scheduled_events(self, request: web.Request) -> web.Response:
        _check_azure(request)
        others = {"EventType": "Preempt", "Resources": ["gpu_8"], "NotBefore": ""}
        own = {"EventType": "Preempt", "Resources": ["gpu_7"], "NotBefore": format_datetime(self._end, usegmt=True)}
        return self._answer(json.dumps({"DocumentIncarnation": 1, "Events": [others, own][: 1 + self.preempted]}))


def _check_azure(request: web.Request) -> None:
    if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
        raise web.HTTPBadRequest
