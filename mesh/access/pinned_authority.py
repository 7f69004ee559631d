"""The certificate of a mesh's authority, from a caller that knows only its fingerprint.

gRPC takes a root certificate and no check of its own, so the caller needs the whole certificate. It is in the handshake
of every front whose certificate file ends with it. The handshake is read without trust. Only a certificate with the
pinned fingerprint is used, and then every connection is verified against it as usual, names included.

Invariants: nothing but a handshake is sent before the authority is known. No claim, grant or request leaves the node.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
from collections.abc import Sequence

import tenacity

from rollmesh.mesh.addresses import split_address
from rollmesh.mesh.errors import UnauthenticatedError, UnreachableError

# Seconds for a connection and its handshake.
_TRY_S = 5.0
_NOT_SENT = (
    "give the fronts a security.tls_cert that ends with the authority's certificate (rollmesh certificates writes it "
    "so, or: cat node.pem ca.pem); if the mesh has a new authority, make a new join string"
)


def fetch_authority(addresses: Sequence[str], fingerprint: bytes, *, retry_s: float) -> bytes:
    """The authority's certificate, PEM, from the first front that shows it.

    Args:
        addresses: of fronts, `host:port`.
        fingerprint: SHA-256 of its DER form.
        retry_s: seconds for which fronts that do not answer are tried again.

    Raises:
        UnauthenticatedError: fronts answer, and none shows that certificate.
        UnreachableError: none has answered in that time.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnreachableError),
        stop=tenacity.stop_after_delay(retry_s),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=2.0),
        reraise=True,
    )
    return retrying(_fetch_once, addresses, fingerprint)


def _fetch_once(addresses: Sequence[str], fingerprint: bytes) -> bytes:
    others, failures = [], []
    for address in addresses:
        try:
            chain = _shown_by(address)
        except OSError as error:
            failures.append(f"{address}: {error}")
            continue
        for der in chain:
            if hmac.compare_digest(hashlib.sha256(der).digest(), fingerprint):
                return ssl.DER_cert_to_PEM_cert(der).encode()
        others.append(address)
    if others:
        raise UnauthenticatedError(
            f"{', '.join(others)} does not show the certificate authority of the join string "
            f"(SHA-256 {fingerprint.hex()})",
            hint=_NOT_SENT,
        )
    raise UnreachableError(
        f"no front answers with TLS: {'; '.join(failures)}", hint="is the buffer running, and the address right?"
    )


def _shown_by(address: str) -> list[bytes]:
    """The certificates of a server's handshake, DER, unverified.

    Raises:
        OSError: it does not answer, or not with TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = split_address(address)
    with (
        socket.create_connection((host, port), timeout=_TRY_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return _chain_of(connection)


def _chain_of(connection: ssl.SSLSocket) -> list[bytes]:
    # Public from Python 3.13 on; before, the same is in the object below.
    public = getattr(connection, "get_unverified_chain", None)
    if public is not None:
        return list(public())
    found = connection._sslobj.get_unverified_chain()  # type: ignore[attr-defined]
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in found or ()]
