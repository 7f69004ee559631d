"""A host's certificate with its key, in the forms of join strings and of files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_der_private_key


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate with its key, both in DER form; the key is PKCS#8 without a password."""

    certificate: bytes
    key: bytes = field(repr=False)

    def pem(self, authority: bytes) -> bytes:
        """The certificate for `security.tls_cert`: PEM, followed by its authority's."""
        return ssl.DER_cert_to_PEM_cert(self.certificate).encode() + authority

    @property
    def key_pem(self) -> bytes:
        """The key for `security.tls_key`.

        Raises:
            ValueError: it is damaged.
        """
        key = load_der_private_key(self.key, None)
        return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
