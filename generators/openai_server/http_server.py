"""The endpoint over HTTP.

Invariants:

- Every refusal has OpenAI's form and the status that its client library acts on.
- A public listener beyond loopback needs the mesh's token or TLS, as every service. Without a token no foreign web page
  is answered.
- The listener for agents of this generator is bound to loopback and speaks plain HTTP, also in a mesh with TLS. It
  serves sessions of training alone, each by its own key.
- Connections and bodies are bounded, in number, size and time, and large ones are read and written in threads. Whatever
  clients send, the generator keeps its leases and answers others. A chat template alone is not bounded: it is the
  model's, and the model is the operator's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from rollmesh.generators.openai_server.completion_stream import CompletionCall, Finished, TextDelta
from rollmesh.generators.openai_server.completions import Completions
from rollmesh.generators.openai_server.conversations.sessions import Session, Sessions
from rollmesh.generators.openai_server.errors import INVALID, ApiError, no_model, no_path, session_ended
from rollmesh.generators.openai_server.http_responses import (
    events_of,
    refusal_response,
    response_json,
    send_part,
    send_response,
    session_json,
)
from rollmesh.generators.openai_server.metrics import EndpointMetrics
from rollmesh.generators.openai_server.origins import check_caller
from rollmesh.generators.openai_server.request_bodies import BodyReader
from rollmesh.generators.openai_server.requests import ChatRequest, Form, TextRequest, parse
from rollmesh.generators.openai_server.response_format import END_OF_STREAM, ResponseFormatter, event
from rollmesh.generators.openai_server.worker_threads import Workers
from rollmesh.mesh.access.tls import server_context
from rollmesh.mesh.addresses import host_of, join_address
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PortInUseError, RollmeshError
from rollmesh.mesh.http.connections import Connections
from rollmesh.mesh.http.server import http_key, is_bearer
from rollmesh.mesh.http.server import log as http_log
from rollmesh.mesh.runtime.open_files import connections_here
from rollmesh.mesh.runtime.service import advertised_address

log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
_CLIENT_LEFT = 499
# Large requests in work at once: of this generator's agents, and of all other clients.
_AGENT_THREADS, _OTHER_THREADS = 2, 1
# Seconds that a connection stays without a request, or with the head of one that is not whole. Clients' libraries give
# theirs up sooner, and so send nothing into one that is just being closed.
_IDLE_S = 20.0
# Under which a request keeps its session of training.
_TRAINING = "rollmesh.training"
# Seconds that connections get at the end.
_CLOSE_S = 1.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Listener(NamedTuple):
    """Threads, bodies and connections of one listening socket: clients take none from the generator's own agents."""

    workers: Workers
    bodies: BodyReader
    connections: Connections


_LISTENER = web.AppKey("listener", _Listener)


def _new_listener(threads: int, name: str, context: int, connections: int) -> _Listener:
    return _Listener(Workers(threads, name), BodyReader(context), Connections(connections))


