"""gRPC as the mesh uses it: channels, servers, credentials, TLS, and errors that keep their type across the wire.

Invariants: a non-loopback bind needs a token unless insecurity was asked for; a handler of a mesh with a token sees
calls that their role and member may make, and no others (`mesh.access`); a `RollmeshError` raised in a
handler reaches the caller as the same class with message, hint and field; every unary call made through
`call_with_retry` has a deadline per try and one for all tries.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
import tenacity
from google.protobuf.message import DecodeError

from rollmesh.mesh import errors
from rollmesh.mesh.access.authenticated_channel import AUTHORIZATION, Claiming
from rollmesh.mesh.access.credentials import Credentials, Identity, SharedKey
from rollmesh.mesh.access.permissions import HEALTH, HEALTH_CHECK, check_member, check_role, contract_of, names_member
from rollmesh.mesh.access.tls import channel_credentials, server_credentials, unreached_hint
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.config.models import SecuritySection
from rollmesh.mesh.errors import ConfigError, PortInUseError, RollmeshError, UnauthenticatedError, UnreachableError
from rollmesh.mesh.rpc.held_ports import is_held
from rollmesh.mesh.rpc.retries import Retries
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.runtime.open_files import connections_here

log = logging.getLogger(__name__)
T = TypeVar("T")

_STATUS = {
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "config": grpc.StatusCode.INVALID_ARGUMENT,
    "data": grpc.StatusCode.INVALID_ARGUMENT,
    "payload": grpc.StatusCode.INVALID_ARGUMENT,
    "store": grpc.StatusCode.UNAVAILABLE,
    "unreachable": grpc.StatusCode.UNAVAILABLE,
    "fenced": grpc.StatusCode.FAILED_PRECONDITION,
    "takeover_refused": grpc.StatusCode.FAILED_PRECONDITION,
    "old_generation": grpc.StatusCode.FAILED_PRECONDITION,
    "lost_state": grpc.StatusCode.FAILED_PRECONDITION,
    "weights": grpc.StatusCode.NOT_FOUND,
}
# Failures of the connection or of a service behind it: the same call may succeed later.
_TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
# Details of the status INTERNAL that gRPC's client makes up where it could not write.
_LOCAL_FAILURE = "Internal error from Core"
# Seconds of silence after which a peer is asked for a sign of life; it has 0.8 times as long to give one. A peer that
# hangs or is cut off is thus noticed well within a lease term.
KEEPALIVE_S = 5.0
# Seconds after which a service closes a connection that has not begun to speak HTTP/2, and TLS where that is asked for.
HANDSHAKE_S = 10.0
# Calls that a connection may have at once; others wait at their caller. A member has some tens of streams and calls.
MOST_CALLS = 1024
# Bytes of a call's headers, as HTTP/2 counts them; with a claim they are about one KiB.
MOST_HEADERS = 8 << 10


def _error_classes() -> dict[str, type[RollmeshError]]:
    found = (value for value in vars(errors).values() if isinstance(value, type))
    return {cls.code: cls for cls in found if issubclass(cls, RollmeshError)}


def _options(max_message_mb: int, keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_mb << 20),
        ("grpc.max_receive_message_length", max_message_mb << 20),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_s * 800)),
        # The ping's own deadline; without it a minute, whatever the one above says.
        ("grpc.http2.ping_timeout_ms", round(keepalive_s * 800)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # What a server puts up with.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # A message of a megabyte is one frame, and windows hold several: 7 % less CPU per payload of 16 KB.
        ("grpc.http2.max_frame_size", 1 << 20),
        ("grpc.http2.lookahead_bytes", 8 << 20),
        ("grpc.http2.bdp_probe", 0),
    ]


# ------------------------------------------------------------------------------------------------- client side


def open_channel(
    address: str,
    security: SecuritySection,
    caller: Identity | Credentials | None = None,
    *,
    max_message_mb: int = 64,
    keepalive_s: float = KEEPALIVE_S,
) -> grpc.aio.Channel:
    """A channel to `host:port` (or `grpc://host:port`) that reconnects by itself within a second or two.

    Args:
        caller: in whose name calls are made; none: as the token file makes the caller.
    """
    options = [
        *_options(max_message_mb, keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # For all its name, what one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    target = address.removeprefix("grpc://")
    credentials = caller if isinstance(caller, Credentials) else credentials_of(security, caller)
    tls = channel_credentials(security)
    if tls is not None:
        channel = grpc.aio.secure_channel(target, tls, options=options)
    else:
        channel = grpc.aio.insecure_channel(target, options=options)
    return Claiming(channel, credentials) if credentials else channel


def to_rollmesh_error(error: grpc.RpcError, what: str) -> RollmeshError:
    """Turns a failed call into the typed error that the service raised, or `UnreachableError`.

    Args:
        error: as caught (`grpc.aio.AioRpcError`).
        what: names the call and the address for the reader.
    """
    status = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    details = (error.details() if isinstance(error, grpc.aio.AioRpcError) else None) or str(error)
    trailing = dict(_trailing(error) or ())
    cls = _error_classes().get(str(trailing.get("rollmesh-code", "")))
    hint = str(trailing.get("rollmesh-hint", ""))
    if cls is errors.PayloadError:
        return errors.PayloadError(str(trailing.get("rollmesh-field", "message")), details, hint=hint)
    if cls is not None:
        return cls(details, hint=hint)
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(f"{what}: {details}", hint="does it want a token of its own?")
    if is_transient(error):
        return UnreachableError(f"{what}: {details}", hint=unreached_hint(details))
    return RollmeshError(f"{what}: {status.name if status else 'failed'}: {details}")


def _trailing(error: grpc.RpcError) -> Any:
    return error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else None


def is_transient_code(code: grpc.StatusCode) -> bool:
    """Whether repeating a call that ended so may help (connection lost, deadline, store briefly away)."""
    return code in _TRANSIENT


def is_transient(error: BaseException) -> bool:
    """Whether repeating the call that raised this may help."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    # A message that is written while its stream ends fails in the client, and gRPC then reports that in place of the
    # status with which the stream ended. The next try tells.
    lost_status = error.code() is grpc.StatusCode.INTERNAL and error.details() == _LOCAL_FAILURE
    return lost_status or is_transient_code(error.code())


