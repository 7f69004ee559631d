"""A mesh's certificate authority, and certificates of its hosts (X.509, RFC 5280).

Invariants: a certificate's file ends with that of its authority. A caller that knows only the authority's fingerprint
receives it in the handshake (`mesh.access.pinned_authority`). Keys are P-256, which every TLS library
takes. All begin to be valid a day before they are made, since clocks of hosts differ.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rollmesh.mesh.access.issued_certificate import IssuedCertificate
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import check_closed

# Days from now to the beginning of its validity.
_BACKDATED = -1.0
# Life of a new authority; its certificates end much earlier.
_AUTHORITY_DAYS = 3650
OWN_HOST = ("localhost", "127.0.0.1", "::1")
"""Names by which a host calls its own services."""


class CertificateAuthority:
    """Issues certificates to hosts of one mesh.

    Args:
        certificate: its own.
        key: signs.
    """

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def new(cls, name: str = "rollmesh authority") -> CertificateAuthority:
        """A new authority of that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject, identifier = _common_name(name), x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        built = (
            _builder(subject, subject, key.public_key(), _AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
        )
        return cls(built.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: Path, key: Path) -> CertificateAuthority:
        """The authority in two PEM files.

        Raises:
            ConfigError: they cannot be read or used, or the key is not closed to other users.
        """
        check_closed(key, "the authority's key")
        try:
            found = x509.load_pem_x509_certificate(certificate.read_bytes())
            private = load_pem_private_key(key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{certificate} and {key} are no authority with its key: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
            raise ConfigError(f"{key} is not the key of {certificate}", hint="rollmesh certificates makes both")
        return cls(found, private)

    @property
    def pem(self) -> bytes:
        """Its certificate, for `security.tls_ca`."""
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """Its private key."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def issue(
        self, name: str, hosts: Iterable[str], days: float = 365.0, begins_in_days: float = _BACKDATED
    ) -> IssuedCertificate:
        """A certificate for servers and callers.

        Args:
            name: of its holder, for people.
            hosts: DNS names and IP addresses under which others reach it.
            days: until it ends.
            begins_in_days: until it begins to be valid; by default it already is.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_general_name(host) for host in dict.fromkeys(hosts)]
        built = (
            _builder(self._certificate.subject, _common_name(name), key.public_key(), days, begins_in_days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        signed = built.sign(self._key, hashes.SHA256())
        return IssuedCertificate(
            signed.public_bytes(Encoding.DER),
            key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
        )


def fingerprint_of(pem: bytes, source: str) -> bytes:
    """SHA-256 of the authority in PEM, as `openssl x509 -fingerprint -sha256` computes it.

    It is the last certificate there: the only one of an authority's file, and the end of a host's.

    Args:
        source: names the file in errors.

    Raises:
        ConfigError: there is none.
    """
    try:
        return hashlib.sha256(x509.load_pem_x509_certificates(pem)[-1].public_bytes(Encoding.DER)).digest()
    except ValueError as error:
        raise ConfigError(f"{source} holds no certificate: {error}", hint="a PEM file") from error


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    begins_in_days: float = _BACKDATED,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    begins, ends = (now + datetime.timedelta(days=each) for each in (begins_in_days, days))
    return builder.not_valid_before(begins).not_valid_after(ends)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
