"""Tokens, keys and certificates: readable, closed to others, valid now and for a while, and of one another."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from rollmesh.doctor.findings import Finding, ok, problem, warning
from rollmesh.mesh.access.secret_files import check_keys, read_key
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.addresses import host_of, is_unspecified
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError, RollmeshError
from rollmesh.mesh.private_files import check_closed

SECRETS, CERTIFICATES = "tokens and keys", "certificates"
_SOON = datetime.timedelta(days=14)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The parts of a certificate that are judged.

    Attributes:
        key: of the configuration.
        path: of the file.
        begins, ends: of its validity, in UTC.
        hosts: names and addresses that it is good for.
        fits_key: it belongs to the private key; None: none is named.
        signed: it was signed by the authority of `security.tls_ca`; None: none is named.
    """

    key: str
    path: str
    begins: datetime.datetime
    ends: datetime.datetime
    hosts: Sequence[str] = ()
    fits_key: bool | None = None
    signed: bool | None = None


def check_secrets(config: Config) -> Iterator[Finding]:
    """Files with tokens and keys: there, not empty, closed to other users."""
    security = config.security
    named: dict[str, Path | None] = {
        "metrics_key_file": security.metrics_key_file,
        "endpoint_key_file": security.endpoint_key_file,
    }
    examined: list[Callable[[], object]] = [partial(credentials_of, security, None), partial(check_keys, config)]
    examined += [partial(read_key, path, f"security.{name}") for name, path in named.items() if path is not None]
    if security.tls_key is not None:
        examined.append(partial(check_closed, security.tls_key, "security.tls_key"))
    found = []
    for examine in examined:
        try:
            examine()
        except RollmeshError as error:
            found.append(problem(SECRETS, error.message, error.hint))
    yield from found
    if not found:
        reward = config.reward
        own_keys = [tls.key for tls in reward.tls.values()]
        paths = [security.token_file, *named.values(), *reward.key_files.values(), *own_keys]
        count = sum(path is not None for path in paths)
        yield ok(SECRETS, f"{count} file(s) can be read, by this user alone" if count else "the run makes its own")


def check_certificates(config: Config) -> Iterator[Finding]:
    """The certificates of `security`, against one another and against the addresses of the services."""
    security = config.security
    if security.tls_cert is None and security.tls_ca is None:
        yield ok(CERTIFICATES, "no TLS is configured")
        return
    authority = _load("security.tls_ca", security.tls_ca)
    read = []
    if security.tls_cert is not None:
        own = _load("security.tls_cert", security.tls_cert)
        signed = _leads_to(authority, own) if authority else None
        read.append(_describe("security.tls_cert", security.tls_cert, own[0], security.tls_key, signed=signed))
    for name, path in (("security.tls_ca", security.tls_ca), ("security.tls_client_ca", security.tls_client_ca)):
        if path is not None:
            read += [_describe(name, path, certificate, None) for certificate in _load(name, path)]
    addresses = [host for host in (config.network.advertise, config.network.host) if host and not is_unspecified(host)]
    for certificate in read:
        yield from judge(certificate, addresses[:1], datetime.datetime.now(datetime.UTC))


def judge(certificate: Certificate, addresses: Sequence[str], now: datetime.datetime) -> Iterator[Finding]:
    """Judges one certificate.

    Args:
        certificate: to be judged.
        addresses: at which others reach the services, without ports where possible.
        now: in UTC.
    """
    name = f"{certificate.key} {certificate.path}"
    renew = f"renew it, put the new file in its place, and restart the services ({certificate.key})"
    found = []
    if certificate.ends < now:
        found.append(problem(CERTIFICATES, f"{name} expired on {certificate.ends:%Y-%m-%d %H:%M} UTC", renew))
    elif certificate.ends < now + _SOON:
        left = (certificate.ends - now).total_seconds() / 86400
        found.append(warning(CERTIFICATES, f"{name} ends in {left:.1f} days", renew, days_left=left))
    if certificate.begins > now:
        found.append(
            problem(
                CERTIFICATES,
                f"{name} is valid from {certificate.begins:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M} here",
                "set this machine's clock (`timedatectl`), or wait until then",
            )
        )
    if certificate.fits_key is False:
        found.append(
            problem(
                CERTIFICATES,
                f"{name} and the key of security.tls_key are not a pair",
                "name the key with which the certificate was requested in security.tls_key",
            )
        )
    if certificate.signed is False:
        found.append(
            problem(
                CERTIFICATES,
                f"{name} is not signed by the authority of security.tls_ca: services would not trust one another",
                "name the authority that has signed it in security.tls_ca, on every node",
            )
        )
    found += [
        problem(
            CERTIFICATES,
            f"{name} is good for {', '.join(certificate.hosts)}, and others call {address}",
            f"request one with {address} among its subject alternative names, or set network.advertise to "
            f"{certificate.hosts[0]}",
        )
        for address in addresses
        if certificate.hosts and not _names(certificate.hosts, address)
    ]
    yield from found
    if not found:
        yield ok(CERTIFICATES, f"{name} is valid until {certificate.ends:%Y-%m-%d}")


def _load(key: str, path: Path | None) -> list[x509.Certificate]:
    """The certificates of a PEM file, its owner's first; none without a file.

    Raises:
        ConfigError: there are none in it.
    """
    if path is None:
        return []
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} {path} holds no certificate: {error}", hint="give a PEM file") from error


def _describe(
    key: str, path: Path, own: x509.Certificate, private_key: Path | None, *, signed: bool | None = None
) -> Certificate:
    return Certificate(
        key,
        str(path),
        own.not_valid_before_utc,
        own.not_valid_after_utc,
        _hosts(own) if private_key is not None else (),
        _fits(own, private_key),
        signed,
    )


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return tuple(str(name.value) for name in common)
    dns = names.get_values_for_type(x509.DNSName)
    return (*dns, *map(str, names.get_values_for_type(x509.IPAddress)))


def _fits(certificate: x509.Certificate, private_key: Path | None) -> bool | None:
    if private_key is None:
        return None
    try:
        key = load_pem_private_key(private_key.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return False
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)


def _leads_to(authorities: Sequence[x509.Certificate], chain: Sequence[x509.Certificate]) -> bool:
    """True if an authority has signed the first certificate, or one in the same file that has signed the one before."""
    own, *rest = chain
    if any(_has_signed(authority, own) for authority in authorities):
        return True
    return bool(rest) and _has_signed(rest[0], own) and _leads_to(authorities, rest)


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(hosts: Sequence[str], address: str) -> bool:
    host = host_of(address)
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return any(_matches(known.lower(), host.lower()) for known in hosts)


def _matches(known: str, host: str) -> bool:
    if known.startswith("*."):
        return host.partition(".")[2] == known[2:]
    return known == host
