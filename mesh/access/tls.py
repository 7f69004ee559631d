"""TLS of the mesh's services and their callers.

Invariants: files that cannot be used are refused by name before anything is bound or called. (gRPC itself reports that
only in its log.) If clients' certificates have an authority, every service asks for one, over gRPC and HTTP alike.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import check_closed

# Beginning of the keys that name the mesh's own files.
_SECURITY = "security.tls_"
# Messages of gRPC for a connection that has failed, and the setting that prevents each.
_UNREACHED = "is the service running, and the address right?"
_HINTS = {
    "WRONG_VERSION_NUMBER": "it does not speak TLS: give it tls_cert and tls_key, or call it without tls_ca",
    "CERTIFICATE_VERIFY_FAILED": "security.tls_ca (--tls-ca) has to be the authority of its certificate",
    "Hostname Verification": "its certificate (security.tls_cert there) has to name this address",
    # Before any answer: the first message is not TLS, or lacks a certificate.
    "failed to connect to all addresses; last error: UNAVAILABLE: ": "it may want TLS (security.tls_ca, --tls-ca), "
    "or a certificate of its authority (security.tls_cert and tls_key, --tls-cert and --tls-key)",
}


def unreached_hint(details: str) -> str:
    """Advice for a service that was not reached.

    Args:
        details: of gRPC's status.
    """
    return next((hint for sign, hint in _HINTS.items() if sign in details), _UNREACHED)


def server_context(security: SecuritySection) -> ssl.SSLContext | None:
    """The TLS context of a service's HTTP server; None: without TLS.

    Raises:
        ConfigError: a file that cannot be read, or used, or a key that is not closed to other users.
    """
    if security.tls_cert is None or security.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _show(context, security.tls_cert, security.tls_key)
    if security.tls_client_ca is not None:
        _trust(context, security.tls_client_ca, "client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def server_credentials(security: SecuritySection) -> grpc.ServerCredentials | None:
    """The credentials of a service's gRPC server; see `server_context`."""
    if security.tls_cert is None or security.tls_key is None:
        return None
    server_context(security)
    pair, ca = (security.tls_key.read_bytes(), security.tls_cert.read_bytes()), _pem(security.tls_client_ca)
    return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


def channel_credentials(security: SecuritySection) -> grpc.ChannelCredentials | None:
    """The credentials of channels to services; None: without TLS.

    Raises:
        ConfigError: a file that cannot be read, or used.
    """
    if security.tls_ca is None and security.tls_cert is None:
        return None
    return client_credentials(security.tls_ca, security.tls_cert, security.tls_key)


def client_credentials(
    ca: Path | None, cert: Path | None, key: Path | None, where: str = _SECURITY
) -> grpc.ChannelCredentials:
    """The credentials of channels to one server.

    Args:
        ca: its authority; None: the public ones.
        cert, key: the caller's certificate and its key; None: it shows none.
        where: beginning of the configuration keys that name the files, for errors.

    Raises:
        ConfigError: a file that cannot be read, or used, or a key that is not closed to other users.
    """
    client_context(ca, cert, key, where)
    return grpc.ssl_channel_credentials(_pem(ca), _pem(key), _pem(cert))


def client_context(ca: Path | None, cert: Path | None, key: Path | None, where: str = _SECURITY) -> ssl.SSLContext:
    """The TLS context of calls to one HTTPS server; see `client_credentials`."""
    context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        _trust(context, ca, "ca", where)
    if cert is not None and key is not None:
        _show(context, cert, key, where)
    return context


def _show(context: ssl.SSLContext, cert: Path, key: Path, where: str = _SECURITY) -> None:
    check_closed(key, f"{where}key")
    try:
        # With a password, so that for a key that needs one no one is asked at the terminal.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        what = f"{where}cert {cert} and {where}key {key}"
        raise ConfigError(f"{what} cannot be used: {error}", hint="PEM files, the key without a password") from error


def _trust(context: ssl.SSLContext, path: Path, name: str, where: str = _SECURITY) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"{where}{name} {path} cannot be used: {error}", hint="a PEM file") from error


def _pem(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
