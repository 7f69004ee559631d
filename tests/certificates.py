"""Certificate authorities of the tests, and what they certify."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates.

    Args:
        folder: where everything is written.
        name: of the authority, and of its file.

    Attributes:
        pem: path of its own certificate.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pem = folder / f"{name}.pem"
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self.pem.write_bytes(self._signed(self._name, self._key, constraints).public_bytes(Encoding.PEM))

    def certify(self, name: str, *hosts: str, days: tuple[float, float] = (-1.0, 1.0)) -> tuple[Path, Path]:
        """Certificate and key of a holder at these hosts: names or addresses.

        Args:
            days: from now to its beginning and to its end.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        found = x509.SubjectAlternativeName([_host(host) for host in hosts or ("127.0.0.1", "localhost")])
        pem, key_pem = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        pem.write_bytes(self._signed(_named(name), key, found, days).public_bytes(Encoding.PEM))
        key_pem.touch(0o600)
        key_pem.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pem, key_pem

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        extension: x509.ExtensionType,
        days: tuple[float, float] = (-1.0, 1.0),
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now + days[0] * _DAY).not_valid_after(now + days[1] * _DAY)
        critical = isinstance(extension, x509.BasicConstraints)
        return builder.add_extension(extension, critical).sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