async def call_with_retry(call: Callable[[], Awaitable[T]], *, retry_s: float, what: str) -> T:
    """Repeats an idempotent call while its failures are transient.

    Args:
        call: makes one try; sets its own deadline.
        retry_s: seconds of failures in a row after which it gives up (`mesh.rpc.retries`).
        what: names the call for errors and logs.

    Raises:
        RollmeshError: the typed error, or `UnreachableError` when the time is up.
    """
    retries = Retries(retry_s)
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=lambda _state: retries.failed(),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
        reraise=True,
    )
    try:
        async for attempt in retrying:
            with attempt:
                return await call()
    except grpc.aio.AioRpcError as error:
        raise to_rollmesh_error(error, what) from error
    raise UnreachableError(f"{what}: no try was made")


# ------------------------------------------------------------------------------------------------- server side


Decoders = Mapping[str, Callable[[bytes], Any]]


class _Guard(grpc.aio.ServerInterceptor):
    """Lets in who may call, and turns typed errors into statuses, for all kinds of handlers.

    Of who may not, nothing is read: its messages would take memory.
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
    """Anyone may say this."""


def _refusing(error: RollmeshError) -> Any:
    async def refuse(_requests: Any, context: Any) -> None:
        await abort(context, error)

    # On the wire all kinds of calls are alike, and a stream's messages come only when they are asked for.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _answering_unread(check: Any) -> Any:
    """A health check that tells of the service as a whole, whatever was asked."""

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
    """What a handler has serialized itself goes out as it is."""
    return lambda message: message if type(message) is bytes else serialize(message)


class _Undecodable:
    """Stands for a request that is no message: gRPC would answer it without a type."""

    def __init__(self, error: DecodeError) -> None:
        self.error = errors.PayloadError("message", str(error), hint="caller and service speak different contracts")


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


async def abort(context: Any, error: RollmeshError) -> None:
    """Ends a call with a typed error."""
    trailing = [("rollmesh-code", error.code), ("rollmesh-hint", _ascii(error.hint))]
    if isinstance(error, errors.PayloadError):
        trailing.append(("rollmesh-field", _ascii(error.field)))
    await context.abort(_status_of(error), error.message, trailing_metadata=tuple(trailing))


def _status_of(error: RollmeshError) -> grpc.StatusCode:
    """That of its class, or of the nearest class above that has one."""
    codes = (getattr(cls, "code", "") for cls in type(error).__mro__)
    return next((_STATUS[code] for code in codes if code in _STATUS), grpc.StatusCode.INTERNAL)


def _ascii(text: str) -> str:
    """What metadata may hold: without control characters, which gRPC refuses."""
    return "".join(c if " " <= c <= "~" else " " if c == "\n" else "?" for c in text)


def new_server(
    security: SecuritySection,
    identity: Identity | None = None,
    *,
    key: SharedKey | None = None,
    max_message_mb: int = 64,
    decoders: Decoders = MappingProxyType({}),
) -> grpc.aio.Server:
    """A server whose handlers may raise `RollmeshError`; lets in who may call where a token is configured.

    Streaming handlers must be async generators (`yield`), unary ones coroutines.

    Args:
        security: token and TLS.
        identity: of the service.
        key: of a service outside the mesh; goes before the token.
        max_message_mb: largest message in and out.
        decoders: by method, what parses its requests in place of the generated code: into something whose `message`
            is the request. They raise `DecodeError`.
    """
    options = [
        *_options(max_message_mb),
        # Beside the socket that holds its port, where there is one.
        ("grpc.so_reuseport", int(is_held())),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_concurrent_streams", MOST_CALLS),
        # Of headers between the two a server refuses some by chance: so there is nothing between.
        ("grpc.max_metadata_size", MOST_HEADERS),
        ("grpc.absolute_max_metadata_size", MOST_HEADERS),
        ("grpc.max_allowed_incoming_connections", connections_here().calls),
    ]
    return grpc.aio.server(interceptors=[_Guard(key or credentials_of(security, identity), decoders)], options=options)


def check_exposure(host: str, security: SecuritySection) -> None:
    """Refuses an address to bind that others could reach without a token; TLS alone says who no one is.

    Raises:
        ConfigError: a non-loopback address without a token.
    """
    if is_loopback(host):
        return
    if security.token_file is None and not security.allow_insecure:
        raise ConfigError(
            f"refusing to bind {host}: others could reach it without a token",
            hint="set security.token_file (--token-file, see rollmesh token), or security.allow_insecure: true",
        )
    if security.tls_cert is None:
        log.warning(
            "%s is served without TLS: who is on the network reads along, and can call as those it hears",
            host,
        )


def bind(server: grpc.aio.Server, host: str, port: int, security: SecuritySection) -> int:
    """Binds `host:port` (0 picks a free port) and returns the port.

    Raises:
        ConfigError: a non-loopback address without a token, or files of TLS that cannot be used.
        PortInUseError: the port is taken.
    """
    check_exposure(host, security)
    tls = server_credentials(security)
    target = f"{host}:{port}"
    try:
        bound = server.add_secure_port(target, tls) if tls is not None else server.add_insecure_port(target)
    except RuntimeError as error:
        raise PortInUseError(
            f"cannot bind {target}: {error}", hint="choose another port, 0 for any free one"
        ) from error
    if bound == 0:
        raise PortInUseError(f"cannot bind {target}", hint="choose another port, 0 for any free one")
    return int(bound)
