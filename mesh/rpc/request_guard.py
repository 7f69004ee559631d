"""Checks each call before its handler: the caller's role and member, and that its requests can be parsed.

Invariants: a handler of a mesh with a token sees only calls that their role and member may make (`mesh.access`). A
`RollmeshError` raised in a handler ends the call with the status of its class.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rollmesh.mesh.access.authenticated_channel import AUTHORIZATION
from rollmesh.mesh.access.credentials import Credentials, SharedKey
from rollmesh.mesh.access.permissions import HEALTH, HEALTH_CHECK, check_member, check_role, contract_of, names_member
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.errors import PayloadError, RollmeshError
from rollmesh.mesh.rpc.errors import abort

Decoders = Mapping[str, Callable[[bytes], Any]]


class RequestGuard(grpc.aio.ServerInterceptor):
    """Admits permitted callers and turns typed errors into statuses, for all kinds of handlers.

    Messages of a caller that is refused are not read: they would take memory.
    """

    def __init__(self, credentials: Credentials | SharedKey | None, decoders: Decoders) -> None:
        self._credentials = credentials
        self._decoders = decoders

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return handler
        decode, check = self._decoders.get(details.method), _unchecked
        if self._credentials is not None:
            try:
                caller = self._caller(self._credentials, details)
                check_role(caller, details.method)
            except RollmeshError as error:
                return _answering_unread(handler) if details.method == HEALTH_CHECK else _refusing(error)
            if names_member(details.method):
                check = partial(check_member, caller, details.method, taken_apart=decode is not None)
        if details.method.startswith(HEALTH):
            # Its streams are written, not yielded, and it raises no errors of ours.
            return handler
        return _translating(handler, decode or handler.request_deserializer, check)

    @staticmethod
    def _caller(credentials: Credentials | SharedKey, details: Any) -> Identity:
        given = str(dict(details.invocation_metadata or ()).get(AUTHORIZATION, ""))
        return credentials.check(given.removeprefix("Bearer "), contract_of(details.method))


def _unchecked(_request: Any) -> None:
    """Accepts every request."""


def _refusing(error: RollmeshError) -> Any:
    async def refuse(_requests: Any, context: Any) -> None:
        await abort(context, error)

    # On the wire all kinds of calls are alike, and a stream's messages come only when they are asked for.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _answering_unread(check: Any) -> Any:
    """A health check that reports the service as a whole, whatever was asked."""

    async def answer(_requests: Any, context: Any) -> None:
        await context.write(await check.unary_unary(check.request_deserializer(b""), context))

    return grpc.stream_stream_rpc_method_handler(answer, None, check.response_serializer)


def _translating(handler: Any, decode: Callable[[bytes], Any], check: Callable[[Any], None]) -> Any:
    inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def single(request: Any, context: Any) -> Any:
        try:
            return await inner(_decoded(request, handler, check), context)
        except RollmeshError as error:
            await abort(context, error)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in inner(_decoded(request, handler, check), context):
                yield response
        except RollmeshError as error:
            await abort(context, error)

    return _rebuilt(handler, single, stream, decode)


def _rebuilt(handler: Any, single: Any, stream: Any, decode: Callable[[bytes], Any]) -> Any:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming, handler.response_streaming)]
    behaviour = stream if handler.response_streaming else single
    return make(behaviour, _lenient(decode), _or_bytes(handler.response_serializer))


def _or_bytes(serialize: Any) -> Any:
    """A serializer that passes bytes on unchanged, for handlers that serialize their messages themselves."""
    return lambda message: message if type(message) is bytes else serialize(message)


class _Undecodable:
    """A request that cannot be parsed, kept until its handler runs: gRPC would refuse it without a typed error."""

    def __init__(self, error: DecodeError) -> None:
        self.error = PayloadError("message", str(error), hint="caller and service speak different contracts")


def _lenient(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Undecodable(error)

    return decoded


def _decoded(request: Any, handler: Any, check: Callable[[Any], None]) -> Any:
    """The request or requests, each checked; raises `PayloadError` at the one that is no message."""
    if handler.request_streaming:
        return _decoded_stream(request, check)
    if isinstance(request, _Undecodable):
        raise request.error
    check(request)
    return request


async def _decoded_stream(requests: AsyncIterator[Any], check: Callable[[Any], None]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Undecodable):
            raise request.error
        check(request)
        yield request