class EndpointServer:
    """Serves completions.

    Args:
        completions: answers.
        sessions: of all clients.
        metrics: counts.
        model: name of the model that is served.
        security: of the mesh.
        created: Unix time in seconds of the model.

    Attributes:
        url: where clients find it; empty: nowhere but on this machine.
        agents_url: where the generator's own agents find it; empty before `start`.
    """

    def __init__(
        self,
        completions: Completions,
        sessions: Sessions,
        metrics: EndpointMetrics,
        *,
        model: str,
        security: SecuritySection,
        created: int,
    ) -> None:
        self._completions = completions
        self._sessions = sessions
        self._metrics = metrics
        metrics.sessions.set_function(lambda: len(sessions))
        self._model = model
        self._security = security
        self._created = created
        self._agents_listener = _new_listener(
            _AGENT_THREADS, "endpoint-agents", completions.context, connections_here().agents
        )
        self._public_listener = _new_listener(
            _OTHER_THREADS, "endpoint", completions.context, connections_here().requests
        )
        self._names: frozenset[str] = frozenset()
        self._runners: list[web.AppRunner] = []
        self.url = ""
        self.agents_url = ""

    async def start(self, *, host: str, port: int, advertise: str | None, public: bool) -> None:
        """Listens: for the generator's own agents, and at `host:port` where it is to be `public`.

        Raises:
            ConfigError: a non-loopback address without a key; an unreadable key or certificate.
            PortInUseError: the port is taken.
        """
        bound = await self._listen(self._app(None, self._agents_listener), _LOOPBACK, 0, None)
        self.agents_url = f"http://{_LOOPBACK}:{bound}"
        if not public:
            return
        key = http_key(
            self._security.endpoint_key_file,
            "security.endpoint_key_file (--endpoint-key-file)",
            host,
            "the endpoint",
            self._security,
        )
        tls = server_context(self._security)
        bound = await self._listen(self._app(key, self._public_listener), host, port, tls)
        name = advertised_address(host, bound, host_of(advertise) if advertise else None)
        self._names = frozenset({host_of(name).lower(), socket.gethostname().lower()})
        self.url = f"{'https' if tls else 'http'}://{name}"
        log.info("OpenAI-compatible endpoint at %s/v1, model %s", self.url, self._model)

    async def close(self) -> None:
        """Stops listening and ends running answers."""
        for listener in (self._agents_listener, self._public_listener):
            await listener.connections.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        for listener in (self._agents_listener, self._public_listener):
            listener.workers.close()

    async def _listen(self, app: web.Application, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            logger=http_log,
            access_log=None,
            shutdown_timeout=_CLOSE_S,
            keepalive_timeout=_IDLE_S,
            auto_decompress=False,
        )
        await runner.setup()
        self._runners.append(runner)
        assert runner.server is not None, "it is set up"
        try:
            return await app[_LISTENER].connections.listen(runner.server, host, port, tls)
        except OSError as error:
            raise PortInUseError(
                f"cannot bind {join_address(host, port)}: {error.strerror}",
                hint="set rollout.endpoint.port, 0 for any free one",
            ) from error

    def _app(self, key: str | None, listener: _Listener) -> web.Application:
        app = web.Application(middlewares=[self._guard(key, listener)])
        app[_LISTENER] = listener
        for prefix in ("/v1", "/sessions/{session}/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._text)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{model}}", self._one_model)
        app.router.add_get("/sessions/{session}", self._show)
        app.router.add_delete("/sessions/{session}", self._delete)
        return app

    # ------------------------------------------------------------------------------------------------- admission

    def _guard(self, key: str | None, listener: _Listener) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self._admit(request, key, agents=listener is self._agents_listener)
                with listener.connections.answering(request):
                    return await send_response(request, await handler(request))
            except web.HTTPNotFound:
                return refusal_response(no_path(request.method, request.path))
            except web.HTTPException as error:
                return refusal_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
            except ApiError as error:
                return refusal_response(error)
            except RollmeshError as error:
                log.warning("call to %s failed: %s", request.path, error)
                return refusal_response(ApiError(500, str(error), reason=error.code, kind="server_error"))
            except ConnectionError as error:
                log.info("a client of %s left before the end of its answer: %s", request.path, error)
                if request.transport is not None:
                    request.transport.abort()
                # It is not sent: aiohttp takes the error itself for one of this server.
                return web.Response(status=_CLIENT_LEFT)
            except Exception as error:  # any bug is answered in OpenAI's form, and logged
                log.exception("call to %s failed", request.path)
                return refusal_response(ApiError(500, f"{type(error).__name__}: {error}", kind="server_error"))

        return guard

    def _admit(self, request: web.Request, key: str | None, *, agents: bool) -> None:
        name = request.match_info.get("session", "")
        session = self._sessions.find(name) if name else None
        if agents and (session is None or session.policy is None):
            # The name is known to the session's agent alone: it is late, not wrong.
            raise session_ended(name) if name else ApiError(404, "only sessions of agents are served here")
        if session is not None and session.policy is not None:
            # However long its body takes: no call goes to another session that comes to bear the name.
            request[_TRAINING] = session
        expected = session.key if session is not None and session.key else key
        if not expected:
            check_caller(request.headers.get("Host", ""), request.headers.get("Origin"), self._names)
        if expected and not is_bearer(request.headers.get("Authorization", ""), expected):
            raise ApiError(401, "missing or wrong API key (security.endpoint_key_file)", reason="invalid_api_key")

    # ------------------------------------------------------------------------------------------------ completions

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer_counted("chat", request)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._answer_counted("text", request)

    async def _answer_counted(self, form: Form, request: web.Request) -> web.StreamResponse:
        status = _CLIENT_LEFT
        try:
            response = await self._answer(form, request)
            status = response.status
        except ApiError as error:
            status = error.status
            raise
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            status = 500
            raise
        finally:
            self._metrics.requests.labels(form, str(status)).inc()
        return response

    async def _answer(self, form: Form, request: web.Request) -> web.StreamResponse:
        listener, session = request.app[_LISTENER], request.get(_TRAINING)
        training = session is not None
        async with listener.bodies.read(request) as body:
            call = await listener.workers.run(len(body), _read, form, body, training=training)
            name = request.match_info.get("session", "")
            if session is not None:
                self._count_forced(session, call.forced())
            elif call.model != self._model:
                raise no_model(call.model, self._model)
            elif name:
                session = self._sessions.get_or_create(name)
            completion = await self._completions.prepare(call, session, listener.workers, size=len(body))
        formatter = ResponseFormatter(call, self._completions.codec.token, self._model)
        async with self._completions.sampling(completion):
            if call.stream:
                response, answers = await self._stream(request, formatter, completion)
            else:
                answers = [piece async for piece in completion.pieces() if isinstance(piece, Finished)]
                text = await listener.workers.run(
                    completion.prompt_tokens + _sampled_tokens(answers), response_json, formatter, completion, answers
                )
                response = web.Response(text=text, content_type="application/json")
            self._metrics.tokens.labels("prompt").inc(completion.prompt_tokens)
            self._metrics.tokens.labels("sampled").inc(_sampled_tokens(answers))
            return response

    async def _stream(
        self, request: web.Request, formatter: ResponseFormatter, completion: CompletionCall
    ) -> tuple[web.StreamResponse, list[Finished]]:
        answers: list[Finished] = []
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        workers = request.app[_LISTENER].workers
        try:
            async for piece in completion.pieces():
                size = len(piece.ids) if isinstance(piece, TextDelta) else len(piece.text)
                await send_part(response, await workers.run(size, events_of, formatter, piece, completion))
                if isinstance(piece, Finished):
                    answers.append(piece)
            closing = [event(chunk) for chunk in formatter.usage_chunks(completion, answers)]
            await send_part(response, b"".join([*closing, END_OF_STREAM]))
        except ApiError as error:
            # The status has gone out already.
            await send_part(response, event(error.body()))
        await response.write_eof()
        return response, answers

    def _count_forced(self, session: Session, forced: list[str]) -> None:
        for name in forced:
            self._metrics.forced.labels(name).inc()
        if forced and not session.counts["forced"]:
            log.debug("session %s: %s ignored, the run's configuration decides", session.name, ", ".join(forced))
        session.counts["forced"] += bool(forced)

    # ------------------------------------------------------------------------------------------------- the others

    def _model_entry(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "rollmesh"}

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_entry()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self._model:
            raise no_model(request.match_info["model"], self._model)
        return web.json_response(self._model_entry())

    def _session(self, request: web.Request) -> Session:
        name = request.match_info["session"]
        session = self._sessions.find(name)
        if session is None:
            raise ApiError(404, f"there is no session {name}", reason="session_not_found")
        return session

    async def _show(self, request: web.Request) -> web.Response:
        session = self._session(request)
        text = await request.app[_LISTENER].workers.run(session.record.tokens, session_json, session)
        return web.Response(text=text, content_type="application/json")

    async def _delete(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if session.policy is not None:
            raise ApiError(403, "a session of training is ended by its generator", kind=INVALID)
        self._completions.abort(session)
        self._sessions.forget(session)
        return web.json_response({"id": session.name, "object": "session.deleted", "deleted": True})


def _read(form: Form, body: bytes, *, training: bool) -> ChatRequest | TextRequest:
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    return parse(form, fields, training=training)


def _sampled_tokens(answers: Sequence[Finished]) -> int:
    return sum(len(answer.result.sampled) for answer in answers)
